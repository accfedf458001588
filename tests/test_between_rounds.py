"""A round is whole for checkpoints and early ends; what a module's hooks do between rounds is done once."""

import copy
import time

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.federated import ExpectationPropagation, FedAvg, GeneratorSites
from tests.federations import client_sets, federation, fit, plain_trainer
from tests.modules import Regression, TwoOptimizers
from tests.test_client_data import assert_equal_batches
from tests.test_federation import assert_same, plain_batches
from tests.test_generator_sites import Known
from tests.test_generator_sites import data as known_data
from tests.test_local_steps import Scheduled

STEPS_OF_A_ROUND = 3 + 1 + 5 + 2


class SaveAt(Callback):
    def __init__(self, path, hook: str, round_: int, batch: int = 0) -> None:
        self.path, self.round, self.batch = path, round_, batch
        setattr(self, hook, self.save)

    def save(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        in_a_batch = bool(args) and isinstance(args[-1], int)
        if trainer.current_epoch == self.round and (not in_a_batch or args[-1] == self.batch):
            trainer.save_checkpoint(self.path)


class Personal(Scheduled):
    def __init__(self, interval: str = "step") -> None:
        super().__init__(interval)
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 1))
        self.twin = self.body[3]  # a second name for the same parameters
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def training_step(self, batch, batch_idx: int):
        self.scratch += 1
        return super().training_step(batch, batch_idx)


EP = {"optimizer_state": "keep", "local": ["body.4.*"]}


def run(module: LightningModule, rounds: int, interval: str = "step", **options) -> Trainer:
    algorithm = ExpectationPropagation(prior_scale=5.0)
    return fit(module, federation(clients_per_round=3), rounds=rounds, algorithm=algorithm, **(EP | options))


MOMENTS = {
    "in the first round": ("on_train_batch_end", 0, 0),  # at each client, and so at the last one
    "at a client's first batch": ("on_train_batch_start", 2, 0),
    "in the middle of a client": ("on_train_batch_end", 2, 2),
    "at the end of a round": ("on_train_epoch_end", 2, 0),
    "at the start of a round": ("on_train_epoch_start", 2, 0),
    "before an optimizer's step": ("on_before_zero_grad", 2, 0),
    "at the end of the fit": ("on_train_end", 4, 0),
}


@pytest.fixture(scope="module", params=["step", "epoch"])
def whole(request):
    torch.manual_seed(1)
    module = Personal(request.param)
    initial = copy.deepcopy(module)
    trainer = run(module, 4)
    return initial, module, trainer.callbacks[0].state_dict()


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
def test_resuming_from_any_moment_changes_nothing(tmp_path, whole, moment):
    initial, expected, state = whole
    path = tmp_path / "moment.ckpt"
    saving = copy.deepcopy(initial)
    run(saving, 4, callbacks=[SaveAt(path, *moment)])
    assert_same(saving, expected, tolerance=0.0)  # saving disturbs nothing
    module = Personal(initial.interval)
    trainer = run(module, 4, ckpt_path=path)
    assert_same(module, expected, tolerance=0.0)
    assert_equal_batches(trainer.callbacks[0].state_dict(), state)


@pytest.mark.parametrize("moment", list(MOMENTS.values())[:3], ids=list(MOMENTS)[:3])
def test_a_checkpoint_within_a_round_holds_the_server_and_loads_into_the_plain_module(tmp_path, moment):
    path, module = tmp_path / "moment.ckpt", Personal()
    before = copy.deepcopy(module)
    run(before, moment[1]) if moment[1] else before.double()
    run(module, 4, callbacks=[SaveAt(path, *moment)])
    checkpoint = torch.load(path, weights_only=True)
    plain = Personal().double()
    plain.load_state_dict(checkpoint["state_dict"])  # strict: nothing that the module does not know
    assert_same(plain, before, tolerance=0.0)
    assert_same(Personal.load_from_checkpoint(path, interval="step").double(), before, tolerance=1e-6)
    assert checkpoint["epoch"] == moment[1]
    assert all(not state["state"] for state in checkpoint["optimizer_states"])


