"""What modules change behind the federation's back: frozen parameters, replaced storage, late unfreezing."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lit_epgan.datamodules import Institutions
from lit_epgan.engine import Algorithm, Broadcast, Client, Message, Round
from lit_epgan.engine.private import Private
from lit_epgan.errors import UserError
from lit_epgan.fit.loop import RoundLoop
from lit_epgan.fit.options import check_module, check_trainer
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression
from tests.notes import Notes
from tests.test_sealed_server import federation as plain_federation

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


class Teacher(Regression):
    """A frozen copy of the first layer follows it, as BYOL's and MoCo's targets do."""

    seen = Notes()

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(3, 8).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.teacher.weight.clone())

    def on_train_batch_end(self, *args: Any) -> None:
        self.teacher.weight.data = 0.5 * self.teacher.weight.data + 0.5 * self.body[0].weight.data

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=self.lr)


def test_a_frozen_teacher_starts_from_the_servers_and_is_merged_by_records() -> None:
    """One step a client: after it client k's teacher is (t + w_k) / 2; the server's is their mean by n_k."""
    module = Teacher()
    start = module.teacher.weight.detach().clone().double()
    fit(module, federation(local_steps=1), rounds=1)
    assert len(module.seen) == len(SIZES)
    assert all(torch.equal(seen, start) for seen in module.seen)
    expected = 0.5 * start + 0.5 * module.body[0].weight  # the mean of the clients' layers is the server's layer
    torch.testing.assert_close(module.teacher.weight.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


class Clamped(Regression):
    """Replaces the storage of its parameters after each batch, as weight clipping is often written."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            if self.in_place:
                parameter.data.clamp_(-0.3, 0.3)
            else:
                parameter.data = parameter.data.clamp(-0.3, 0.3)


def test_replaced_storage_is_taken_back() -> None:
    torch.manual_seed(0)
    replaced, in_place = Clamped(in_place=False), Clamped(in_place=True)
    in_place.load_state_dict(replaced.state_dict())
    fit(replaced, federation(), rounds=3)
    fit(in_place, federation(), rounds=3)
    for name, value in replaced.state_dict().items():
        assert torch.equal(value, in_place.state_dict()[name]), name


class Unfreezing(Regression):
    """The first layer is frozen in round 0 and trained afterwards."""

    starts = Notes()

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body[0].requires_grad_(self.current_epoch > 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts.append(self.body[0].weight.detach().clone())


def test_a_layer_unfrozen_later_starts_from_the_servers_too() -> None:
    module = Unfreezing()
    fit(module, federation(local_steps=1), rounds=2)
    first, second = module.starts[: len(SIZES)], module.starts[len(SIZES) :]
    assert len(first) == len(second) == len(SIZES)
    assert all(torch.equal(start, first[0]) for start in first + second)
    assert not torch.equal(module.body[0].weight, first[0])


def test_weight_averaging_callbacks_and_dataloader_iter_are_refused() -> None:
    trainer = Trainer(callbacks=[EMAWeightAveraging()], logger=False)
    with pytest.raises(UserError, match="EMAWeightAveraging would average one client's weights into the next one's"):
        check_trainer(trainer)

    class Iterating(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    with pytest.raises(UserError, match="reads past the end of a client"):
        check_module(Iterating(), RoundLoop.of(Trainer(**QUIET)), ranks=1)


def test_meeting_other_ranks_in_a_step_is_refused() -> None:
    module = Regression()
    loop = RoundLoop.of(Trainer(**QUIET))
    check_module(module, loop, ranks=2)
    loop.client_trains = True
    with pytest.raises(UserError, match=r"self\.log\('loss', sync_dist=True\) in a client's step would wait"):
        module.log("loss", 1.0, sync_dist=True)


@pytest.mark.parametrize(
    ("frequency", "second", "sentence"), [(2, None, "frequency 2"), (1, "epoch", "one of the two")]
)
def test_schedules_that_cannot_belong_to_a_client(frequency: int, second: str | None, sentence: str) -> None:
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            step = {"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": frequency}
            epoch = {"scheduler": LambdaLR(optimizer, lambda e: 1.0), "interval": "epoch"}
            return [optimizer], [step, epoch] if second else [step]

    with pytest.raises(UserError, match=sentence):
        fit(Scheduled(), federation(), rounds=1)


def test_several_loaders_of_one_institution_are_refused() -> None:
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Two(LightningDataModule):
        def train_dataloader(self) -> Any:
            return {k: DataLoader(s, batch_size=4) for k, s in zip("ab", client_sets(), strict=False)}

    with pytest.raises(UserError, match="several training loaders"):
        fit(Regression(), Institutions({"one": Two()}), rounds=1)


def test_a_frozen_parameter_that_moved_before_a_restart_goes_back() -> None:
    """After a restart, and after a client that was given up, a teacher is the server's."""

    class Restarting(Algorithm):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"], steps=1, after_local_step=lambda: frozen.data.fill_(5.0))
            client.fit(sent["parameters"], steps=1, batch=lambda batch: seen.append(frozen.tolist()) or batch)
            frozen.data.fill_(7.0)
            if client.index == 0:
                raise RuntimeError("given up")
            return self.Report(change=client.change)

    seen: list[list[float]] = []
    plain = plain_federation(Restarting())
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    tensors = plain.model.tensors
    plain.module.register_parameter("teacher", frozen)
    tensors.frozen.append("teacher")
    tensors.server["teacher"] = torch.ones(3)
    round_ = Round(plain.federation, 0)
    with pytest.raises(RuntimeError, match="given up"):
        plain.answer(round_.task(0), Private())
    plain.answer(round_.task(1), Private())
    assert seen == [[1.0] * 3] * 2
    assert plain.runner.client is None
