"""A search and what follows it, as one thing that goes on from where it is."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from lit_epgan.embedding import RandomFourierFeatures, median_distance
from lit_epgan.errors import UserError
from lit_epgan.likelihood_free.correction import Correction
from lit_epgan.likelihood_free.questions import Asking
from lit_epgan.likelihood_free.refinement import PASSES, Refinement
from lit_epgan.likelihood_free.search import Particles, Search
from lit_epgan.likelihood_free.simulator import Simulator
from lit_epgan.likelihood_free.statistics import Statistics

BANDWIDTHS = (0.1, 0.2, 0.4, 0.8)  # in median distances between records of the prior
EACH, FEWEST = 7, 32  # frequencies for a parameter, and in all
PREDICTIVE = 500  # records by which that distance is measured
SEARCHING, REFINING, CORRECTING, FOUND = range(4)


@dataclass(frozen=True)
class Stage:
    """How far inference is.

    Attributes:
        particles: where they are.
        kind: SEARCHING, REFINING, CORRECTING or FOUND.
        generation: how many generations and passes there were.
    """

    particles: Particles
    kind: int = SEARCHING
    generation: int = 0

    def tensors(self) -> dict[str, Tensor]:
        """All of it as tensors by name."""
        numbers = {f.name: getattr(self.particles, f.name) for f in fields(Particles)}
        numbers |= {"kind": self.kind, "generation": self.generation}
        return {n: v if isinstance(v, Tensor) else torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}

    @classmethod
    def of(cls, tensors: dict[str, Tensor]) -> "Stage":
        """What ``tensors`` gave."""
        numbers = {n: v if v.dim() else float(v) for n, v in tensors.items()}
        kind, generation = int(numbers.pop("kind")), int(numbers.pop("generation"))
        whole = {name: int(numbers[name]) for name in ("records", "finished")}
        return cls(Particles(**(numbers | whole)), kind, generation)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Inference:
    """The posterior of a simulator's parameters by questions alone, a generation at a time.

    A ``Search`` from the prior, and a ``Correction`` at its end. Where the search would end with more than
    ``most_records`` for each particle, a ``Refinement`` takes over as soon as the particles are Gaussian.

    Args:
        search: the settings of the search.
        refinement: the settings of what follows.
        most_records: that are simulated for a particle in the search.
    """

    search: Search
    refinement: Refinement
    most_records: int

    @classmethod
    def of(
        cls,
        simulator: Simulator,
        seed: int,
        particles: int = 1000,
        frequencies: int | None = None,
        moves: int = 5,
        even: float = 0.5,
        surplus: float = 10.0,
        most_records: int = 6000,
    ) -> "Inference":
        """With random Fourier features whose bandwidths follow from the prior, so that nothing of the data does.

        Args:
            simulator: the model and its prior.
            seed: of the features; everybody who answers has the same.
            particles, moves, even, surplus: of Search.
            frequencies: of the features; D is twice as many. As many numbers as parameters are kept of them. By default
                seven for each parameter, and at least 32.
            most_records: as above.

        Raises:
            UserError: a number is out of its range.
        """
        if most_records < 1:
            raise UserError(f"most_records is {most_records}; it must be at least 1")
        generator = torch.Generator().manual_seed(seed)
        frequencies = max(FEWEST, EACH * simulator.size) if frequencies is None else frequencies
        predictive = simulator.simulate(simulator.prior(PREDICTIVE, generator), 1, generator)[:, 0]
        unit = median_distance(predictive)
        phi = RandomFourierFeatures(simulator.dimensions, frequencies, [unit * b for b in BANDWIDTHS], generator)
        search = Search(Statistics(simulator, phi.float()), particles, moves, even, surplus)
        return cls(search, Refinement(search), most_records)

    @property
    def phi(self) -> RandomFourierFeatures:
        """The features, by which data are embedded."""
        return self.search.statistics.phi

    def start(self, generator: torch.Generator) -> Asking[Stage]:
        """From the prior: one question."""
        return Stage((yield from self.search.start(generator)))

    def step(self, at: Stage, generator: torch.Generator) -> Asking[Stage]:
        """A generation of the search, or a pass of the refinement; nothing where the posterior is found."""
        if at.kind == FOUND:
            return at
        if at.kind == REFINING:
            particles = yield from self.refinement.pass_(at.particles, generator)
            kind = FOUND if particles.finished == PASSES else REFINING
            return Stage(particles, kind, at.generation + 1)
        if at.kind == CORRECTING:
            particles = yield from Correction(self.search).pass_(at.particles, generator)
            return Stage(particles, FOUND, at.generation + 1)
        particles = yield from self.search.generation(at.particles, generator)
        if particles.finished == 2:
            return Stage(particles, CORRECTING, at.generation + 1)
        if self.refinement.due(particles, self.most_records, generator):
            return Stage(replace(particles, finished=0), REFINING, at.generation + 1)
        return Stage(particles, SEARCHING, at.generation + 1)

    def run(self, generator: torch.Generator, generations: int = 100) -> Asking[Stage]:
        """From the prior to the posterior, in at most so many generations."""
        at = yield from self.start(generator)
        while at.kind != FOUND and at.generation < generations:
            at = yield from self.step(at, generator)
        return at
