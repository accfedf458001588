"""An acoustic model as a LightningModule: from frames to posteriors of HMM states, trained by cross-entropy."""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.modules.optimizers import adam, linear_decay


class Recogniser(LightningModule, ABC):
    """What acoustic models share: log posteriors of HMM states, and what evaluation logs of them.

    A batch is (x, states): chunks of frames, float tensor (batch, frames, inputs), and the frames' HMM states, int64
    (batch, frames), -100 where there is none. Validation and test log the mean cross-entropy of a frame and the share
    of frames whose state is the most probable one, in percent.

    Attributes:
        network: what says, in ``pdfs`` and ``inputs``, how many HMM states it scores and columns it takes.
        beside: columns that it is given beside those of a frame.
    """

    network: nn.Module
    beside: int = 0

    @abstractmethod
    def scores(self, x: Tensor) -> Tensor:
        """Scores (batch, frames, states) of ``x`` (batch, frames, inputs)."""

    def on_fit_start(self) -> None:
        """Refuse data with other HMM states or columns than the network's, where the data module says how many."""
        super().on_fit_start()
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        check_states(getattr(data, "pdfs", None), getattr(self.network, "pdfs", None))
        check_inputs(getattr(data, "inputs", None), self.beside, getattr(self.network, "inputs", None))

    def forward(self, x: Tensor) -> Tensor:
        """Log posteriors (batch, frames, states) of ``x`` (batch, frames, inputs)."""
        return F.log_softmax(self.scores(x).float(), -1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``val_loss`` and ``val_accuracy``."""
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Log ``test_loss`` and ``test_accuracy``."""
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log posteriors (batch, frames, states)."""
        posteriors: Tensor = self(batch[0])
        return posteriors

    def _evaluate(self, split: str, batch: Any) -> None:
        x, states = batch
        posteriors = self(x)
        values = {f"{split}_loss": cross_entropy(posteriors, states), f"{split}_accuracy": accuracy(posteriors, states)}
        self.log_dict(values, batch_size=len(x), sync_dist=True)


class AcousticModel(Recogniser):
    """Learns p(HMM state | frames) from a forced alignment; a recogniser's graph turns it into words.

    Args:
        network: x (batch, frames, inputs) -> scores (batch, frames, states).
        lr: Adam's learning rate.
        betas: its decay rates.
        lr_decay: factor of the learning rate in the last epoch; it falls linearly from epoch to epoch. None: constant.

    Raises:
        UserError: a learning rate that is not positive.
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        lr_decay: float | None = None,
    ) -> None:
        super().__init__()
        if not 0 < lr < math.inf:
            raise UserError(f"the model's lr is {lr}, but must be positive.")
        # a network given as an object has no place in a checkpoint's hyperparameters; a CLI gives its configuration
        self.save_hyperparameters(ignore=["network"] if _given_hyperparameters.get() is None else [])
        self.network, self.lr, self.betas, self.lr_decay = network, lr, (betas[0], betas[1]), lr_decay

    def scores(self, x: Tensor) -> Tensor:
        """The network's."""
        scores: Tensor = self.network(x)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Cross-entropy of the batch's frames."""
        x, states = batch
        loss = cross_entropy(self.scores(x), states)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(x), sync_dist=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, with ``lr_decay`` under a linear schedule that is stepped every epoch."""
        optimizer = adam(self.parameters(), self.lr, self.betas)
        if self.lr_decay is None:
            return optimizer
        return [optimizer], [linear_decay(optimizer, self.lr_decay, self.trainer.max_epochs)]


def cross_entropy(scores: Tensor, states: Tensor) -> Tensor:
    """- mean log softmax(scores)[state] over the frames that have one.

    Args:
        scores: float tensor (batch, frames, states).
        states: int64 tensor (batch, frames), -100 for none.
    """
    return F.cross_entropy(scores.flatten(0, 1).float(), states.flatten())


def accuracy(scores: Tensor, states: Tensor) -> Tensor:
    """Percent of the frames whose state has the highest of ``scores`` (batch, frames, states)."""
    known = states >= 0
    return 100 * (scores.argmax(-1) == states)[known].float().mean()


def check_states(data: int | None, network: int | None) -> None:
    """Refuse a network whose outputs are not the data's HMM states.

    Raises:
        UserError: both say how many there are, and differ.
    """
    if data is not None and network is not None and data != network:
        raise UserError(f"the data have {data} HMM states, the network {network}: set its pdfs to {data}.")


def check_inputs(data: int | None, beside: int, network: int | None) -> None:
    """Refuse a network that takes other columns than a frame's and those beside it.

    Raises:
        UserError: data and network say how many there are, and differ.
    """
    if data is not None and network is not None and data + beside != network:
        further = f" and {beside} of features beside it" if beside else ""
        raise UserError(
            f"a frame has {data} columns{further}, the network takes {network}: set its inputs to {data + beside}."
        )
