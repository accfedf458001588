"""Gradient accumulation that starts and ends with each client."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

from lit_epgan.callbacks.round import Round


class ClientAccumulation:
    """Counts ``accumulate_grad_batches`` from each client's first batch and steps at its last.

    Lightning counts from the round's first batch, so gradients of one client would wait for the next one's. Its two
    decisions, when to step and when to clear gradients, are answered here with the client's own step instead.
    """

    def __init__(self, trainer: Trainer, current: Callable[[], Round | None]) -> None:
        loop = trainer.fit_loop.epoch_loop
        clear = loop.automatic_optimization._make_zero_grad_fn

        def reached() -> bool:
            round_ = current()
            if round_ is None or round_.client is None or round_.mark is None:
                return True
            return round_.mark.last or round_.client.step % trainer.accumulate_grad_batches == 0

        def make_zero_grad(batch_idx: int, optimizer: Any) -> Any:
            round_ = current()
            assert round_ is not None
            assert round_.client is not None
            return clear(round_.client.step - 1, optimizer)

        loop._accumulated_batches_reached = reached  # type: ignore[method-assign]
        loop.automatic_optimization._make_zero_grad_fn = make_zero_grad  # type: ignore[method-assign]
        self._loop = loop

    def remove(self) -> None:
        del self._loop._accumulated_batches_reached
        del self._loop.automatic_optimization._make_zero_grad_fn
