"""GRAFFL as it is printed: inaccurate, and it gives every record away. For comparison only."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_epgan.bayes import Simulator
from lit_epgan.engine import Broadcast, Client, Exchange, Message, Rounds, Server, merged, scalar
from lit_epgan.federated.likelihood_free.gradient_free import NOBODY, GradientFree, summaries
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError

THETA, DISTANCES = "rejection.theta", "rejection.distances"
POINTS = "points"


@dataclass(frozen=True)
class Accepted:
    """The parameters theta (l, p) whose points came nearest so far, at distances (l,), ascending; the greatest is the
    acceptance threshold."""

    theta: Tensor
    distances: Tensor

    def with_more(self, theta: Tensor, distances: Tensor, most: int) -> "Accepted":
        """The ``most`` nearest of these and of theta (n, p) at distances (n,) (GRAFFL, algorithm 2, last lines)."""
        every = torch.cat([self.distances, distances])
        order = every.argsort(stable=True)[:most]
        return Accepted(torch.cat([self.theta, theta])[order], every[order])


def proposals(simulator: Simulator, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """n parameters from the prior (n, p), and a point by each: float64 (n, d) (GRAFFL, algorithm 2)."""
    theta = simulator.prior(n, generator)
    return theta, simulator.simulate(theta, 1, generator)[:, 0].double()


def distances(points: Tensor, records: Tensor) -> Tensor:
    """||x_i - g_i||^2 (n,) of records (n, d) and generated points (n, d), one of each (GRAFFL, section 3)."""
    return (records.double() - points.double()).square().sum(1)


class PublishedRejection(GradientFree):
    """Algorithm 2 of GRAFFL: parameters from the prior, one generated point by each, compared with one record each.

    Every iteration proposes as many parameters as the clients hold records, sends client k its n_k points, and is
    answered the n_k squared distances, record by record. In the end the parameters of the ``particles`` nearest points
    of all iterations are taken for draws from the posterior.

    It has two defects, of which a warning tells. One point says next to nothing of a mixture: on the paper's own toy
    the means are as far from the truth as the prior's (docs/errata.md). And the order of records is the same in every
    iteration, so d + 2 of them let the server solve for each record exactly. Take
    DiscrepancySearch, or SearchOnRelease where a guarantee is needed.

    Args:
        iterations: in a round.
        inner: trains the summary; FedAvg by default.
        from_round: the first round without training, from 0.
    """

    class RecordAnswers(Message):
        """A client's answer, which the server sees by itself: the squared distances (n_k,) in the records' order, or
        their number (1,)."""

        numbers: Tensor = merged("stack", ragged=True)

    def __init__(self, iterations: int = 1, **settings: Any) -> None:
        at_least(1, self, iterations=iterations)
        super().__init__(**settings)
        self.iterations = iterations

    def start(self, server: Server) -> None:
        super().start(server)
        warnings.warn(
            "PublishedRejection is GRAFFL's printed rule: it learns next to nothing, and its answers give every record "
            "away; take DiscrepancySearch",
            stacklevel=2,
        )

    def questions(self) -> int:
        """One in every iteration, and one for the number of records."""
        return self.iterations + 1

    def generation(self, server: Server) -> Rounds:
        """``iterations`` comparisons of as many points as there are records."""
        generator, simulator = self.generator(server), self.inference.search.statistics.simulator
        kept = self.inference.search.particles
        counted = yield self.asks(server, "records", {}, self.RecordAnswers)
        sizes = {k: int(n) for k, n in counted.numbers.items() if int(n)}
        if not sizes:
            raise UserError(NOBODY)
        accepted = self._accepted(server, simulator.size)
        for _ in range(self.iterations):
            theta, points = proposals(simulator, sum(sizes.values()), generator)
            parts = dict(zip(sizes, points.split(list(sizes.values())), strict=True))
            answers = yield Exchange(
                lambda k, parts=parts: {POINTS: parts[k]},  # type: ignore[misc]
                question="distances",
                training=False,
                to=list(sizes),
                answer=self.RecordAnswers,
            )
            own = dict(zip(sizes, theta.split(list(sizes.values())), strict=True))
            for k, answer in answers.numbers.items():
                if answer.shape != (sizes[k],):  # of a client that does not answer as it was asked
                    continue
                accepted = accepted.with_more(own[k], answer.cpu(), kept)
        server.state |= {THETA: accepted.theta, DISTANCES: accepted.distances}
        if len(accepted.theta) == kept:
            (where,) = server.flat.named("particles")
            server.parameters[where] = accepted.theta.flatten().to(server.parameters)

    @torch.no_grad()
    def records(self, client: Client, sent: Broadcast) -> Message:
        return self.RecordAnswers(numbers=scalar(len(torch.cat(list(summaries(client))))))

    @torch.no_grad()
    def distances(self, client: Client, sent: Broadcast) -> Message:
        """The client's records against as many points."""
        return self.RecordAnswers(numbers=distances(sent[POINTS].cpu(), torch.cat(list(summaries(client)))))

    @staticmethod
    def _accepted(server: Server, size: int) -> Accepted:
        nothing = torch.zeros(0, size, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
        return Accepted(server.state.get(THETA, nothing[0]).cpu(), server.state.get(DISTANCES, nothing[1]).cpu())
