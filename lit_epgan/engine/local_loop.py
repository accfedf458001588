"""Clients' training where no Trainer drives it: side by side where that can be, otherwise one after another."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lit_epgan.engine.jobs import Answer, Job
from lit_epgan.engine.seat import Seat
from lit_epgan.engine.side_by_side import NotVectorizedError
from lit_epgan.engine.vectorized import Loss, VectorizedSeats
from lit_epgan.errors import UserError


class LocalLoop:
    """Answers tasks by training steps: the loss of a batch, its gradient, a step of the one optimizer.

    Whether clients can go side by side is found out once, by the first one's first step.

    Args:
        seat: where clients work; its optimizer tells it of its steps (``Seat.after_step``).
        loss: of a step.
        vectorized: whether clients may work side by side.
        tell: is told, once, why they do not.

    Attributes:
        logged: what steps have logged, by name: the sum over clients and steps, times their rows; and all rows.
    """

    def __init__(
        self, seat: Seat, loss: Loss, vectorized: bool = True, tell: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._seat, self._loss, self._tell = seat, loss, tell
        self._side_by_side: VectorizedSeats | None = None
        self._tried = not vectorized
        self.logged: dict[str, tuple[Tensor, int]] = {}

    def answers(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Answer]]:
        """Every job and its answer, whose report is to be read before the next one is asked for."""
        for together in self._alike(jobs):
            yield from self._together(together)

    def _alike(self, jobs: Iterable[Job]) -> Iterator[list[Job]]:
        """Jobs whose batches have the same shapes, as many as go together."""
        waiting: dict[Any, list[Job]] = {}
        for job in jobs:
            if not self._tried:
                self._try_out(job)
            if self._side_by_side is None:
                yield [job]
                continue
            shapes = _shapes(job.batches)
            together = waiting.setdefault(shapes, [])
            together.append(job)
            if len(together) >= self._side_by_side.rows:
                yield waiting.pop(shapes)
        yield from waiting.values()

    def _try_out(self, job: Job) -> None:
        """Find out by a step without consequences, so that a resumed run finds out the same."""
        self._tried = True
        try:
            side_by_side = VectorizedSeats(self._seat, self._loss)
            side_by_side.try_out(job)
            self._side_by_side = side_by_side
        except NotVectorizedError as reason:
            self._tell(str(reason))

    def _together(self, jobs: list[Job]) -> Iterator[tuple[Job, Answer]]:
        if self._side_by_side is None:
            yield from ((job, self._alone(job)) for job in jobs)
            return
        try:
            logged = self._side_by_side.train(jobs)
        except NotVectorizedError as reason:
            raise UserError(
                f"clients have trained side by side so far, and no longer can: {reason}; let the Trainer drive "
                "their steps (local_steps: trainer)"
            ) from reason
        for batch, step in zip(jobs[0].batches, logged, strict=True):
            self._log(step, batch)
        yield from self._side_by_side.close(jobs)

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
            self._log(logged, taken)
            seat.before_step(optimized)
            optimized.optimizer.step()
        answer = seat.close()
        assert answer is not None
        return answer

    def _log(self, step: dict[str, Tensor], batch: Any) -> None:
        rows = next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)
        for name, values in step.items():
            total, weight = self.logged.get(name, (0, 0))
            self.logged[name] = total + rows * values.detach().sum(), weight + rows * values.numel()

    def means(self) -> dict[str, Tensor]:
        """What steps have logged since the last call: means over the batches' rows."""
        found = {name: total / weight for name, (total, weight) in self.logged.items()}
        self.logged = {}
        return found


def _shapes(batch: Any) -> Any:
    """What batches must have in common to become one: their structure, shapes and data types."""
    if isinstance(batch, Tensor):
        return batch.shape, batch.dtype
    if isinstance(batch, Mapping):
        return tuple((key, _shapes(value)) for key, value in batch.items())
    return (type(batch), *map(_shapes, batch)) if isinstance(batch, list | tuple) else type(batch)