def test_lightnings_own_checkpoint_after_validation_resumes(tmp_path):
    """ModelCheckpoint(monitor=...) saves right after validation by itself, when the round is not quite over."""
    held_out = dict(zip(["client-0", "client-2"], client_sets((5, 11)), strict=True))

    def fitted(module: Personal, rounds: int, **options) -> ModelCheckpoint:
        best = ModelCheckpoint(tmp_path, monitor="val_loss", mode="min", save_top_k=-1, filename="{epoch}")
        data = federation(val_dataset=held_out)
        fit(module, data, rounds=rounds, enable_checkpointing=True, callbacks=[best], **options, **EP)
        return best

    torch.manual_seed(1)  # from other weights it may diverge
    whole = Personal("epoch")
    best = fitted(whole, 4)
    assert all(p.isfinite().all() for p in whole.parameters())
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"epoch={r}.ckpt" for r in range(4)]
    assert best.best_model_score is not None
    again = Personal("epoch")
    fitted(again, 4, ckpt_path=tmp_path / "epoch=1.ckpt")
    assert_same(again, whole, tolerance=0.0)


class SteppedAtTheEnd(TwoOptimizers):
    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("val_loss", float(self.current_epoch))

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return list(optimizers), [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in optimizers]


def test_lightnings_own_checkpoint_waits_for_the_modules_end_of_the_round(tmp_path):
    def fitted(module: SteppedAtTheEnd, **options) -> None:
        options |= {"enable_checkpointing": True}
        every = {"save_top_k": -1, "filename": "{epoch}", "save_on_train_epoch_end": False}
        best = ModelCheckpoint(tmp_path, monitor="val_loss", **every)
        data = federation(val_dataset=client_sets((5,))[0])
        fit(module, data, rounds=3, callbacks=[best], **options)

    whole, again = SteppedAtTheEnd(), SteppedAtTheEnd()
    fitted(whole)
    fitted(again, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert_same(again, whole, tolerance=0.0)


def test_checkpoints_every_few_steps_hold_the_round_before(tmp_path):
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=7, save_top_k=-1, filename="{step}")
    module = Regression()
    servers = [copy.deepcopy(module).double()]
    for rounds in (1, 2):
        servers.append(copy.deepcopy(module))
        fit(servers[-1], federation(), rounds=rounds)
    fit(module, federation(), rounds=3, enable_checkpointing=True, callbacks=[saving])
    for path in tmp_path.iterdir():
        step = int(path.stem.split("=")[1])
        plain = Regression().double()
        plain.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
        assert_same(plain, servers[(step - 1) // STEPS_OF_A_ROUND], tolerance=0.0)


class Spinning(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("speed", torch.zeros(2))

    def training_step(self, batch, batch_idx: int):
        self.speed[0] += 0.5 / len(batch[0]) if self.trainer.current_epoch < 2 else len(batch[0])
        return super().training_step(batch, batch_idx)


def test_a_resumed_run_merges_buffers_as_it_did_before(tmp_path):
    def fitted(rounds: int, **options) -> Spinning:
        module = Spinning()
        fit(module, federation(sizes=(8, 8), local_steps=8), rounds=rounds, **options)
        return module

    whole = fitted(3)
    half = fitted(2, callbacks=[SaveAt(tmp_path / "x.ckpt", "on_train_end", 2)])
    assert float(half.speed.norm()) == pytest.approx(1)
    assert float(whole.speed[0]) == pytest.approx(1 + 64)
    assert torch.equal(fitted(3, ckpt_path=tmp_path / "x.ckpt").speed, whole.speed)


def test_generator_sites_resume(tmp_path):
    def fitted(rounds: int, **options) -> Known:
        module = Known(lr=0.3)
        algorithm = GeneratorSites("generator", own_rows=3, pool=20, refine=0.3)
        fit(module, known_data(local_steps=5, clients_per_round=2), rounds=rounds, algorithm=algorithm, **options)
        return module

    whole = fitted(5)
    fitted(3, callbacks=[SaveAt(tmp_path / "x.ckpt", "on_train_batch_end", 2, 4)])
    assert_same(fitted(5, ckpt_path=tmp_path / "x.ckpt"), whole, tolerance=0.0)


class Count(Callback):
    def __init__(self, stop_at: int | None = None, sleep: float = 0.0) -> None:
        self.batches, self.stop_at, self.sleep = 0, stop_at, sleep

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        self.batches += 1
        time.sleep(self.sleep)
        if self.batches == self.stop_at:
            trainer.should_stop = True


def finished_rounds(count: Count, **options) -> tuple[Regression, int]:
    torch.manual_seed(2)
    module = Regression()
    trainer = fit(module, federation(val_dataset=client_sets((6,))[0]), rounds=50, **options)
    assert count.batches == trainer.current_epoch * STEPS_OF_A_ROUND  # never in the middle
    torch.manual_seed(2)
    reference = Regression()
    fit(reference, federation(), rounds=trainer.current_epoch)
    assert_same(module, reference, tolerance=0.0)
    return module, trainer.current_epoch


def test_early_ends_wait_for_the_rounds():
    count = Count(stop_at=STEPS_OF_A_ROUND + 4)
    assert finished_rounds(count, callbacks=[count])[1] == 2
    count = Count()
    stopping = EarlyStopping("val_loss", min_delta=1e9, patience=2)  # no round improves so much
    assert finished_rounds(count, callbacks=[count, stopping])[1] == 3
    count = Count(sleep=0.02)
    assert finished_rounds(count, callbacks=[count], max_time={"seconds": 0.3})[1] in (1, 2, 3)


def test_an_interrupted_round_is_dropped():
    """Ctrl-C, or an error in the module: the module goes back to the last round's server, in storage of its own."""

    class Broken(Regression):
        fails = 0

        def training_step(self, batch, batch_idx: int):
            if self.trainer.current_epoch == 2 and batch_idx == 3:
                raise RuntimeError("no more")
            return super().training_step(batch, batch_idx)

    module = Broken()
    earlier = copy.deepcopy(module)
    fit(earlier, federation(), rounds=2)
    with pytest.warns(UserWarning, match="round 2 was not finished"), pytest.raises(RuntimeError, match="no more"):
        fit(module, federation(), rounds=3)
    assert_same(module, earlier, tolerance=0.0)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == 8 * parameter.numel()
    fit(module, federation(), rounds=2, algorithm=FedAvg())  # and can be trained again


def test_a_second_fit_goes_on_from_the_first():
    module, reference = Regression(momentum=0.0), Regression(momentum=0.0)
    reference.load_state_dict(module.state_dict())
    fit(module, federation(), rounds=2)
    again = copy.deepcopy(module)
    trainer = fit(module, federation(), rounds=2)
    assert not trainer.interrupted
    fit(again, federation(), rounds=2)
    assert_same(module, again, tolerance=0.0)
    with pytest.raises(AssertionError):
        assert_same(module, reference, tolerance=1e-3)


HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")


class Target(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.target = nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("temperature", torch.ones(()))

    def _change(self) -> None:
        with torch.no_grad():
            self.temperature *= 0.5
            self.target.weight.copy_(self.body[0].weight[:1])
            self.body[0].bias.add_(1.0)


def with_hook(hook: str) -> Target:
    torch.manual_seed(0)
    module = Target()
    setattr(module, hook, lambda: module._change())
    return module


@pytest.mark.parametrize("hook", HOOKS)
def test_one_client_under_a_hook_is_plain_lightning(hook):
    module, plain = with_hook(hook).double(), with_hook(hook).double()
    module.momentum = plain.momentum = 0.0
    held_out = client_sets((3,))[0]
    fit(module, federation(sizes=(20,), val_dataset=held_out), rounds=3)

    class Rounds:
        def __iter__(self):
            return iter(plain_batches(client_sets((20,))[0], None, plain.trainer.current_epoch, 0))

    plain_trainer(max_epochs=3).fit(plain, Rounds(), DataLoader(held_out, batch_size=8))
    assert float(module.temperature) == 0.5 ** (1 if hook in ("on_fit_start", "on_train_start") else 3)
    assert_same(module, plain, tolerance=1e-9)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_resumed_run_anneals_no_more_than_one_that_was_never_stopped(hook, tmp_path):
    whole = with_hook(hook)
    fit(whole, federation(), rounds=4, folder=tmp_path / "whole")
    saved = RoundCheckpoint(dirpath=str(tmp_path / "checkpoints"))
    fit(with_hook(hook), federation(), rounds=2, callbacks=[saved], enable_checkpointing=True)
    resumed = with_hook(hook)
    fit(resumed, federation(), rounds=4, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
