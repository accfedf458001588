"""Modules whose parameters are particles of a simulator's posterior, and the autoencoder that gives them summaries."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor, nn
from torchmetrics.classification import BinaryAUROC

from lit_epgan.bayes import Simulator
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.mlp import MLPDiscriminator, MLPGenerator
from lit_epgan.networks.modes import evaluating


class SuffiAE(Classifier):
    """Encoder q, decoder f and a linear classifier g by-path, on the noisy code z = q(x) + N(0, alpha I).

    Minimises minus the mean over records of ``objective``, the variational bound of GRAFFL's appendix A. The parts are
    ``backbone`` (q), ``decoder`` (f) and ``head`` (g). Evaluation adds no noise. It logs ``reconstruction``, the mean
    of (x - f(q(x)))^2 over records and features, ``accuracy``, ``cross_entropy`` and, of two classes, ``auc``, the
    area under the receiver operating characteristic over all records.

    A federation trains one encoder for all sites, whose codes can be compared. The paper trains one in each site: fit
    a module of its own on each site's data; codes of different sites then mean different things.

    Args:
        features: D, numbers of a record (flattened, if it has another shape).
        dimensions: d <= D, of the code.
        classes: of the labels. Two make the softmax the paper's logistic g.
        hidden: widths of the encoder's hidden layers (ReLU); the decoder has them in reverse.
        alpha: the noise's variance.
        optimizer: of all parameters.
    """

    higher_is_better: ClassVar[Mapping[str, bool | None]] = {**Classifier.higher_is_better, "reconstruction": False}

    def __init__(
        self,
        features: int,
        dimensions: int,
        classes: int = 2,
        hidden: Sequence[int] = (64,),
        alpha: float = 0.1,
        optimizer: OptimizerCallable = torch.optim.Adam,
    ) -> None:
        _check_suffiae(features, dimensions, classes, alpha)
        encoder = MLPDiscriminator((features,), hidden, slope=0.0, heads=dimensions, init="torch")
        super().__init__(encoder, nn.Linear(dimensions, classes), optimizer)
        self.decoder = MLPGenerator((features,), dimensions, hidden[::-1], "none", tanh=False, slope=0.0, init="torch")
        self.alpha, self.dimensions = alpha, dimensions
        self.auc = BinaryAUROC() if classes == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Minus the mean objective (), with one draw of the noise for each record."""
        x, labels = batch[0].flatten(1), batch[1]
        code = self.backbone(x)
        z = code + math.sqrt(self.alpha) * torch.randn_like(code)
        return -objective(x, self.decoder(z), self.head(z), labels, code, self.alpha).mean()

    @torch.no_grad()
    def summarise(self, x: Tensor) -> Tensor:
        """The code q(x) (n, d) of records x (n, D), without noise and in evaluation mode."""
        with evaluating(self.backbone):
            code: Tensor = self.backbone(x)
        return code

    def _evaluate(self, batch: Any) -> None:
        x, labels = batch[0].flatten(1), batch[1]
        code = self.backbone(x)
        logits = self.head(code)
        scores = {"reconstruction": F.mse_loss(self.decoder(code), x), **self.scores(logits, labels)}
        self.log_dict(scores, on_epoch=True, batch_size=len(labels), sync_dist=True)
        if self.auc is not None:
            self.auc.update(logits.softmax(1)[:, 1], labels)
            self.log("auc", self.auc, on_step=False, on_epoch=True, batch_size=len(labels))


def objective(x: Tensor, reconstruction: Tensor, logits: Tensor, labels: Tensor, code: Tensor, alpha: float) -> Tensor:
    """What SuffiAE maximises, of each record (n,), one draw z = code + N(0, alpha I) standing for the expectation:

        -1/2 ||x - f(z)||^2 + log softmax(g(z))_y - KL[N(code, alpha I) || N(0, I)]

    GRAFFL, section 3.1 and appendix A, of x and f(z) (n, D), logits g(z) (n, classes), labels y (n,), int64, and the
    code q(x) (n, d). With two classes the middle is y log g(z) + (1 - y) log(1 - g(z)).
    """
    fit = -0.5 * (x - reconstruction).square().sum(1)
    return fit - F.cross_entropy(logits, labels, reduction="none") - divergence(code, alpha)


def divergence(code: Tensor, alpha: float) -> Tensor:
    """KL[N(code, alpha I) || N(0, I)] = 1/2 [ ||code||^2 + d (alpha - 1 - log alpha) ] of codes (n, d): (n,)."""
    return 0.5 * (code.square().sum(1) + code.shape[1] * (alpha - 1 - math.log(alpha)))


