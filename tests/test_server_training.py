"""Training on the server, by the module's own training step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.engine import Algorithm, Rounds, Server
from lit_epgan.federated import DistilledSites
from lit_epgan.randomness import derive_seed, seed_streams
from tests.federations import client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.test_generator_sites import Known, data


def batches() -> list[tuple[Tensor, ...]]:
    return [client_sets()[k][: 4 + k] for k in (0, 1, 2)]


class OnServer(Algorithm):
    """Nobody but the server works."""

    def trains(self, round_: int) -> bool:
        return False

    def round(self, server: Server) -> Rounds:
        server.train(batches())
        yield from ()


def test_automatic_optimization_equals_a_plain_loop() -> None:
    module = Regression(dropout=0.2, batch_norm=True)
    plain = copy.deepcopy(module).double().train()
    fit(module, federation(), rounds=3, algorithm=OnServer())
    for round_ in range(3):
        optimizer = plain.configure_optimizers()
        seed_streams(derive_seed(0, round_, "server", "update"))
        for batch in batches():
            optimizer.zero_grad()
            plain.loss(batch).backward()
            optimizer.step()
    for name, value in plain.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name


def test_manual_optimization_equals_a_plain_loop() -> None:
    module = TwoOptimizers()
    plain = copy.deepcopy(module).double().train()
    fit(module, federation(), rounds=2, algorithm=OnServer())
    for round_ in range(2):
        optimizers = plain.configure_optimizers()
        seed_streams(derive_seed(0, round_, "server", "update"))
        for batch in batches():
            for which, optimizer in zip("dg", optimizers, strict=True):
                optimizer.zero_grad()
                plain.zero_grad()
                plain.losses(batch[0], which).backward()
                optimizer.step()
    for name, value in plain.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(value, module.state_dict()[name], msg=name)


def test_validation_sees_what_the_server_learned() -> None:
    """The round is finished when validation begins, in inference mode and evaluation mode."""
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    fit(module, federation(val_dataset=client_sets()[0]), rounds=1, algorithm=OnServer())
    assert not torch.equal(before["body.0.weight"], module.state_dict()["body.0.weight"].float())
    assert module.trainer.callback_metrics["val_loss"] > 0


def test_where_nobody_works_nothing_is_learned() -> None:
    class Idle(OnServer):
        def round(self, server: Server) -> Rounds:
            yield from ()

    module = Regression(batch_norm=True)
    before = copy.deepcopy(module.state_dict())
    fit(module, federation(), rounds=2, algorithm=Idle(), optimizer_state="keep")
    for name, value in before.items():
        assert torch.equal(value.double(), module.state_dict()[name].double()), name


@pytest.mark.parametrize("killed_after", [1, 2])
def test_distilled_sites_resume_bit_by_bit(tmp_path: Path, killed_after: int) -> None:
    def module() -> Any:
        torch.manual_seed(0)
        return Known(lr=0.3)

    def algorithm() -> DistilledSites:
        return DistilledSites("generator", pool=50, server_steps=7, batch_size=8)

    whole, resumed = module(), module()
    fit(whole, data(), rounds=4, algorithm=algorithm())
    options: dict[str, Any] = {"callbacks": [RoundCheckpoint()], "enable_checkpointing": True}
    fit(module(), data(), rounds=killed_after, algorithm=algorithm(), folder=tmp_path, **options)
    checkpoint = next(tmp_path.rglob("last.ckpt"))
    fit(resumed, data(), rounds=4, algorithm=algorithm(), ckpt_path=str(checkpoint), folder=tmp_path, **options)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_the_server_trains_on_samples_of_all_sites_in_proportion_to_their_records() -> None:
    module = Known()
    fit(
        module,
        data(sizes=(40, 10)),
        rounds=2,
        algorithm=DistilledSites("generator", pool=20, server_steps=200, batch_size=8),
    )
    on_server = [seen for seen in module.seen if seen.round == 1]
    assert all(seen.client == -1 for seen in on_server)  # the idle batch is not trained on
    assert len(on_server) == 200
    of_first = torch.cat([seen.x.flatten() for seen in on_server]) < 5
    assert of_first.double().mean() == pytest.approx(0.8, abs=0.04)
