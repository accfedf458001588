"""An acoustic model that recognises by what a GAN's discriminator has learnt, too (EP-GAN, section 5.3, figure 11)."""

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.errors import UserError
from lit_epgan.modules.acoustic import Recogniser, cross_entropy
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Rows, rows_of, steps_taken
from lit_epgan.modules.optimizers import adam, linear_decay


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
        if isinstance(self.hparams.get("network"), nn.Module):  # as in GAN: objects have no place in a checkpoint's
            self.hparams.pop("network")
        if not gan_weight > 0:
            raise UserError(f"the model's gan_weight is {gan_weight}, but must be positive.")
        if not hasattr(discriminator, "features"):
            raise UserError("the model's discriminator has no features: take lit_epgan.networks.SRUDiscriminator.")
        self.network, self.gan_weight, self.sample_acoustic = network, gan_weight, sample_acoustic
        self.beside = getattr(discriminator, "features_width", 0)
        self.lr_acoustic = self.lr if lr_acoustic is None else lr_acoustic
        self._sampled = True  # whether the step at hand is a sampler's

    def scores(self, x: Tensor) -> Tensor:
        """Those of the frames with the discriminator's features beside."""
        features = self.discriminator.features(x)  # type: ignore[operator]
        scores: Tensor = self.network(torch.cat([x, features.to(x.dtype)], -1))
        return scores

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
        if self.lr_decay is None:
            return optimizers
        return optimizers, [linear_decay(optimizer, self.lr_decay, self.trainer.max_epochs) for optimizer in optimizers]

    def _acoustic_turn(self, optimizer: Any, discriminator_optimizer: Any, rows: Rows) -> None:
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
