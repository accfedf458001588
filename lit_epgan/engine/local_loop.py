"""Clients' training where no Trainer drives it: side by side where that can be, otherwise one after another."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lit_epgan.engine.seat import Answer, Seat
from lit_epgan.engine.side_by_side import NotVectorizedError
from lit_epgan.engine.vectorized import Job, Loss, VectorizedSeats


class LocalLoop:
    """Answers tasks by training steps: the loss of a batch, its gradient, a step of the one optimizer.

    Args:
        seat: where clients work; its optimizer tells it of its steps (``Seat.after_step``).
        loss: of a step.
        vectorized: whether clients may work side by side.
        tell: is told, once, why they do not.

    Attributes:
        logged: what steps have logged, by name: the sum over clients and steps, and how many they are.
    """

    def __init__(
        self, seat: Seat, loss: Loss, vectorized: bool = True, tell: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._seat, self._loss, self._tell = seat, loss, tell
        self._side_by_side: VectorizedSeats | None = None
        self.logged: dict[str, tuple[Tensor, int]] = {}
        if vectorized:
            try:
                self._side_by_side = VectorizedSeats(seat, loss)
            except NotVectorizedError as reason:
                tell(str(reason))

    def answers(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Every job and its answer, whose report is to be read before the next one is asked for."""
        for together in self._alike(jobs):
            yield from self._together(together)

    def _alike(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Jobs whose batches have the same shapes, as many as go together."""
        waiting: dict[Any, list[Job]] = {}
        for job in jobs:
            rows = 1 if self._side_by_side is None else self._side_by_side.rows
            together = waiting.setdefault(_shapes(job.batches), [])
            together.append(job)
            if len(together) >= rows:
                yield waiting.pop(_shapes(job.batches))
        yield from waiting.values()

    def _together(self, jobs: list[Job]) -> Iterator[tuple[Job, Answer]]:
        if self._side_by_side is not None:
            try:
                logged = self._side_by_side.train(jobs)
            except NotVectorizedError as reason:
                self._side_by_side = None
                self._tell(str(reason))
            else:
                for step in logged:
                    self._log(step)
                yield from self._side_by_side.close(jobs)
                return
        for job in jobs:
            yield job, self._alone(job)

    def _alone(self, job: Job) -> Answer:
        """One client at the seat."""
        seat, optimized = self._seat, self._seat.place.optimized[0]
        seat.open(job.task, job.private, len(job.batches))
        for number, batch in enumerate(job.batches):
            taken = seat.batch(batch, job.weight)
            optimized.optimizer.zero_grad()
            with torch.enable_grad():
                loss, logged = self._loss(seat.place.module, taken, number)
                extra = seat.extra_loss()
                (loss if extra is None else loss + extra).backward()
            self._log(logged)
            seat.before_step(optimized)
            optimized.optimizer.step()
        answer = seat.close()
        assert answer is not None
        return answer

    def _log(self, step: dict[str, Tensor]) -> None:
        for name, values in step.items():
            total, number = self.logged.get(name, (0, 0))
            self.logged[name] = total + values.detach().sum(), number + values.numel()

    def means(self) -> dict[str, Tensor]:
        """The means of what steps have logged since the last call."""
        found = {name: total / number for name, (total, number) in self.logged.items()}
        self.logged = {}
        return found


def _shapes(batches: list[Any]) -> Any:
    """What batches must have in common to become one: their structure, shapes and data types."""
    leaves, structure = tree_flatten(batches)
    kinds = ((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)
    return (str(structure), *kinds)
