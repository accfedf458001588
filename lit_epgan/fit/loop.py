"""Lightning's epoch as a round: the federation says which client's batch is next, Lightning takes the step."""

from collections.abc import Callable
from typing import Any, NamedTuple

from lightning.pytorch import Trainer
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop


class _Fetched:
    """One batch where Lightning's loop asks its data fetcher for the next."""

    def __init__(self, batch: Any, last: bool) -> None:
        self._batch, self.done = batch, last

    def __next__(self) -> tuple[Any, int, int]:
        return self._batch, 0, 0


class RoundLoop(_TrainingEpochLoop):
    """An epoch that is a round: ``round`` runs it, and calls ``step`` for each batch of each client.

    A step is Lightning's own, with all its hooks. Batches are counted by client, so that gradients are accumulated,
    and a schedule of interval "step" runs, as if the client were alone.

    Args:
        trainer: whose loop it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.round: Callable[[], None] = lambda: None
        self._client_trains = False

    @classmethod
    def of(cls, trainer: Trainer) -> "RoundLoop":
        """The trainer's loop, which is replaced where it is another."""
        found = trainer.fit_loop.epoch_loop
        if isinstance(found, cls):
            return found
        loop = cls(trainer)
        loop.val_loop = found.val_loop  # which knows its data by now
        trainer.fit_loop.epoch_loop = loop
        return loop

    def run(self, data_fetcher: Any) -> None:
        """One round, then what Lightning does at an epoch's end: schedules of interval "epoch", and validation."""
        self.reset()
        self.on_iteration_done()  # a resumed round begins at its start
        self.round()
        self.batch_progress.is_last_batch = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        if self._should_check_val_fx(data_fetcher):
            self.trainer.validating = True
            self.val_loop.run()
            self.trainer.training = True

    def step(self, batch: Any, last: bool, number: int) -> bool:
        """One step of a client; False where the module's ``on_train_batch_start`` has ended the client's round.

        Args:
            batch: as the client's data gave it.
            last: whether it is the client's last.
            number: the client's steps before this one.
        """
        if number == 0:
            self.batch_progress.reset_on_run()
        fetched: Any = _Fetched(batch, last)
        self._client_trains = True
        try:
            self.advance(fetched)
            self.on_advance_end(fetched)
        except StopIteration:
            return False
        finally:
            self._client_trains = False
        return True

    def stepped(self, steps: int) -> None:
        """Clients have taken so many steps outside of this loop: side by side."""
        tracked = self.automatic_optimization.optim_progress.optimizer.step.total
        tracked.ready, tracked.completed = tracked.ready + steps, tracked.completed + steps
        self._batches_that_stepped += steps

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Schedules of interval "step" run with a client's steps, those of interval "epoch" with the rounds."""
        if (interval == "step") == self._client_trains:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self._client_trains and super()._should_check_val_fx(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        """No rank waits for the others after each batch, for they have different numbers of batches."""


class Progress(NamedTuple):
    """Where the federation stands, for a progress bar; all counts from 0 but ``step``."""

    round: int
    rounds: int
    client: str
    client_position: int
    clients: int
    step: int
    steps: int | None
