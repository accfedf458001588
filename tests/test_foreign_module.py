"""A LightningModule that is not ours, unmodified: Lightning's own Transformer demo, federated in a few lines."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.plugins import DoublePrecision
from torch.utils.data import Dataset

from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.randomness import derive_seed, seed_streams
from tests.federations import fit
from tests.test_federation import plain_batches

ROOT = Path(__file__).parent.parent
VOCABULARY, LENGTH = 17, 6


class Counting(Dataset[Any]):
    """An institution that counts in steps of its own: records (sequence, the same one later), each of LENGTH words."""

    def __init__(self, step: int, n: int) -> None:
        self.words = (torch.arange(n + LENGTH) * step) % VOCABULARY
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.words[i : i + LENGTH], self.words[i + 1 : i + LENGTH + 1]


def institutions() -> list[Counting]:
    return [Counting(step, n) for step, n in ((1, 40), (2, 17), (5, 24))]


def transformer() -> LightningTransformer:
    torch.manual_seed(0)
    return LightningTransformer(vocab_size=VOCABULARY)


@pytest.mark.slow
def test_the_example_in_docs_runs_and_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = runpy.run_path(str(ROOT / "docs" / "foreign_module.py"))["main"]()
    assert after < before - 0.5
    assert not any(path.suffix == ".txt" for path in tmp_path.rglob("*"))


def test_it_is_the_plain_weighted_mean_of_its_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds of FedAvg by hand around the module's own training_step and optimizer, dropout included."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("there already, so that prepare_data downloads nothing")
    monkeypatch.chdir(tmp_path)
    module = transformer()
    server = copy.deepcopy(module).double()
    for round_ in range(2):
        states = []
        for client, dataset in enumerate(institutions()):
            local = copy.deepcopy(server).train()
            optimizer = local.configure_optimizers()
            seed_streams(derive_seed(0, round_, client, "steps"))
            index = [b[0] for b in plain_batches(Index(len(dataset)), None, round_, client)]
            for rows in index:
                batch = [torch.stack(parts) for parts in zip(*(dataset[int(i)] for i in rows), strict=True)]
                optimizer.zero_grad()
                with DoublePrecision().forward_context():
                    loss = local.training_step(batch, 0)
                loss.backward()
                optimizer.step()
            states.append(local.state_dict())
        weights = [len(d) / sum(map(len, institutions())) for d in institutions()]
        merged = {n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) for n in states[0]}
        server.load_state_dict(merged)
    data = FederatedDataModule.from_datasets(institutions(), batch_size=8)
    fit(module, data, rounds=2)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, server.state_dict()[name], rtol=1e-9, atol=1e-9)


class Index(Dataset[Any]):
    """Row numbers, to learn the order in which a client is read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return (i,)


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel], ids=["automatic", "manual"])
@pytest.mark.parametrize("algorithm", [FedAvg(), ExpectationPropagation()], ids=["fedavg", "ep"])
def test_lightnings_own_test_modules(kind: Any, algorithm: Any) -> None:
    """They define every hook there is, train, validate and test."""
    torch.manual_seed(1)
    module = kind()
    sets = [RandomDataset(32, n) for n in (20, 7, 12)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4, val_dataset=sets[1], test_dataset=sets[2])
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = fit(module, data, rounds=2, algorithm=algorithm, precision="32-true", num_sanity_val_steps=2)
    assert all(not torch.equal(p, before[n]) for n, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)


@pytest.mark.slow
def test_the_pages_own_module_runs_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/federating.md's two files, as they stand there."""
    section = (ROOT / "docs" / "federating.md").read_text(encoding="utf-8").split("## From the command line")[1]
    for name, language in (("wards.py", "python"), ("wards.yaml", "yaml")):
        (tmp_path / name).write_text(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["fit", "--config", "wards.yaml"]) == 0
    assert main(["fit", "--config", "wards.yaml", "--config", "algorithms/scaffold.yaml"]) == 0
    for run in ("wards", "wards_scaffold"):
        last = pd.read_csv(Path("runs") / run / "metrics.csv").iloc[-1]
        clients = [last[f"val_loss/client/ward-{ward}"] for ward in "abc"]
        assert last["val_loss/worst_client"] == max(clients) < 0.01
