"""A generative adversarial network as a LightningModule: two networks, two optimizers, manual optimization."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from lit_epgan.errors import UserError
from lit_epgan.gan_checks import agreed_latent_dim, check_hyperparameters, check_shape
from lit_epgan.networks.average import ParameterAverage, frozen_copy, has_batch_norm, recompute_batch_norm
from lit_epgan.networks.modes import evaluating
from lit_epgan.objectives import ObjectiveName, gradient_penalty, r1_penalty
from lit_epgan.objectives import objective as named_objective
from lit_epgan.randomness import generator_for
from lit_epgan.steps import Losses, frozen, rows_and_weights, steps_taken


class GAN(LightningModule):
    """Generator against discriminator; each step is one discriminator step and then one generator step.

    A batch is the real data x (batch, *data_shape), or a sequence that begins with it; a third entry is the rows'
    weights (batch,), summing to one, of a weighted mean in the discriminator's real term and in the gradient penalties.

    Args:
        generator: noise (n, latent_dim) -> samples (n, *data_shape).
        discriminator: samples (n, *data_shape) -> scores (n, heads).
        objective: ``wgan-gp``, ``lsgan`` or ``non-saturating``.
        lr: Adam's learning rate.
        lr_discriminator: the discriminator's, if it is to differ.
        betas: Adam's decay rates.
        latent_dim: dimension of the noise; by default what the generator says.
        r1: coefficient of the R1 penalty r1/2 E ||grad D(x)||^2 on real data; 0 is none.
        r1_every: the R1 penalty is taken on every ``r1_every``-th step and scaled by it (lazy regularisation, Karras
            et al. 2020), counted from a fresh optimizer on.
        gp: coefficient of wgan-gp's gradient penalty.
        average: decay of an exponential moving average of the generator's parameters, which is then the generator
            that is evaluated; it starts anew with a fresh optimizer. None: the generator itself is evaluated.
        lr_decay: factor of the learning rates in the last epoch; they fall linearly from epoch to epoch. None:
            constant.
        channels_last: memory format of convolutions, faster on most hardware.

    Raises:
        UserError: a hyperparameter that cannot be; the message names it.
    """

    def __init__(
        self,
        generator: nn.Module,
        discriminator: nn.Module,
        objective: ObjectiveName = "non-saturating",
        lr: float = 1e-3,
        lr_discriminator: float | None = None,
        betas: tuple[float, float] = (0.5, 0.99),
        latent_dim: int | None = None,
        r1: float = 0.0,
        r1_every: int = 4,
        gp: float = 10.0,
        average: float | None = 0.99,
        lr_decay: float | None = None,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        # networks given as objects have no place in a checkpoint's hyperparameters; a CLI gives their configuration
        objects = ["generator", "discriminator"] if _given_hyperparameters.get() is None else []
        self.save_hyperparameters(ignore=objects)
        self.automatic_optimization = False
        self.objective = named_objective(objective)
        self.lr, self.lr_discriminator = lr, lr if lr_discriminator is None else lr_discriminator
        self.betas, self.lr_decay = (betas[0], betas[1]), lr_decay
        self.r1, self.r1_every, self.gp = r1, r1_every, gp if objective == "wgan-gp" else 0.0
        self.latent_dim = agreed_latent_dim(latent_dim, generator)
        check_hyperparameters(self, average)
        self.channels_last = channels_last
        if channels_last:
            generator, discriminator = (net.to(memory_format=torch.channels_last) for net in (generator, discriminator))
        self.generator, self.discriminator = generator, discriminator
        self.average = None if average is None else frozen_copy(generator)
        if average is not None and self.average is not None:
            self._averaging = ParameterAverage(generator, self.average, weight=1 - average)
        # BatchNorm must not see real and generated rows in one batch
        self._one_pass = not has_batch_norm(discriminator)
        self.losses = Losses()

    # ------------------------------------------------------------------ training

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One step of the discriminator on (real, fresh samples), then one of the generator."""
        real, weight = rows_and_weights(batch)
        if self.channels_last:
            real = real.contiguous(memory_format=torch.channels_last)
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        steps = steps_taken(discriminator_optimizer)
        if steps == 0 and self.average is not None:
            self._averaging.start()

        discriminator_loss = self._discriminator_loss(real, weight, steps)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()

        # frozen parameters get no gradient that the next step would throw away
        with frozen(discriminator_optimizer.param_groups[0]["params"]):
            fake = self.generator(self._noise(len(real), real))
            generator_loss = self.objective.generator_loss(self.discriminator(fake))
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
        generator_optimizer.step()

        if self.average is not None:
            self._averaging.update()
        self.losses.add(discriminator_loss, generator_loss)

    @property
    def step_losses(self) -> Tensor | None:
        """Discriminator's and generator's loss (2,) of the last step of this epoch, for a progress bar."""
        return None if self.losses.last is None else torch.stack(self.losses.last)

    def on_fit_start(self) -> None:
        """Refuse data of another shape than the generator's, where the data module says its ``shape``."""
        check_shape(getattr(self.trainer.datamodule, "shape", None), self.sample(1, generator_for("shape")).shape[1:])  # type: ignore[attr-defined]

    def on_train_epoch_start(self) -> None:
        """Begin the epoch's mean losses."""
        self.losses = Losses()

    def on_train_epoch_end(self) -> None:
        """Log the mean losses; step the learning rates' schedules, which manual optimization leaves to the module."""
        # once an epoch: a self.log in every step costs 200 us of a step's 1,000
        discriminator_loss, generator_loss = self.losses.mean()
        self.log("loss/discriminator", discriminator_loss, prog_bar=True, sync_dist=True)
        self.log("loss/generator", generator_loss, prog_bar=True, sync_dist=True)
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else []:
            scheduler.step()  # type: ignore[call-arg]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Two Adams, generator first; with ``lr_decay`` a linear schedule each, stepped every epoch."""
        optimizers = [self._adam(self.generator, self.lr), self._adam(self.discriminator, self.lr_discriminator)]
        if self.lr_decay is None:
            return optimizers
        epochs = self.trainer.max_epochs
        if epochs is None or epochs < 1:
            raise UserError("lr_decay falls until the last epoch: give the trainer max_epochs, or leave lr_decay out.")
        decay, last = self.lr_decay, max(1, epochs - 1)

        def factor(epoch: int) -> float:
            return 1 - (1 - decay) * min(epoch / last, 1.0)

        return optimizers, [LambdaLR(optimizer, factor) for optimizer in optimizers]

    def _discriminator_loss(self, real: Tensor, weight: Tensor | None, steps: int) -> Tensor:
        with torch.no_grad():
            fake = self.generator(self._noise(len(real), real))
        penalised = self.r1 > 0 and steps % self.r1_every == 0
        if penalised:
            real = real.detach().requires_grad_()
        if self._one_pass and not penalised:
            scores, fake_scores = self.discriminator(torch.cat([real, fake])).split(len(real))
        else:
            scores, fake_scores = self.discriminator(real), self.discriminator(fake)
        loss = self.objective.discriminator_loss(scores, fake_scores, weight)
        if penalised:
            loss = loss + self.r1 * self.r1_every * r1_penalty(scores, real, weight)
        if self.gp:
            loss = loss + self.gp * gradient_penalty(self.discriminator, real, fake, weight)
        return loss

    def _adam(self, network: nn.Module, lr: float) -> Adam:
        # fused is fastest on a CPU (950 against 1,130 us a step for the digits' MLPs); on an accelerator it would
        # keep Adam's step count there, and reading it would make the host wait
        return Adam(network.parameters(), lr=lr, betas=self.betas, fused=self.device.type == "cpu" or None)

    def _noise(self, n: int, like: Tensor) -> Tensor:
        return torch.randn(n, self.latent_dim, device=like.device, dtype=like.dtype)

    # ------------------------------------------------------------------ evaluation

    @property
    def evaluated_generator(self) -> nn.Module:
        """The network that is sampled from: the average if there is one, else the generator."""
        return self.generator if self.average is None else self.average

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples (n, *data_shape) of the evaluated generator in evaluation mode, without gradients.

        BatchNorm statistics are first recomputed from noise: whoever merged or loaded parameters, they fit.

        Args:
            n: number of samples.
            generator: the noise's stream; without it the global one.
        """
        self.refresh_statistics()
        return self._draw(n, generator)

    def refresh_statistics(self) -> None:
        """Recompute the evaluated generator's BatchNorm statistics from noise of a stream of its own."""
        if has_batch_norm(self.evaluated_generator):
            noise = self._evaluation_noise(1000, generator_for("batch norm statistics"))
            recompute_batch_norm(self.evaluated_generator, noise.split(250))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing: a GAN is judged by its samples, which callbacks look at."""

    test_step = validation_step

    def on_predict_start(self) -> None:
        """Make the statistics ready once, for all batches."""
        self.refresh_statistics()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """As many samples as the batch has rows."""
        return self._draw(len(rows_and_weights(batch)[0]), None)

    def forward(self, noise: Tensor) -> Tensor:
        """Samples (n, *data_shape) of ``noise`` (n, latent_dim) by the evaluated generator."""
        samples: Tensor = self.evaluated_generator(noise)
        return samples

    @torch.no_grad()
    def _draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        # noise in one piece, so that the samples do not depend on how memory divides the work
        parts = self._evaluation_noise(n, generator).split(500)
        with evaluating(self.evaluated_generator):
            return torch.cat([self.evaluated_generator(part) for part in parts])

    def _evaluation_noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        device = None if generator is None else generator.device
        like = next(self.generator.parameters())
        return torch.randn(n, self.latent_dim, generator=generator, device=device).to(like)
