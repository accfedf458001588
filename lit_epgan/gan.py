"""A generative adversarial network as a LightningModule: two networks, two optimizers, manual optimization."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lit_epgan.errors import UserError
from lit_epgan.networks.average import average_slots, frozen_copy, has_batch_norm, recompute_batch_norm
from lit_epgan.objectives import ObjectiveName, gradient_penalty, r1_penalty
from lit_epgan.objectives import objective as named_objective
from lit_epgan.randomness import generator_for


class Losses:
    """The two losses of the last step, and their means over an epoch, without making the host wait for the device."""

    def __init__(self) -> None:
        self.last: tuple[Tensor, Tensor] | None = None
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, discriminator: Tensor, generator: Tensor) -> None:
        """Take in one step's losses."""
        self.last = discriminator.detach(), generator.detach()
        self._sum = torch.stack(self.last) + self._sum
        self._count += 1

    def mean(self) -> tuple[Tensor, Tensor]:
        """Mean discriminator and generator loss of the steps so far; NaN if there were none."""
        means = self._sum / self._count if isinstance(self._sum, Tensor) else torch.full((2,), math.nan)
        return means[0], means[1]


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
        self.latent_dim = _latent_dim(latent_dim, generator)
        self._check(average)
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.generator = generator.to(memory_format=self.memory_format)
        self.discriminator = discriminator.to(memory_format=self.memory_format)
        self.average = None if average is None else frozen_copy(generator)
        self._average_weight = 1 - (average or 0.0)
        self._slots = [] if self.average is None else average_slots(generator, self.average)
        # BatchNorm must not see real and generated rows in one batch
        self._one_pass = not has_batch_norm(discriminator)
        self.losses = Losses()

    # ------------------------------------------------------------------ training

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One step of the discriminator on (real, fresh samples), then one of the generator."""
        real, weight = _rows_and_weights(batch)
        real = real.contiguous(memory_format=self.memory_format) if real.dim() == 4 else real
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        parameters = generator_optimizer.param_groups[0]["params"]
        steps = _steps_taken(discriminator_optimizer)
        if steps == 0 and self.average is not None:
            torch._foreach_copy_(self._averaged(), parameters)

        discriminator_loss = self._discriminator_loss(real, weight, steps)
        discriminator_optimizer.zero_grad()
        self.manual_backward(discriminator_loss)
        discriminator_optimizer.step()

        # frozen parameters get no gradient that the next step would throw away
        with _frozen(discriminator_optimizer.param_groups[0]["params"]):
            fake = self.generator(self._noise(len(real), real))
            generator_loss = self.objective.generator_loss(self.discriminator(fake))
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
        generator_optimizer.step()

        if self.average is not None:
            with torch.no_grad():
                torch._foreach_lerp_(self._averaged(), parameters, self._average_weight)
        self.losses.add(discriminator_loss, generator_loss)

    @property
    def step_losses(self) -> Tensor | None:
        """Discriminator's and generator's loss (2,) of the last step of this epoch, for a progress bar."""
        return None if self.losses.last is None else torch.stack(self.losses.last)

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

    def _averaged(self) -> list[Tensor]:
        return [buffers[name] for buffers, name in self._slots]

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
        return self._draw(len(_rows_and_weights(batch)[0]), None)

    def forward(self, noise: Tensor) -> Tensor:
        """Samples (n, *data_shape) of ``noise`` (n, latent_dim) by the evaluated generator."""
        samples: Tensor = self.evaluated_generator(noise)
        return samples

    @torch.no_grad()
    def _draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        network = self.evaluated_generator
        mode = network.training
        network.eval()
        # noise in one piece, so that the samples do not depend on how memory divides the work
        samples = torch.cat([network(part) for part in self._evaluation_noise(n, generator).split(500)])
        network.train(mode)
        return samples

    def _evaluation_noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        device = self.device if generator is None else generator.device
        return torch.randn(n, self.latent_dim, generator=generator, device=device, dtype=self._float).to(self.device)

    def _check(self, average: float | None) -> None:
        numbers = {
            "lr": (self.lr, 0 < self.lr < math.inf, "positive"),
            "lr_discriminator": (self.lr_discriminator, 0 < self.lr_discriminator < math.inf, "positive"),
            "betas": (self.betas, all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            "r1": (self.r1, 0 <= self.r1 < math.inf, "zero or positive"),
            "r1_every": (self.r1_every, self.r1_every >= 1, "at least 1"),
            "gp": (self.gp, 0 <= self.gp < math.inf, "zero or positive"),
            "average": (average, average is None or 0 <= average < 1, "in [0, 1), or null for no average"),
            "lr_decay": (self.lr_decay, self.lr_decay is None or 0 <= self.lr_decay <= 1, "in [0, 1], or null"),
        }
        for name, (value, good, wanted) in numbers.items():
            if not good:
                raise UserError(f"the model's {name} is {value}, but must be {wanted}.")


def _rows_and_weights(batch: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(batch, Tensor):
        return batch, None
    return batch[0], batch[2] if len(batch) > 2 else None


def _latent_dim(given: int | None, generator: nn.Module) -> int:
    own = getattr(generator, "latent_dim", None)
    dimension = own if given is None else given
    if dimension is None:
        raise UserError("the generator does not say its latent_dim: give the model's latent_dim.")
    if own not in (None, dimension) or dimension < 1:
        raise UserError(f"the model's latent_dim is {dimension}, but its generator takes {own}: leave it out.")
    return int(dimension)


def _steps_taken(optimizer: Optimizer) -> int:
    """Steps since the optimizer was fresh, from its own state: whoever resets or restores that state is followed."""
    state = optimizer.state.get(optimizer.param_groups[0]["params"][0])
    return int(state["step"]) if state else 0


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)
