"""A client that is new when a training goes on counts as one that had been there and had never been asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.carriers.protocol import Endpoint, FederateSettings
from lit_epgan.engine import Sampler
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg
from lit_epgan.fit import state
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, federation
from tests.modules import Regression
from tests.same_weights import assert_same
from tests.test_remote import NAMES, Site, ended
from tests.test_remote_faults import counted


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if each client had data of its own, on a machine of its own."""
    monkeypatch.setattr(state, "endpoint", lambda: Endpoint("server", terms=FederateSettings(names=("a",))))


class Later(Sampler):
    """Asks the first three clients, and from round 2 on whoever else there is."""

    def draw(self, clients: Sequence[int], seed: int, round_: int) -> list[list[int]]:
        return [[k] for k in clients if k < 3 or round_ >= 2]

    def rate(self, clients: int) -> float:
        return 1.0


def trained(folder: Path, algorithm: Any, clients: Sequence[int], rounds: int, **options: Any) -> dict[str, Any]:
    accept, order = options.pop("accept_changes", False), options.pop("names", None)
    torch.manual_seed(0)
    module: LightningModule = Regression().double()
    data = federation(sizes=tuple(SIZES[k] for k in clients), client_names=order)
    callback = FederationCallback(algorithm=algorithm, sampler=Later())
    callback.accept_changes = accept
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        max_epochs=rounds,
        default_root_dir=folder,
        callbacks=[callback, RoundCheckpoint()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data, **options)
    return module.state_dict()


@pytest.mark.parametrize("algorithm", [FedAvg, lambda: ExpectationPropagation(prior_scale=10.0)])
def test_a_client_joins_when_a_training_goes_on(tmp_path: Path, algorithm: Any) -> None:
    expected = trained(tmp_path / "all", algorithm(), range(4), 4)
    trained(tmp_path / "few", algorithm(), range(3), 2)
    last = next((tmp_path / "few").rglob("last.ckpt"))
    again = {"ckpt_path": last, "accept_changes": True}
    assert_same(trained(tmp_path / "few", algorithm(), range(4), 4, **again), expected)


@pytest.mark.parametrize(
    ("clients", "accept_changes", "names"), [(4, False, None), (2, True, None), (4, True, ["d", "a", "b", "c"])]
)
def test_it_is_refused_unasked_and_where_others_would_get_another_number(
    tmp_path: Path, clients: int, accept_changes: bool, names: list[str] | None
) -> None:
    trained(tmp_path, FedAvg(), range(3), 1, names=["a", "b", "c"] if names else None)
    again: Any = {"ckpt_path": next(tmp_path.rglob("last.ckpt")), "accept_changes": accept_changes, "names": names}
    with pytest.raises(UserError, match=r"has the clients .*this one.*taken in by --accept_changes true"):
        trained(tmp_path, FedAvg(), range(clients), 2, **again)


def test_the_servers_control_stays_the_mean_of_the_clients(tmp_path: Path) -> None:
    """c = sum_k n_k c_k / sum_k n_k, before a client joins and after it."""
    for clients, rounds in ((3, 2), (4, 4)):
        again: Any = {"ckpt_path": next(tmp_path.rglob("last.ckpt")), "accept_changes": True} if clients == 4 else {}
        trained(tmp_path, SCAFFOLD(), range(clients), rounds, **again)
        kept = tensor_file.load(next(tmp_path.rglob("last.ckpt")))["callbacks"]["FederationCallback"]
        own = [kept["clients"][f"client-{k}"]["algorithm"]["control"] * SIZES[k] for k in range(clients)]
        torch.testing.assert_close(kept["server"]["control"], sum(own) / sum(SIZES[:clients]))


@pytest.mark.slow
def test_an_institution_that_is_new_joins_when_all_are_started_again(tmp_path: Path) -> None:
    words = ("--module", "points", "--algorithm", "fedavg_gan")

    site = Site(tmp_path, FederateSettings(names=tuple(NAMES[:3])))
    ended({name: site.started(name, *words, "--clients", "3", "--rounds", "2") for name in ("server", *NAMES[:3])})
    site, words = Site(tmp_path, FederateSettings(names=tuple(NAMES))), (*words, "--rounds", "6")
    again = {name: site.started(name, *words, "--resume", "--accept-changes") for name in ("server", *NAMES[:3])}
    again["client-3"] = site.started("client-3", *words)  # which has nothing to go on from
    ended(again)
    assert "takes part from now on" in " ".join(again["client-3"].printed().split())
    assert counted(tmp_path, "client-3") == [(5, "yes")]  # whom the draws ask then
