"""Lightning's private names that the federation uses: each test's message says what is broken with a new Lightning."""

import ast
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lit_epgan
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.fit import loop
from lit_epgan.fit.loop import (
    between_rounds,
    forget_earlier,
    logged_step,
    loops_state,
    own_attributes,
    result_metrics,
    save_at_epoch_end,
)
from lit_epgan.runs import MetricsFile
from tests.federations import SIZES, client_sets, federation
from tests.federations import fit as federated
from tests.modules import Regression
from tests.notes import Notes

ROOMS = ("callbacks", "datamodules", "cli", "runs", "engine", "fit")


def fit(module: LightningModule, *callbacks: Callback, epochs: int = 1, **options: Any) -> Trainer:
    off: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    off |= {"enable_progress_bar": False, "enable_model_summary": False, "precision": "64-true"}
    trainer = Trainer(max_epochs=epochs, callbacks=list(callbacks), **(off | options))
    trainer.fit(module, torch.utils.data.DataLoader(client_sets((24,))[0], batch_size=8))
    return trainer


class At(Callback):
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


def test_a_checkpoint_can_wait_for_the_rounds_end(tmp_path: Path) -> None:
    """Else it is saved after validation, when the module's own epoch-end hook has yet to run."""
    checkpoint = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    save_at_epoch_end(checkpoint)
    assert checkpoint._save_on_train_epoch_end is True
    fit(Regression(), checkpoint, enable_checkpointing=True)
    assert (tmp_path / "last.ckpt").is_file()


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
        values.extend(float(r._forward_cache) for r in result_metrics(trainer) if r.meta.name == "mean")

    fit(Measuring(), At(batch=read))
    assert values == [0.0, 1.0, 2.0]


class Counting(Regression):
    starts, ends, steps = Notes(), Notes(), Notes()

    def __init__(self, enough: int = 99) -> None:
        super().__init__()
        self.enough = enough

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        self.starts.append(batch_idx)
        return -1 if batch_idx == self.enough else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps.append(batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def test_minus_one_ends_a_client_and_not_the_round() -> None:
    """Else all later clients of the round train on nothing and are merged all the same."""
    module = Counting(enough=1)
    trainer = federated(module, federation(local_steps=3), rounds=2)
    assert module.steps == [0] * 2 * len(SIZES)
    assert module.starts == [0, 1] * 2 * len(SIZES)
    assert module.ends == [0] * 2 * len(SIZES)  # as in Lightning, none at the batch that was refused
    assert trainer.global_step == 2 * len(SIZES)
    assert trainer.optimizers[0].param_groups[0]["lr"] == module.lr / 4  # once a round, not once a client


@pytest.mark.parametrize("how", ["module", "callback"])
def test_a_hook_set_on_the_object_is_heard(how: str) -> None:
    """A hook that nobody overrides is not called; one that is given to the object afterwards is."""
    module, callback, heard = Regression(), Callback(), list[str]()
    hooked: Any = module if how == "module" else callback
    hooked.on_train_batch_start = lambda *args: heard.append("start")
    hooked.on_train_batch_end = lambda *args: heard.append("end")
    federated(module, federation(sizes=(16,)), rounds=1, callbacks=[callback])
    assert heard == ["start", "end"] * 2


def test_no_step_is_taken_on_a_batch_that_is_none() -> None:
    """As in plain Lightning, which warns; batches are counted all the same."""

    made = itertools.count()

    def every_other(rows: list[Any]) -> Any:
        return None if next(made) % 2 else torch.utils.data.default_collate(rows)

    class Seen(Callback):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch_idx)

    module, batches = Counting(), Seen()
    datamodule = FederatedDataModule.from_datasets(client_sets((32,)), batch_size=8, collate_fn=every_other)
    with pytest.warns(UserWarning, match="None in place of a batch"):
        federated(module, datamodule, rounds=1, callbacks=[batches])
    assert batches.seen == [0, 1, 2, 3]
    assert len(module.steps) == 2


class Hooks(Callback):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_") and "batch_transfer" not in name:
            return lambda *args, **kwargs: self.heard.append(name)
        return super().__getattribute__(name)


def test_a_single_client_hears_what_plain_lightning_says() -> None:
    """Every hook of a callback, in its order; batches and steps are counted alike."""
    plain, ours, first, second = Hooks(), Hooks(), Counting(), Counting()
    by_lightning = fit(first, plain, epochs=2)
    by_rounds = federated(second, federation(sizes=(24,)), rounds=2, callbacks=[ours])
    assert ours.heard == plain.heard
    assert (by_rounds.global_step, by_rounds.current_epoch) == (by_lightning.global_step, by_lightning.current_epoch)
    assert (second.starts, second.ends, second.steps) == (first.starts, first.ends, first.steps)


PRIVATE_OF_LIGHTNING = {
    "_save_on_train_epoch_end",
    "_current_fx_name",
    "_checkpoint_connector",
    "_results",
    "_forward_cache",
    "_batches_that_stepped",
    "_should_check_val_fx",
    "_signal_connector",
}


@pytest.mark.parametrize("room", ROOMS)
def test_no_other_file_uses_them(room: str) -> None:
    here = Path(loop.__file__).resolve()
    for path in sorted((Path(lit_epgan.__file__).parent / room).rglob("*.py")):
        if path.resolve() == here:
            continue
        used = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        assert not used & PRIVATE_OF_LIGHTNING, f"{path}: {used & PRIVATE_OF_LIGHTNING}"
