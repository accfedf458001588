"""`federate --evaluate`: what clients find apart is what `test` finds in one process, of each and of all."""

import csv
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError
from torchmetrics.classification import BinaryAUROC, BinaryF1Score

from lit_epgan.carriers import deployment
from lit_epgan.carriers.protocol import Endpoint, FederateSettings
from lit_epgan.cli.evaluation import OVERALL, Sums, metrics, refuse_private
from lit_epgan.cli.main import main
from lit_epgan.engine import Answer, Exchange, Message, PlainFederation, merged
from lit_epgan.federated import FedAvg
from lit_epgan.privacy import CentralNoise, RecordNoise
from lit_epgan.runs.config_files import resolve_configs
from tests.federations import plain_trainer
from tests.processes import Started, by_sockets, run_words
from tests.refusals import assert_refused

HOSPITALS = ("site-1", "site-2", "site-3")
WORDS = ["--config", "digits_classifier.yaml", "--data", "BreastCancerDataModule"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run, trained and tested in one process."""
    folder = tmp_path_factory.mktemp("trained")
    words = [*WORDS, "--trainer.default_root_dir", str(folder), "--trainer.max_epochs", "2"]
    run_words([sys.executable, "-m", "lit_epgan", "fit-and-test", *words])
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def evaluated(trained: Path, folder: Path, secure: bool = False, policies: Mapping[str, str] | None = None) -> Any:
    """What the server's table says, by client, of processes of their own; and what each has printed."""
    key, address, terms = (
        secrets.token_hex(16),
        str(folder / "s"),
        FederateSettings(60.0, 60.0, evaluate=True, secure=secure),
    )
    places = {"server": Endpoint("server", address, key, terms=terms)}
    places |= {name: Endpoint("institution", address, key, name, terms) for name in HOSPITALS}
    started = {}
    for name, place in places.items():
        own = ["--ckpt_path", str(trained / "checkpoints" / "last.ckpt")] if name == "server" else []
        if policies and name in policies:
            (folder / f"{name}.yaml").write_text(policies[name])
            own = ["--federation.policy", str(folder / f"{name}.yaml")]
        words = [*resolve_configs(["fit", *WORDS])[1:], *own, "--trainer.default_root_dir", str(folder / name)]
        started[name] = Started([sys.executable, "-m", "lit_epgan", "evaluate", *words], **place.environment())
    codes = {name: each.wait() for name, each in started.items()}
    found = {row["client"]: row for row in rows(folder / "server" / "evaluation.csv")}
    return found, codes, {name: each.printed() for name, each in started.items()}


@pytest.mark.slow
def test_clients_apart_find_what_one_process_finds(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole command but for FLARE, over which test_flare.py evaluates."""
    monkeypatch.setattr(deployment, "simulate", by_sockets)
    checkpoint, folder = str(trained / "checkpoints" / "last.ckpt"), tmp_path / "evaluation"
    words = [*WORDS, "--trainer.default_root_dir", str(tmp_path), "--evaluate", checkpoint]
    assert main(["federate", *words]) == 0
    found, one = {row["client"]: row for row in rows(folder / "evaluation.csv")}, measured(trained)
    assert list(found) == [*HOSPITALS, OVERALL]
    for name, row in found.items():
        for metric in ("accuracy", "cross_entropy"):
            expected = one[metric if name == OVERALL else f"{metric}/client/{name}"]
            assert float(row[metric]) == pytest.approx(expected, rel=1e-6)
    assert int(found[OVERALL]["records"]) == sum(int(found[name]["records"]) for name in HOSPITALS)
    sent = rows(folder / "institutions" / "site-1" / "sent.csv")
    told = {"values.accuracy", "values.cross_entropy", "values.majority@test_metrics.majority@counts", "records"}
    assert {row["entry"] for row in sent} == told


@pytest.mark.slow
def test_masked_sums_tell_of_all_alone(trained: Path, tmp_path: Path) -> None:
    found, _, _ = evaluated(trained, tmp_path, secure=True)
    assert list(found) == [OVERALL]
    assert float(found[OVERALL]["accuracy"]) == pytest.approx(measured(trained)["accuracy"], rel=1e-6)


@pytest.mark.slow
def test_a_clients_policy_counts(trained: Path, tmp_path: Path) -> None:
    found, codes, said = evaluated(trained, tmp_path, policies={"site-2": "algorithms: [FedAvg]"})
    assert list(found) == ["site-1", "site-3", OVERALL]
    assert (codes["server"], codes["site-2"]) == (0, 2)
    assert "the institution's policy does not allow this: algorithms is ['FedAvg']" in said["site-2"]


def measured(folder: Path) -> dict[str, float]:
    """What `test` has logged."""
    (row,) = rows(folder / "test_metrics.csv")
    return {name: float(value) for name, value in row.items() if value}


class Measured(LightningModule):
    """Logs a mean, metrics whose states sum, and one whose states are records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.error, self.f1, self.area = MeanAbsoluteError(), BinaryF1Score(), BinaryAUROC()

    def test_step(self, batch: list[Tensor], index: int) -> None:
        found = self.layer(batch[0]).squeeze(1)
        self.error(found, batch[1]), self.f1(found, batch[1].int()), self.area(found, batch[1].int())
        self.log("loss", (found - batch[1]).square().mean())
        self.log_dict({"error": self.error, "f1": self.f1, "area": self.area})


class Rows(LightningDataModule):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.own = TensorDataset(x, y)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.own, 7)


def test_what_sums_is_summed_and_what_holds_records_stays() -> None:
    torch.manual_seed(0)
    module, x = Measured(), torch.randn(40, 2)
    y = (x.sum(1) + torch.randn(40) > 0).float()

    def sums(part: slice) -> dict[str, Tensor]:
        own = Sums()
        plain_trainer(callbacks=[own]).test(module, datamodule=Rows(x[part], y[part]), verbose=False)
        assert own.rows == len(x[part])
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in own.values.items()}

    first, second, whole = sums(slice(11)), sums(slice(11, None)), sums(slice(None))
    together, expected = metrics({n: first[n] + second[n] for n in first}, module), metrics(whole, module)
    assert together == pytest.approx(expected)
    assert together.keys() == {"loss", "error", "f1"}
    found = module.float().layer(x).squeeze(1)
    assert together["loss"] == pytest.approx(float((found - y).square().mean()), rel=1e-6)
    assert together["f1"] == pytest.approx(float(BinaryF1Score()(found, y.int())), rel=1e-6)
    assert together["error"] == pytest.approx(float((found - y).abs().mean()), rel=1e-6)


