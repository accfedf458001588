"""A fit's local steps as the engine sees them: which batch is stepped, losses, gradients, and steps of optimizers."""

from collections.abc import Iterable
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from lit_epgan.callbacks.lightning_internals import StepControl
from lit_epgan.callbacks.round_driver import RoundDriver
from lit_epgan.engine import OptimizedParameters
from lit_epgan.engine.side_by_side import StepHook
from lit_epgan.precision import no_autocast


class StepsInFit:
    """Tells a round's driver of each local step that a Trainer takes, from the fit's begin to its end.

    A module that steps its optimizers by itself does so under autocast, which algorithms must not see.

    Args:
        trainer: takes the steps.
        module: what it trains.
        driver: of the rounds.
        optimized: each optimizer and its parameters.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, driver: RoundDriver, optimized: Iterable[OptimizedParameters]
    ) -> None:
        self._trainer, self._driver = trainer, driver
        self._optimized = {id(each.optimizer): each for each in optimized}
        self._hooks = [
            each.optimizer.register_step_post_hook(StepHook(partial(driver.seat.after_step, each)))
            for each in self._optimized.values()
        ]
        self._control = StepControl(
            trainer,
            module,
            passes=driver.passes,
            skips=lambda: driver.skips,
            accumulated=lambda: driver.steps_now(trainer.accumulate_grad_batches),
            position=lambda: driver.position,
            ended=driver.end_client,
        )

    def before_backward(self, loss: Tensor) -> None:
        """Add the algorithm's loss to ``loss`` ()."""
        self._driver.before_backward(loss)
        if not self._driver.seat.adds_loss():
            return
        with no_autocast(loss.device):
            extra = self._driver.seat.extra_loss()
        if extra is None:
            return
        extra = extra / self._trainer.accumulate_grad_batches
        if hasattr(loss.grad_fn, "_saved_result"):  # a square root, say, needs its value for its own gradient
            extra.backward(retain_graph=True)
        else:
            loss.add_(extra)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let the algorithm adjust the gradients of the optimizer's parameters."""
        self._driver.before_step(self._optimized[id(optimizer)])

    def remove(self) -> None:
        """Leave the Trainer, the module and the optimizers as they were."""
        self._control.remove()
        for hook in self._hooks:
            hook.remove()
