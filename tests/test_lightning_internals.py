"""Lightning's private names that the federation uses: each test's message says what is broken with a new Lightning."""

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lit_epgan
from lit_epgan.callbacks import lightning_internals
from lit_epgan.callbacks.lightning_internals import (
    StepControl,
    between_rounds,
    forget_earlier,
    forward_value,
    hook_in_progress,
    leave_out_sigterm_broadcast,
    logged_step,
    loops_state,
    own_attributes,
    result_metrics,
    save_at_epoch_end,
)
from lit_epgan.runs import MetricsFile
from tests.federations import client_sets
from tests.modules import Regression

ROOMS = ("callbacks", "datamodules", "command", "runs", "study", "engine")


def fit(module: LightningModule, *callbacks: Callback, epochs: int = 1, **options: Any) -> Trainer:
    off: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    off |= {"enable_progress_bar": False, "enable_model_summary": False, "precision": "64-true"}
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **(off | options))
    trainer.fit(module, torch.utils.data.DataLoader(client_sets((24,))[0], batch_size=8))
    return trainer


class At(Callback):
    """Calls a function when training starts, and one after every batch."""

    def __init__(self, start: Any = None, batch: Any = None) -> None:
        self.start, self.batch = start, batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.start:
            self.start(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.batch:
            self.batch(trainer, pl_module)


def test_the_step_at_which_metrics_are_logged(tmp_path: Path) -> None:
    """Else a picture would stand at another step than its round's numbers."""

    class Steps(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.seen.append(logged_step(trainer))
            pl_module.log("x", 1.0)

    steps, table = Steps(), MetricsFile(str(tmp_path))
    fit(Regression(), steps, epochs=2, logger=table)
    assert steps.seen == [row["step"] for rows in table.finished(2).values() for row in rows if "x" in row] == [2, 5]


def test_the_broadcast_after_each_batch_can_be_left_out() -> None:
    """Else ranks with other numbers of batches would wait for each other for ever."""
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert callable(trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor)
    leave_out_sigterm_broadcast(trainer)
    assert trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor() is None


def test_a_checkpoint_can_wait_for_the_rounds_end(tmp_path: Path) -> None:
    """Else it is saved after validation, when the module's own epoch-end hook has yet to run."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    save_at_epoch_end(checkpoint)
    assert checkpoint._save_on_train_epoch_end is True
    fit(Regression(), checkpoint, enable_checkpointing=True)
    assert (tmp_path / "last.ckpt").is_file()


def test_the_hook_in_progress_is_known() -> None:
    """Else a log that would make ranks wait for each other in every step is not refused."""

    class Asking(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(hook_in_progress(self))
            return super().training_step(batch, batch_idx)

    seen: list[str | None] = []
    fit(Asking())
    assert set(seen) == {"training_step"}


def test_the_loops_counters_can_be_read_and_set_between_rounds() -> None:
    """Else a run that was killed within a round does not go on from the round's start."""
    states: list[dict[str, Any]] = []
    fit(Regression(), At(batch=lambda trainer, module: states.append(loops_state(trainer))))
    state = states[-1]["fit_loop"]
    between_rounds(state, 7)
    assert {n for counts in state["epoch_progress"].values() for n in counts.values()} == {7}
    assert set(state["epoch_loop.batch_progress"]["current"].values()) == {0}


def test_lightnings_own_attributes_are_known() -> None:
    """Else they are taken for a client's, and compared at every switch."""

    class Saving(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.own = 1

    assert set(vars(Saving())) - set(vars(Regression())) - own_attributes() == {"own"}


def test_what_was_logged_can_be_read_in_the_loop() -> None:
    """Else clients have no metrics of their own."""
    names: set[str] = set()
    fit(Regression(), At(batch=lambda trainer, m: names.update(r.meta.name for r in result_metrics(trainer))))
    assert names == {"train_loss"}


def test_what_an_earlier_evaluation_logged_can_be_forgotten() -> None:
    """Else a batch of validation takes the longer the more clients there are."""
    held: list[list[str]] = []

    class Forgetting(Callback):
        def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
            held.append([r.meta.name for r in result_metrics(trainer)])
            forget_earlier(trainer)
            held.append([r.meta.name for r in result_metrics(trainer)])

        def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
            forget_earlier(trainer)  # not what this one logs
            held.append([r.meta.name for r in result_metrics(trainer)])

    loader = torch.utils.data.DataLoader(client_sets((8,))[0], batch_size=8)
    off: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = Trainer(accelerator="cpu", max_epochs=2, num_sanity_val_steps=0, callbacks=[Forgetting()], **off)
    trainer.fit(Regression().double(), loader, loader)
    assert held == [[], [], ["val_loss"], ["val_loss"], [], ["val_loss"]]


def test_a_logged_metrics_last_value_can_be_read() -> None:
    """Else clients have no torchmetrics of their own."""
    from torchmetrics import MeanMetric

    class Measuring(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mean = MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.mean(torch.tensor(float(batch_idx)))
            self.log("mean", self.mean, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    values: list[float] = []

    def read(trainer: Trainer, module: LightningModule) -> None:
        values.extend(float(forward_value(r)) for r in result_metrics(trainer) if r.meta.name == "mean")

    fit(Measuring(), At(batch=read))
    assert values == [0.0, 1.0, 2.0]


class Counting(Regression):
    """Counts its steps, and says on which batches it wants no more."""

    def __init__(self, enough: int = 99) -> None:
        super().__init__()
        self.steps, self.enough, self.starts, self.ends = 0, enough, list[int](), list[int]()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.starts.append(batch_idx)
        return -1 if batch_idx == self.enough else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def controlled(module: Counting, **answers: Any) -> tuple[list[str], Trainer]:
    calls: list[str] = []
    defaults: dict[str, Any] = {
        "passes": lambda: False,
        "skips": lambda: False,
        "accumulated": lambda: True,
        "position": lambda: 0,
        "ended": lambda: calls.append("ended"),
    }
    controls: list[StepControl] = []

    def start(trainer: Trainer, m: LightningModule) -> None:
        controls.append(StepControl(trainer, m, **(defaults | answers)))

    class Removing(At):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            controls[0].remove()

    trainer = fit(module, Removing(start=start))
    return calls, trainer


def test_a_batch_can_be_skipped() -> None:
    """Else a rank without a client, or a round of the server alone, trains on somebody's records."""
    module = Counting()
    before = module.body[0].weight.clone()
    controlled(module, skips=lambda: True)
    assert module.steps == 0
    assert torch.equal(before.double(), module.body[0].weight.detach().double())


def test_minus_one_ends_a_client_and_not_the_round() -> None:
    """Else all later clients of the round train on nothing and are merged all the same."""
    module = Counting(enough=1)
    calls, trainer = controlled(module)
    assert calls == ["ended"]
    assert module.steps == 2
    assert module.ends == [0, 2]  # as in Lightning, none at the batch that was refused
    assert hook_in_progress(module) is None
    assert trainer.fit_loop.epoch_loop.batch_progress.current.ready == 3


def test_the_batches_of_a_client_that_has_ended_pass_without_a_hook() -> None:
    """Else hooks see batches that nobody trains on."""
    module = Counting()
    asked = iter([False, True, False])
    controlled(module, passes=lambda: next(asked))
    assert module.starts == module.ends == [0, 2]


def test_a_scheduler_between_rounds_runs_when_the_last_batch_passes() -> None:
    """Else the learning rate stays where the last client was ended."""

    class Scheduled(Counting):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    for module in (Scheduled(enough=2), Scheduled()):
        asked = iter([False, False, module.enough != 2])
        _, trainer = controlled(module, passes=lambda asked=asked: next(asked))
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.005
        assert module.steps == 2


def test_accumulation_asks_the_client() -> None:
    """Else gradients of one client wait for the next one's first step."""
    taken: list[int] = []

    class Watching(Counting):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            taken.append(self.steps)
            super().optimizer_step(*args, **kwargs)

    module = Watching()
    controlled(module, accumulated=lambda: module.steps == 2)
    assert taken == [2]  # two batches have gathered gradients; the third one's closure runs within the step


def test_the_steps_signature_is_worked_out_once() -> None:
    """And forgotten with the rest."""
    seen: list[bool] = []

    class Alone(Counting):
        def training_step(self, batch: Any) -> Tensor:
            seen.append(inspect.signature(Alone.training_step) is inspect.signature(Alone.training_step))
            return super().training_step(batch, 0)

    controlled(Alone())
    assert seen == [True] * 3
    assert not hasattr(Alone.training_step, "__signature__")


def test_the_loop_and_the_module_are_left_as_they_were() -> None:
    module = Counting()
    _, trainer = controlled(module)
    assert "on_train_batch_start" not in vars(module)
    loop = trainer.fit_loop.epoch_loop
    assert not {"advance", "_should_accumulate"} & vars(loop).keys()
    assert "_accumulated_batches_reached" not in vars(loop)
    assert "_make_zero_grad_fn" not in vars(loop.automatic_optimization)


PRIVATE_OF_LIGHTNING = {
    "_broadcast_sigterm_tensor",
    "_save_on_train_epoch_end",
    "_current_fx_name",
    "_checkpoint_connector",
    "_get_loops_state_dict",
    "_results",
    "_forward_cache",
    "_make_zero_grad_fn",
    "_accumulated_batches_reached",
    "_should_accumulate",
    "_num_ready_batches_reached",
}


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_file_uses_them(room: str) -> None:
    here = Path(lightning_internals.__file__).resolve()
    for path in sorted((Path(lit_epgan.__file__).parent / room).rglob("*.py")):
        if path.resolve() == here:
            continue
        used = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not used & PRIVATE_OF_LIGHTNING, f"{path}: {used & PRIVATE_OF_LIGHTNING}"
