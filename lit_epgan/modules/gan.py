"""A GAN's discriminator loss, cut into what looks at records, each by itself, and what looks at none."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.bayes.sghmc import SGHMC
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single
from lit_epgan.modules.manual_optimization import (
    Batch,
    Losses,
    OptimizerName,
    Player,
    adam,
    add_noise,
    frozen,
    linear_decay,
    rows_of,
    steps_taken,
)
from lit_epgan.modules.objectives import (
    Objective,
    ObjectiveName,
    gradient_penalty,
    mixtures,
    r1_penalty,
    scores_and_slopes,
    slope_penalty,
    weighted_mean,
)
from lit_epgan.modules.objectives import objective as named_objective
from lit_epgan.modules.priors import Prior, UniformPrior
from lit_epgan.modules.sampling import Sampling, agreed_latent_dim
from lit_epgan.networks.average import ParameterAverage, frozen_copy, has_batch_norm


class OverRecords(Protocol):
    """Takes the mean of a loss over records in a way of its own, such as one that hides each of them."""

    def __call__(self, network: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """The mean () of ``loss``, of a batch or of one record as a batch, with a gradient of the network's."""
        ...


def discriminator_loss(
    over_records: OverRecords,
    discriminator: nn.Module,
    objective: Objective,
    real: Batch,
    fake: Tensor,
    r1: float = 0.0,
    gp: float = 0.0,
) -> Tensor:
    """L_D as ``Objective.discriminator_loss`` has it, its real half and its penalties by ``over_records``.

    The penalties are of single rows: R1 at a real row, wgan-gp's between a real row and a generated one.

    Args:
        over_records: takes the mean over ``real``.
        discriminator: is trained, and has no BatchNorm.
        objective: gives the losses of scores.
        real: the rows (batch, *data_shape), maybe with weights.
        fake: generated rows (any batch, *data_shape).
        r1, gp: the penalties' coefficients; 0 is none.
    """

    def of_records(batch: Any) -> Tensor:
        rows = rows_of(batch)
        if r1:
            scores, slopes = scores_and_slopes(discriminator, rows.x)
            loss = r1 / 2 * weighted_mean(slopes, rows.weight)
        else:
            scores, loss = discriminator(rows.x), rows.x.new_zeros(())
        if gp:
            _, slopes = scores_and_slopes(discriminator, mixtures(rows.x, fake))
            loss = loss + gp * slope_penalty(slopes, rows.weight)
        return loss + weighted_mean(objective.real(at_least_single(scores)), rows.weight)

    own = over_records(discriminator, of_records, real)
    return own + objective.fake(at_least_single(discriminator(fake))).mean()


def check_hyperparameters(gan: "GAN", average: float | None, generator: nn.Module) -> None:
    """Refuse what cannot be, NaN included."""
    rows = 2 if has_batch_norm(generator) else 1
    numbers = {
        "lr": (gan.lr, 0 < gan.lr < math.inf, "positive"),
        "lr_discriminator": (gan.lr_discriminator, 0 < gan.lr_discriminator < math.inf, "positive"),
        "betas": (gan.betas, all(0 <= beta < 1 for beta in gan.betas), "two numbers in [0, 1)"),
        "r1": (gan.r1, 0 <= gan.r1 < math.inf, "zero or positive"),
        "r1_every": (gan.r1_every, gan.r1_every >= 1, "at least 1"),
        "gp": (gan.gp, 0 <= gan.gp < math.inf, "zero or positive"),
        "average": (average, average is None or 0 <= average < 1, "in [0, 1), or null for no average"),
        "lr_decay": (gan.lr_decay, gan.lr_decay is None or 0 <= gan.lr_decay <= 1, "in [0, 1], or null"),
        "generated": (gan.generated, gan.generated is None or gan.generated >= rows, f"at least {rows}, or null"),
        "optimizer": (gan.optimizer, gan.optimizer in ("adam", "sghmc", "sgd"), "adam, sghmc or sgd"),
        "noise": (gan.noise, 0 <= gan.noise < math.inf, "zero or positive"),
        "friction": (gan.friction, 0 < gan.friction <= 1, "in (0, 1]"),
        "temperature": (gan.temperature, 0 <= gan.temperature < math.inf, "zero or positive"),
    }
    for name, (value, good, wanted) in numbers.items():
        if not good:
            raise UserError(f"the model's {name} is {value}, but must be {wanted}.")


