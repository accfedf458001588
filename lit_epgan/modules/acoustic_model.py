"""Acoustic models as LightningModules: from frames to posteriors of HMM states, alone or beside a GAN."""

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch, adam, linear_decay, rows_of, steps_taken


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
        self._evaluate("val", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Log posteriors (batch, frames, states)."""
        return self(batch[0])

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
    """

    def __init__(
        self,
        network: nn.Module,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        lr_decay: float | None = None,
    ) -> None:
        super().__init__()
        within("(0, inf)", "model", lr=lr)
        self.save_hyperparameters(ignore=["network"])
        self.network, self.lr, self.betas, self.lr_decay = network, lr, (betas[0], betas[1]), lr_decay

    def scores(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
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
    """- mean log softmax(scores)[state] of scores (batch, frames, states) over frames with a state, int64 (batch,
    frames); -100 is none."""
    return F.cross_entropy(scores.flatten(0, 1).float(), states.flatten())


def accuracy(scores: Tensor, states: Tensor) -> Tensor:
    """Percent of the frames whose state has the highest of ``scores`` (batch, frames, states)."""
    known = states >= 0
    return 100 * (scores.argmax(-1) == states)[known].float().mean()


def check_states(data: int | None, network: int | None) -> None:
    """Refuse a network whose outputs are not the data's HMM states."""
    if data is not None and network is not None and data != network:
        raise UserError(f"the data have {data} HMM states, the network {network}: set its pdfs to {data}.")


def check_inputs(data: int | None, beside: int, network: int | None) -> None:
    """Refuse a network that takes other columns than a frame's and those beside it."""
    if data is not None and network is not None and data + beside != network:
        further = f" and {beside} of features beside it" if beside else ""
        raise UserError(
            f"a frame has {data} columns{further}, the network takes {network}: set its inputs to {data + beside}."
        )


class SpeechGAN(Recogniser, GAN):
    """A (Bayesian) GAN of chunks of frames, and an acoustic model on frames with the discriminator's features beside.

        L = L_ce(theta_SRU, theta_D) + lambda_gan L_gan(theta_G, theta_D)

    Each step trains first the GAN and then the acoustic model together with the discriminator (EP-GAN, appendix F.4.3).
    Adam does not see how large a loss is, only what it is relative to others of the same parameters: so lambda_gan
    enters as L_ce / lambda_gan in the discriminator, and lambda_ep is an algorithm's weight of its prior for all
    networks. An algorithm's prior pulls in every step, so on the discriminator twice; the sampler's noise and the
    module's own prior are in the GAN's steps, and the acoustic model's if it is sampled.

    A batch is (x, states), as ``lit_epgan.modules.AcousticModel``'s, and so are the metrics. A third entry weighs the
    rows as in ``lit_epgan.modules.GAN``; rows whose states are all -100 train the GAN alone.

    Args:
        network: frames with features beside (batch, frames, inputs + bottleneck) -> scores (batch, frames, states).
        generator: noise -> chunks (n, frames, inputs).
        discriminator: chunks -> scores, with ``features``: (n, frames, inputs) -> (n, frames, bottleneck).
        gan_weight: lambda_gan.
        lr_acoustic: the acoustic model's learning rate; by default ``lr``.
        sample_acoustic: whether the sampler's noise and the prior are the acoustic model's, too.
        gan: what ``lit_epgan.modules.GAN`` takes beside.

    Raises:
        UserError: an argument that cannot be, or a network that does not take as many columns as there are.
    """

    def __init__(
        self,
        network: nn.Module,
        generator: nn.Module,
        discriminator: nn.Module,
        gan_weight: float = 0.1,
        lr_acoustic: float | None = None,
        sample_acoustic: bool = False,
        **gan: Any,
    ) -> None:
        super().__init__(generator, discriminator, **gan)
        above(0, "model", gan_weight=gan_weight)
        if not hasattr(discriminator, "features"):
            raise UserError("the model's discriminator has no features: take lit_epgan.networks.SRUDiscriminator.")
        self.network, self.gan_weight, self.sample_acoustic = network, gan_weight, sample_acoustic
        self.beside = getattr(discriminator, "features_width", 0)
        self.lr_acoustic = self.lr if lr_acoustic is None else lr_acoustic
        self._sampled = True  # whether the step at hand is a sampler's

    def scores(self, x: Tensor) -> Tensor:
        """Those of the frames with the discriminator's features beside."""
        features = self.discriminator.features(x)  # type: ignore[operator]
        return self.network(torch.cat([x, features.to(x.dtype)], -1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """A step of the discriminator, one of the generator, one of the acoustic model and the discriminator."""
        rows = rows_of(batch)
        generator_optimizer, discriminator_optimizer, acoustic_optimizer = self.optimizers()  # type: ignore[attr-defined]
        self.losses.begin_step()
        # the discriminator steps twice; what comes every n steps comes every n batches
        self._discriminator_turn(discriminator_optimizer, rows, steps_taken(generator_optimizer))
        self._generator_turn(generator_optimizer, discriminator_optimizer, rows)
        self._acoustic_turn(acoustic_optimizer, discriminator_optimizer, rows)

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The prior's gradient and the sampler's noise: the GAN's, and the acoustic model's if it is sampled."""
        if self._sampled:
            super().on_before_optimizer_step(optimizer)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Three optimizers: generator, discriminator, acoustic model; with ``lr_decay`` a linear schedule each."""
        optimizers = [
            self._optimizer(self.generator, self.lr),
            self._optimizer(self.discriminator, self.lr_discriminator),
            adam(self.network.parameters(), self.lr_acoustic, self.betas),
        ]
        return self._scheduled(optimizers)

    def _acoustic_turn(self, optimizer: Any, discriminator_optimizer: Any, rows: Batch) -> None:
        loss = cross_entropy(self.scores(rows.x), rows.labels)
        optimizer.zero_grad()
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss)
        torch._foreach_mul_(
            [p.grad for p in self.discriminator.parameters() if p.grad is not None], 1 / self.gan_weight
        )
        self._sampled = self.sample_acoustic
        optimizer.step()
        self._sampled = False
        discriminator_optimizer.step()
        self._sampled = True
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=len(rows.x), sync_dist=True)