def _check_suffiae(features: int, dimensions: int, classes: int, alpha: float) -> None:
    if not 1 <= dimensions <= features:
        raise UserError(
            f"SuffiAE's dimensions are {dimensions} of {features} features: a code has at least 1, and no more than a "
            "record has."
        )
    if classes < 2:
        raise UserError(f"SuffiAE's classes are {classes}: it tells at least 2 apart.")
    if not 0 < alpha < math.inf:
        raise UserError(f"SuffiAE's alpha is {alpha}: the noise's variance is a number above 0.")


class HoldsParticles(LightningModule):
    """What is asked of particles: the parameters that they stand for, and data that the simulator draws by them.

    Attributes:
        simulator: whose parameters they are.
        particles: theta (n, p), float64; draws from the prior, until inference has moved them.
        label: the class of the records that the simulator is a model of; None for all.
    """

    simulator: Simulator
    particles: nn.Parameter
    label: int | None

    def hold(self, simulator: Simulator, particles: int, label: int | None) -> None:
        """Take particles from the prior. UserError: there are none."""
        if particles < 2:
            raise UserError(f"particles is {particles}; a posterior is drawn with at least 2")
        self.simulator, self.label = simulator, label
        self.particles = nn.Parameter(simulator.prior(particles, generator_for(0, "particles")))

    def values(self) -> dict[str, Tensor]:
        """The parameters by name, in their own units, each (n, ...)."""
        return self.simulator.values(self.particles.detach().cpu())

    def summarise(self, x: Tensor) -> Tensor:
        """What the simulator is a model of: summaries (n, d) of records x (n, ...)."""
        raise NotImplementedError

    @torch.no_grad()
    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """n summaries (n, d) from the posterior predictive distribution: a particle each, and one record by it."""
        rows = torch.randint(len(self.particles), (n,), generator=generator)
        theta = self.particles.detach().cpu()[rows]
        return self.simulator.simulate(theta, 1, generator)[:, 0].to(self.device)

    def sample_class(self, label: int, n: int, generator: torch.Generator) -> Tensor:
        """n summaries (n, d) of records of a class. UserError: the simulator is a model of another class, or of all."""
        if n and label != self.label:
            held = "all classes together" if self.label is None else f"the class {self.label}"
            raise UserError(f"the simulator is a model of {held}, and cannot generate the class {label}: "
                            f"set model.label to {label}")  # fmt: skip
        return self.sample(n, generator)


class Posterior(HoldsParticles):
    """A simulator of the records themselves, or of a fixed function of them; nothing in it is trained.

    Args:
        simulator: a model that can be simulated, and its prior.
        particles: how many draws the posterior is held as.
        summary: maps records (n, ...) to summaries (n, d); by default they are taken as they are. It is public: fix
            its weights before, and without the clients' data.
        label: the class of the records that are looked at, where the data are (x, label); all by default.
    """

    def __init__(
        self, simulator: Simulator, particles: int = 1000, summary: nn.Module | None = None, label: int | None = None
    ) -> None:
        super().__init__()
        self.summary = (summary if summary is not None else nn.Identity()).requires_grad_(False)
        self.hold(simulator, particles, label)

    @torch.no_grad()
    def summarise(self, x: Tensor) -> Tensor:
        """The summary (n, d) of records x (n, ...)."""
        summaries: Tensor = self.summary(x)
        return summaries.flatten(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise UserError(
            "a Posterior has no training step: its particles are moved by an algorithm without training, as "
            "federation.algorithm: lit_epgan.federated.DiscrepancySearch"
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([self.particles], lr=0.0)


class PosteriorOfCodes(HoldsParticles, SuffiAE):
    """A simulator of SuffiAE's codes: first the autoencoder is trained, then particles are moved (GRAFFL, section 3).

    Args:
        simulator: a model of codes (d,), and its prior.
        particles: how many draws the posterior is held as.
        label: the class of the records that are looked at; all by default.
        suffiae: ``features``, ``dimensions``, ``classes``, ``hidden``, ``alpha`` and ``optimizer`` of SuffiAE.

    Raises:
        UserError: the simulator's records are no codes, there are too few particles, or as SuffiAE's.
    """

    def __init__(self, simulator: Simulator, particles: int = 1000, label: int | None = None, **suffiae: Any) -> None:
        super().__init__(**suffiae)
        if simulator.dimensions != self.dimensions:
            raise UserError(
                f"the simulator's records have {simulator.dimensions} dimensions, and SuffiAE's codes "
                f"{self.dimensions}: let model.simulator.dimensions and model.dimensions agree"
            )
        self.hold(simulator, particles, label)

    def summarise(self, x: Tensor) -> Tensor:
        return SuffiAE.summarise(self, x.flatten(1))