def test_what_is_promised_or_missing_is_refused() -> None:
    for mechanism in (CentralNoise(1.0, 1.0), RecordNoise(1.0, 1.0)):
        assert_refused(f"{type(mechanism).__name__} promises privacy", refuse_private, mechanism, [])
    assert_refused(r"head\.\* stay with the clients", refuse_private, None, ["head.*"])


def test_the_command_says_what_it_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["federate", *WORDS, "--trainer.default_root_dir", str(tmp_path)]
    assert main([*small, "--evaluate", "no.ckpt"]) == 2
    assert main([*small, "--evaluate", "no.ckpt", "--ckpt_path", "last"]) == 2
    assert main(["evaluate", *WORDS]) == 2
    said = capsys.readouterr().err
    for words in ("no.ckpt does not exist", "leave --ckpt_path out", "is what `federate --evaluate` starts"):
        assert words in said


class Naming(FedAvg):
    """Asks for sums whose names the clients choose."""

    class Report(Message):
        values: Mapping[str, Tensor] = merged("sums")

    def round(self, server: Any) -> Any:
        self.found = (yield Exchange({}, question="tell", training=False)).values

    def tell(self, client: Any, sent: Any) -> Message:
        return self.Report(values={"a.b": torch.ones(2), f"own {client.index}": torch.ones(1)})


@pytest.mark.parametrize("first", [0, 1, 2])
def test_sums_by_name_are_merged_and_no_single_client_decides_their_shapes(first: int) -> None:
    plain = PlainFederation(
        algorithm := Naming(), torch.nn.Linear(1, 1), lambda *_: torch.zeros(()),
        lambda p: torch.optim.SGD(p, lr=0.1), lambda *_: (), [1.0] * 3,
    )  # fmt: skip
    plain.round(0)
    assert {n: v.tolist() for n, v in algorithm.found.items()} == {"a.b": [3.0, 3.0]} | {
        f"own {k}": [1.0] for k in range(3)
    }
    honest = plain.answers
    plain.answers = lambda asked: (  # type: ignore[method-assign]
        (k, Answer({"values.a.b": torch.ones(5)}, a.private) if k == first else a) for k, a in honest(asked)
    )
    with pytest.warns(UserWarning, match=rf"'client-{first}' is left out: 'values.a.b' has the shape \[5\], not \[2\]"):
        plain.round(1)
    assert algorithm.found["a.b"].tolist() == [2.0, 2.0]
