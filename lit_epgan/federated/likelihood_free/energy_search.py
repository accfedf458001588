"""A search by energy distances: simulated records go to the clients, and one number for each data set comes back."""

from collections.abc import Generator
from typing import Any, Literal

import torch
from torch import nn

from lit_epgan.engine import Broadcast, Client, Exchange, Message, Rounds, Server, scalar
from lit_epgan.errors import UserError
from lit_epgan.federated.likelihood_free.gradient_free import Answers, GradientFree, mean_answer, summaries
from lit_epgan.likelihood_free.abc_search import (
    Comparing,
    ToleranceSearch,
    Tolerated,
    energy_distance,
    sliced_energy,
    unit_directions,
)
from lit_epgan.randomness import generator_for

SIMULATED = "simulated"
HELD = {name: f"energy.{name}" for name in ("theta", "distance", "rate", "step")}


class EnergySearch(GradientFree):
    """Sequential Monte Carlo by the energy distance, or its mean over random directions (``sliced``).

    The server sends m data sets of ``records`` records each; client k answers their distances to its own records,
    which sum with n_k (``energy_distance``). Nothing has to be chosen, no features and no bandwidth; but no likelihood
    belongs to the distance, so the tolerance falls only while particles still move, and the posterior stays wider than
    it should be. DiscrepancySearch ends with the right width.

    Price of a round: ``moves`` x m numbers up, and ``records`` x d times that down.

    Args:
        distance: ``energy`` or ``sliced``.
        records: of a simulated data set.
        directions: of ``sliced``.
        settings: ``moves`` and ``even`` of Search, ``inner`` and ``from_round`` of DiscrepancySearch.

    Raises:
        UserError: a number is out of its range, or the module holds no particles of a simulator.
    """

    def __init__(
        self,
        distance: Literal["energy", "sliced"] = "sliced",
        records: int = 100,
        directions: int = 12,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if distance not in ("energy", "sliced"):
            raise UserError(f"distance is {distance!r}; choose energy or sliced")
        if records < 2 or directions < 1:
            raise UserError(f"records and directions are {records} and {directions}; give at least 2 and 1")
        self.distance, self.records, self.directions = distance, records, directions

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        """The search, and the directions, the same for everybody."""
        networks = super().build(module, seed)
        given = self.inference.search
        simulator = given.statistics.simulator
        self.search = ToleranceSearch(simulator, self.records, given.particles, given.moves, given.even)
        self.along = unit_directions(simulator.dimensions, self.directions, generator_for(seed, "directions"))
        return networks

    def questions(self) -> int:
        """One about each move, or one at the start."""
        return max(1, self.search.moves)

    def generation(self, server: Server) -> Rounds:
        """From the prior in the first round; then a lower tolerance in each."""
        generator = self.generator(server)
        if HELD["theta"] in server.state:
            held = {name: server.state[key].cpu() for name, key in HELD.items()}
            at = Tolerated(held["theta"], held["distance"], float(held["rate"]), float(held["step"]))
            comparing = self.search.generation(at, generator)
        else:
            comparing = self.search.start(generator)
        at = yield from self._exchanged(server, comparing)
        server.state |= {HELD["theta"]: at.theta, HELD["distance"]: at.distance}
        server.state |= {HELD["rate"]: scalar(at.rate), HELD["step"]: scalar(at.step)}
        (where,) = server.flat.named("particles")
        server.parameters[where] = at.theta.flatten().to(server.parameters)

    def _exchanged(self, server: Server, comparing: Comparing) -> Generator[Exchange, Answers, Tolerated]:
        """A search whose questions go to the cohort."""
        try:
            simulated = next(comparing)
            while True:
                answers = yield self.asks(server, "distances", {SIMULATED: simulated})
                simulated = comparing.send(mean_answer(answers))
        except StopIteration as end:
            return end.value

    @torch.no_grad()
    def distances(self, client: Client, sent: Broadcast) -> Message:
        """How far each simulated data set is from the client's records."""
        records, simulated = torch.cat(list(summaries(client))), sent[SIMULATED].cpu()
        if not len(records):  # none of the class
            found = torch.zeros(len(simulated), dtype=torch.float64)
        elif self.distance == "energy":
            found = energy_distance(simulated, records)
        else:
            found = sliced_energy(simulated, records, self.along)
        return Answers(numbers=found, weight=len(records))
