"""A federation that diverges stops before it is saved: the checkpoint and the module are those of the round before."""

import copy
import math
import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lit_epgan.callbacks import FederationCallback
from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.engine import Algorithm, Rounds, Server
from lit_epgan.engine.divergence import largest_norm, overflowing
from lit_epgan.engine.messages import norm
from lit_epgan.engine.plain_loop import PlainFederation
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAdam, FedAvg, FedLA
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise
from tests.federations import SIZES, client_sets, fit
from tests.federations import federation as double_federation
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_local_steps import OnServer

# FedLA sends precision times parameters, which is not finite for 3e38: such a client is left out
ALGORITHMS: dict[type[Algorithm], float] = {FedAvg: 3e38, SCAFFOLD: 3e38, ExpectationPropagation: 3e38, FedLA: 1e33}


class Far(Callback):
    def __init__(self, client: int, round_: int, value: float) -> None:
        self.client, self.round, self.value = client, round_, value

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        progress = next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).progress
        if progress.client == f"client-{self.client}" and progress.round == self.round:
            for parameter in pl_module.parameters():
                parameter.fill_(self.value)


class Servers(Callback):
    def __init__(self) -> None:
        self.after = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after.append(copy.deepcopy(pl_module.state_dict()))


def federation(**options):
    return type(double_federation()).from_datasets(client_sets(SIZES, torch.float32), batch_size=8, **options)


def single(module: LightningModule, folder=None, **options) -> Trainer:
    return fit(module, federation(), folder=folder, precision="32-true", **options)


def assert_state(state, expected) -> None:
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.__name__)
def test_a_client_far_off_is_named_and_never_saved(algorithm, tmp_path):
    module, watch = Regression(batch_norm=True), Servers()
    whole, resumed = copy.deepcopy(module), copy.deepcopy(module)
    options = {"enable_checkpointing": True, "rounds": 4}
    callbacks = [RoundCheckpoint(), watch, Far(1, 2, ALGORITHMS[algorithm])]
    with (
        pytest.raises(UserError, match=r"round 2 is refused: .*'client-1'.*norm [0-9.]+e\+3\d") as error,
        pytest.warns(UserWarning, match=r"round 2: the norm .* client 'client-1' \([0-9.]+e\+3\d\)"),
    ):
        single(module, tmp_path, algorithm=algorithm(), callbacks=callbacks, **options)
    assert "The last checkpoint holds the round before" in str(error.value)
    assert_state(module.state_dict(), watch.after[1])
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["epoch"] == 2  # finished rounds
    assert_state(last["state_dict"], watch.after[1])
    assert all(math.isfinite(norm({n: t})) for n, t in last["callbacks"]["FederationCallback"]["server"].items())
    resume = {"ckpt_path": tmp_path / "checkpoints" / "last.ckpt", "callbacks": [RoundCheckpoint()]}
    single(resumed, tmp_path, algorithm=algorithm(), **resume, **options)
    single(whole, tmp_path / "whole", algorithm=algorithm(), callbacks=[RoundCheckpoint()], **options)
    assert_state(resumed.state_dict(), whole.state_dict())


def test_a_servers_step_that_overflows_is_refused_and_tells_nothing_of_a_private_run(tmp_path):
    module = Regression()
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(UserError, match=r"round 0 is refused: the server's model would .*lower the learning rate"):
        single(module, algorithm=FedAdam(lr=3e38))
    assert_state(module.state_dict(), before)
    noise = CentralNoise(1.0, 1.0, noise_seed=0, ledger=str(tmp_path / "privacy.jsonl"))
    with pytest.raises(UserError, match=r"round 0 is refused: .*would .*; whose update it was is hidden") as error:
        single(Regression(), algorithm=FedAdam(lr=3e38), mechanism=noise)
    assert "sent" not in str(error.value)


def test_training_on_the_server_that_fails_is_refused():
    class Diverging(OnServer):
        def round(self, server: Server) -> Rounds:
            server.train([tuple(t.float() for t in client_sets()[0][:4])])
            if server.round == 1:
                with server.holding():
                    for buffer in server.module.buffers():
                        if buffer.is_floating_point():
                            buffer.fill_(math.nan)
            yield from ()

    module, watch = Regression(batch_norm=True), Servers()
    with pytest.raises(UserError, match=r"round 1 is refused: the buffer '.*running_mean' would not be finite"):
        single(module, algorithm=Diverging(), callbacks=[watch])
    assert_state(module.state_dict(), watch.after[0])


def test_a_client_far_off_is_warned_of_and_merged_and_no_ordinary_one():
    module = Regression()
    with pytest.warns(UserWarning, match=r"beyond 1e\+06 times the median of .*: client 'client-2' \(.*e\+08\)"):
        single(module, rounds=1, callbacks=[Far(2, 0, 1e8)])
    assert any(bool((p.abs() > 1e6).any()) for p in module.parameters())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        single(Regression(), rounds=2, callbacks=[Far(2, 0, 1e4)])
    assert not [each for each in said if "the norm of an update" in str(each.message)]


def test_a_model_that_is_broken_between_two_rounds_is_not_saved(tmp_path):
    class Breaking(Regression):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 2:
                with torch.no_grad():
                    next(iter(self.parameters())).fill_(math.nan)

    with pytest.raises(UserError):
        single(Breaking(), tmp_path, rounds=4, callbacks=[RoundCheckpoint()], enable_checkpointing=True)
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(bool(torch.isfinite(value).all()) for value in last["state_dict"].values())


def test_without_a_trainer_too_the_server_goes_back():
    rows = torch.ones(4, 2)

    def loss(module: nn.Module, batch) -> torch.Tensor:
        return module(batch[0]).pow(2).sum()

    plain = PlainFederation(
        FedAdam(lr=0.1),
        nn.Linear(2, 1),
        loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        lambda client, round_: [(rows * (3e38 if (client, round_) == (0, 1) else 1),)],
        [4, 4],
    )
    plain.round(0)
    before, state = plain.server.parameters.clone(), {n: t.clone() for n, t in plain.server.state.items()}
    plain.federation.algorithm.lr = 3e38
    assert_refused("round 1 is refused", plain.round, 1)
    assert torch.equal(plain.server.parameters, before)
    assert plain.server.state.keys() == state.keys()
    assert all(torch.equal(plain.server.state[n], t) for n, t in state.items())


def test_norms_and_what_overflows():
    assert norm({"x": torch.full((4,), 1e38)}) == pytest.approx(2e38, rel=1e-6)
    assert norm({"x": torch.full((4,), 1e300, dtype=torch.float64)}) == pytest.approx(2e300)
    assert norm({"x": torch.tensor([3.0]), "y": torch.tensor([4.0])}) == 5
    single_limit, double_limit = largest_norm(torch.float32), largest_norm(torch.float64)
    assert largest_norm(torch.float16) == single_limit == pytest.approx(1.8e19, rel=0.1)
    assert overflowing({"x": torch.tensor([1e18])}, single_limit) is None
    assert overflowing({"x": torch.tensor([1e20])}, single_limit) == "x would overflow (norm 1e+20)"
    assert overflowing({"x": torch.tensor([1e20], dtype=torch.float64)}, double_limit) is None
    assert overflowing({"n": torch.tensor([7]), "x": torch.tensor([math.nan])}, 1.0) == "x would not be finite"
