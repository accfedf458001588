"""When a round is looked at, and which samples are: what the metrics and the pictures share."""

from collections.abc import Iterator

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_epgan.federated.tilted_batch import check_sample
from lit_epgan.fit.private_runs import public
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.randomness import generator_for


class RoundEvaluation(Callback):
    """Looks at the module every ``every_n_epochs``-th round and after the last, when validation ends.

    Where nothing is validated the round's own end takes that place; ``validate`` and ``test`` always look.
    Subclasses override ``evaluate``, which must leave the global random streams alone.

    Args:
        every_n_epochs: rounds from one look to the next.
    """

    def __init__(self, every_n_epochs: int = 1) -> None:
        at_least(1, self, every_n_epochs=every_n_epochs)
        self.every_n_epochs = every_n_epochs

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the module, which holds the server's parameters."""
        raise NotImplementedError

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and self._due(trainer):
            self._look(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()  # it knows of no batches before it first validates
        if not sum(trainer.num_val_batches) and self._due(trainer):
            self._look(trainer, pl_module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    @torch.no_grad()
    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with public(pl_module):
            self.evaluate(trainer, pl_module)

    def _due(self, trainer: Trainer) -> bool:
        finished = trainer.current_epoch + 1
        return trainer.state.fn != "fit" or finished % self.every_n_epochs == 0 or finished == trainer.max_epochs


class SampleEvaluation(RoundEvaluation):
    """One that looks at the module's samples: a module without ``sample`` is refused before it trains."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_sample(pl_module, type(self).__name__)


def data_dir(trainer: Trainer) -> str:
    """The folder of the data module's files, where an extractor that is trained on them finds them."""
    return str(getattr(getattr(trainer, "datamodule", None), "data_dir", "data"))


def sample_sets(trainer: Trainer, pl_module: LightningModule, n: int, purpose: str) -> dict[str, Tensor]:
    """The module's own samples under "", and what other callbacks offer by ``extra_samples(n)`` under their names.

    The noise is the same in every round and on every rank, so that curves and pictures show the training alone.
    UserError: the module has no method ``sample(n, generator)``.
    """
    return next(sample_parts(trainer, pl_module, n, purpose, size=n))


def sample_parts(
    trainer: Trainer, pl_module: LightningModule, n: int, purpose: str, each_generator: bool = False, size: int = 2500
) -> Iterator[dict[str, Tensor]]:
    """``sample_sets`` in parts of at most ``size`` samples, n in all.

    Args:
        trainer: asked for other callbacks' samples, from position ``start`` on: ``extra_samples(n, start)``.
        pl_module: has ``sample(n, generator)``.
        n: samples of every set.
        purpose: names the noise's stream.
        each_generator: whether n samples of every generator are sets of their own, too (``generator_0``, ...), where
            the module has ``sample_each``.
        size: samples of a part.

    Raises:
        UserError: the module has no method ``sample(n, generator)``.
    """
    check_sample(pl_module, "a callback")
    noise, each_noise = generator_for(purpose), generator_for(purpose, "each")
    for start in range(0, n, size):
        rows = min(size, n - start)
        own: Tensor = pl_module.sample(rows, noise)  # type: ignore[operator]
        sets = {"": own}
        if each_generator and hasattr(pl_module, "sample_each"):
            each: Tensor = pl_module.sample_each(rows, each_noise)  # type: ignore[operator]
            sets |= {f"generator_{i}": samples for i, samples in enumerate(each)}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, "extra_samples"):
                sets |= callback.extra_samples(rows, start)
        yield sets


def prefixed(prefix: str, name: str) -> str:
    """``union/fid_digits`` for a sample set's metric; the module's own have no prefix."""
    return f"{prefix}/{name}" if prefix else name
