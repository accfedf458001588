"""Modules whose parameters are particles: draws from the posterior of a simulator's parameters."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.likelihood_free import Simulator
from lit_epgan.modules.suffiae import SuffiAE
from lit_epgan.randomness import generator_for


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
        """Take particles from the prior.

        Raises:
            UserError: there are none.
        """
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
        """n summaries (n, d) of records of a class.

        Raises:
            UserError: the simulator is a model of another class, or of all.
        """
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

    Raises:
        UserError: there are too few particles.
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
        """There is none.

        Raises:
            UserError: always.
        """
        raise UserError(
            "a Posterior has no training step: its particles are moved by an algorithm without training, as "
            "federation.algorithm: lit_epgan.federated.DiscrepancySearch"
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One that never steps."""
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
        """The codes (n, d)."""
        return SuffiAE.summarise(self, x.flatten(1))