class GAN(Sampling):
    """Generator against discriminator; each step is one discriminator step and then one generator step.

    A Bayesian GAN has N generators (``generator.members``, which share most parameters) and M discriminators (the
    heads): posterior samples, each loss the mean over all N x M pairs. BayesGAN, ProbGAN: the ``prior``.

    A batch is the real data x (batch, *data_shape), or a sequence that begins with it; a third entry is the rows'
    weights (batch,), summing to one, of a weighted mean in the discriminator's real term and in the gradient penalties.

    ``turns`` names the networks that the training step trains, both by default: a federation that trains them in
    different places sets it. So does one that hides single records, with ``over_records``: only the discriminator's
    real rows are records, and the generator's step asks for their number alone.

    Args:
        generator: noise (n, latent_dim) -> samples (n, *data_shape). With ``members`` N > 1 its rows are N equal
            blocks, block i for member i.
        discriminator: samples (n, *data_shape) -> scores (n, heads).
        objective: ``wgan-gp``, ``lsgan`` or ``non-saturating``.
        lr: the optimizers' learning rate.
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
        compiled: whether ``torch.compile`` compiles the networks for training, except where a penalty takes gradients
            of gradients, which it cannot. The first steps then take long.
        generated: rows that each generator makes in each step; by default as many as the batch has, or with N
            generators an N-th of them (rounded up, two at least, as BatchNorm needs).
        prior: of the networks' parameters; by default uniform. The GAN takes a copy.
        optimizer: ``adam``; ``sgd``, without momentum; or ``sghmc``: stochastic gradient Hamiltonian Monte Carlo
            (EP-GAN, algorithm 1).
        noise: standard deviation of Gaussian noise on every gradient before its optimizer's step. ProbGAN's code
            samples so, Adam in the place of friction: 0.00424 = (2 friction lr)^1/2 at friction 0.03 and lr 3e-4.
        friction, temperature: sghmc's; the loss is a mean over records, so that 1 / n is the posterior's temperature.
    """

    over_records: OverRecords | None = None
    takes_weights = True

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
        compiled: bool = False,
        generated: int | None = None,
        prior: Prior | None = None,
        optimizer: OptimizerName = "adam",
        noise: float = 0.0,
        friction: float = 0.03,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["generator", "discriminator", "prior", "network"])
        self.automatic_optimization = False
        self.objective = named_objective(objective)
        self.lr, self.lr_discriminator = lr, lr if lr_discriminator is None else lr_discriminator
        self.betas, self.lr_decay = (betas[0], betas[1]), lr_decay
        self.r1, self.r1_every, self.gp = r1, r1_every, gp if objective == "wgan-gp" else 0.0
        self.latent_dim, self.members = agreed_latent_dim(latent_dim, generator), getattr(generator, "members", 1)
        self.generated, self.noise = generated, noise
        self.optimizer, self.friction, self.temperature = optimizer, friction, temperature
        check_hyperparameters(self, average, generator)
        self.channels_last, self.compiled = channels_last, compiled
        if channels_last:
            generator, discriminator = (net.to(memory_format=torch.channels_last) for net in (generator, discriminator))
        self.generator, self.discriminator = generator, discriminator
        self.prior = UniformPrior() if prior is None else copy.deepcopy(prior)
        self.prior.build(generator, discriminator, self.objective)
        self.average = None if average is None else frozen_copy(generator)
        if average is not None and self.average is not None:
            self._averaging = ParameterAverage(generator, self.average, weight=1 - average)
        # BatchNorm must not see real and generated rows in one batch
        self._one_pass = not has_batch_norm(discriminator)
        self._compilations: dict[Player, nn.Module] = {}
        self.turns: Sequence[Player] = ("discriminator", "generator")
        self.losses = Losses()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One step of the discriminator on (real, fresh samples), then one of the generator."""
        real = rows_of(batch)
        if self.channels_last:
            real = real._replace(x=real.x.contiguous(memory_format=torch.channels_last))
        generator_optimizer, discriminator_optimizer = self.optimizers()  # type: ignore[attr-defined]
        self.losses.begin_step()
        if "discriminator" in self.turns:
            self._discriminator_turn(discriminator_optimizer, real, steps_taken(discriminator_optimizer))
        if "generator" in self.turns:
            self._generator_turn(generator_optimizer, discriminator_optimizer, real)

    def _discriminator_turn(self, optimizer: Any, real: Batch, steps: int) -> None:
        self.prior.before_step(steps, self.generator, self.discriminator)
        loss = self._discriminator_loss(real, steps)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.add("discriminator", loss)

    def _generator_turn(self, optimizer: Any, discriminator_optimizer: Any, real: Batch) -> None:
        if self.average is not None and steps_taken(optimizer) == 0:
            self._averaging.start()
        # frozen parameters get no gradient that the next step would throw away
        with frozen(discriminator_optimizer.param_groups[0]["params"]):
            loss = self._generator_loss(real)
            optimizer.zero_grad()
            self.manual_backward(loss)
        optimizer.step()
        if self.average is not None:
            self._averaging.update()
        self.losses.add("generator", loss)

    @property
    def step_losses(self) -> Tensor | None:
        """Discriminator's and generator's loss (2,) of the last step of this epoch, for a progress bar.

        Of the networks whose turn it was.
        """
        return torch.stack(self.losses.last) if self.losses.last else None

    def on_train_epoch_start(self) -> None:
        self.losses = Losses()

    def on_train_epoch_end(self) -> None:
        """Log the mean losses; step the learning rates' schedules, which manual optimization leaves to the module."""
        # once an epoch: a self.log in every step costs 200 us of a step's 1,000
        for player in self.turns:
            self.log(f"loss/{player}", self.losses.mean(player), prog_bar=True, sync_dist=True)
        schedulers = self.lr_schedulers()
        for scheduler in schedulers if isinstance(schedulers, list) else []:
            scheduler.step()  # type: ignore[call-arg]

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Add the prior's gradient and the sampler's noise to the data's gradient, which callbacks have seen by now."""
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = [p.grad for p in parameters]
        self.prior.adjust_gradients(parameters, gradients)
        if self.noise > 0:
            add_noise(gradients, self.noise)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Two optimizers, generator first; with ``lr_decay`` a linear schedule each, stepped every epoch."""
        return self._scheduled(
            [self._optimizer(self.generator, self.lr), self._optimizer(self.discriminator, self.lr_discriminator)]
        )

    def _scheduled(self, optimizers: list[Optimizer]) -> OptimizerLRScheduler:
        if self.lr_decay is None:
            return optimizers
        return optimizers, [linear_decay(optimizer, self.lr_decay, self.trainer.max_epochs) for optimizer in optimizers]

    def player_loss(self, player: Player, batch: Any) -> Tensor:
        """One network's loss () in its first step on a batch, for whoever steps optimizers without a Trainer.

        The other network gets no gradient.
        """
        if player == "discriminator":
            return self._discriminator_loss(rows_of(batch), 0)
        with frozen(list(self.discriminator.parameters())):
            return self._generator_loss(rows_of(batch))

    def _generator_loss(self, real: Batch) -> Tensor:
        fake = self._generated(real)
        (scores,) = self._scores(self._faster("discriminator"), fake)
        loss = self.objective.generator_loss(scores)
        from_prior = self.prior.generator_loss(self.generator, self.discriminator, fake.x)
        return loss if from_prior is None else loss + from_prior

    def _discriminator_loss(self, real: Batch, steps: int) -> Tensor:
        with torch.no_grad():
            fake = self._generated(real)
        penalised = self.r1 > 0 and steps % self.r1_every == 0
        if self.over_records is not None:
            r1 = self.r1 * self.r1_every * penalised
            network, objective = self.discriminator, self.objective
            return discriminator_loss(self.over_records, network, objective, real, fake.x, r1, self.gp)
        if penalised:
            real = real._replace(x=real.x.detach().requires_grad_())
        discriminator = self.discriminator if penalised else self._faster("discriminator")
        if self._one_pass and not penalised:
            scores, fake_scores = self._scores(discriminator, real, fake)
        else:
            (scores,), (fake_scores,) = self._scores(discriminator, real), self._scores(discriminator, fake)
        loss = self.objective.discriminator_loss(scores, fake_scores, real.weight)
        if penalised:
            loss = loss + self.r1 * self.r1_every * r1_penalty(scores, real.x, real.weight)
        if self.gp:

            def score(x: Tensor) -> Tensor:
                return self._scores(self.discriminator, real._replace(x=x))[0]

            loss = loss + self.gp * gradient_penalty(score, real.x, fake.x, real.weight)
        return loss

    def _generated(self, real: Batch) -> Batch:
        """Fresh samples for a step on ``real``."""
        return Batch(self._faster("generator")(self._noise(self._rows(len(real.x)), real.x)))

    def _scores(self, discriminator: nn.Module, *sets: Batch) -> Sequence[Tensor]:
        """Scores (n, heads) of each set of rows, all in one pass."""
        if len(sets) == 1:
            return [discriminator(sets[0].x)]
        scores: Tensor = discriminator(torch.cat([rows.x for rows in sets]))
        return scores.split([len(rows.x) for rows in sets])

    def _faster(self, name: Player) -> nn.Module:
        """The network, compiled if it is to be."""
        if not self.compiled:
            return getattr(self, name)
        if name not in self._compilations:
            # a federation's algorithms put hooks on networks and take them off; torch would not look whether they have
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            self._compilations[name] = torch.compile(getattr(self, name))  # type: ignore[assignment]
        return self._compilations[name]

    def _optimizer(self, network: nn.Module, lr: float) -> Optimizer:
        if self.optimizer == "sghmc":
            return SGHMC(network.parameters(), lr, self.friction, self.temperature)
        if self.optimizer == "sgd":  # which remembers its steps, unlike torch's
            return SGHMC(network.parameters(), lr, friction=1.0, temperature=0.0)
        return adam(network.parameters(), lr, self.betas)

    def _rows(self, batch: int) -> int:
        """How many rows all generators make in a step on ``batch`` real ones."""
        if self.generated is None and self.members == 1:
            return batch
        return self.members * (self.generated or max(2, -(-batch // self.members)))

    def _noise(self, n: int, like: Tensor) -> Tensor:
        return torch.randn(n, self.latent_dim, device=like.device, dtype=like.dtype)
