"""Noise that the clients add themselves, each a share, so that a server which sees only sums sees no exact one."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from lit_epgan.engine.algorithm import Algorithm
from lit_epgan.engine.client import Client
from lit_epgan.engine.mechanisms import Plan
from lit_epgan.engine.messages import Broadcast, Count, Report, Term, Total, Weighted, tensor_of
from lit_epgan.lib.bounds import within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import secure_normal
from lit_epgan.privacy.central import CentralNoise

HONEST = "privacy.honest"


class DistributedNoise(CentralNoise):
    """``CentralNoise`` without a trusted server: each client adds N(0, (z S)^2 / h) to its clipped report.

    The sum of h such reports has the noise N(0, (z S)^2). h is how many of the cohort are honest at least; what others
    add is not counted on. The guarantee is for whoever sees sums only: it takes secure aggregation, which hides the
    single reports. Their noise alone protects them less, z / sqrt(h).

    Kairouz, Liu and Steinke 2021, "The distributed discrete Gaussian mechanism", section 1, with real numbers for
    discrete ones.

    Args:
        bound, noise_multiplier: S and z, as for ``CentralNoise``.
        honest: share of a cohort that adds its noise and does not drop out; the rest is not counted on. A client
            adds at least its share in a cohort of all clients, whatever the server says, where it is told z.
        central: ``CentralNoise``'s other settings, without ``noise_seed``.
    """

    def __init__(
        self, bound: float, noise_multiplier: float | None = None, honest: float = 0.8, **central: Any
    ) -> None:
        super().__init__(bound, noise_multiplier, **central)
        if self.noise_seed is not None:
            raise UserError("DistributedNoise takes no noise_seed: every client draws its own share in secret")
        within("(0, 1]", self, honest=honest)
        self.honest = honest
        self._shares = 1
        self._clients: int | None = None

    def begin(self, plan: Plan) -> None:
        """As for ``CentralNoise``. UserError: also where the cohort's size is random, so that nobody knows how large a
        share has to be."""
        if self._kind(plan).sampling == "poisson":
            raise UserError(
                "DistributedNoise deals the noise to a cohort of known size: take a fixed size "
                "(data.clients_per_round) in place of Poisson"
            )
        super().begin(plan)
        self._shares = max(1, math.floor(self.honest * plan.sampler.rate(plan.clients) * plan.clients))

    def broadcast(self) -> Broadcast:
        assert self._planned is not None, "begin comes first"
        deviation = self._planned.noise_multiplier * self.bound / math.sqrt(self._shares)
        return {HONEST: torch.tensor([deviation], dtype=torch.float64)}

    def around(self, client: Client, algorithm: Algorithm, training: bool) -> Client:
        """As for ``CentralNoise``; how many clients there are is remembered."""
        self._clients = client.clients
        return super().around(client, algorithm, training)

    def at_client(self, report: Report, received: Broadcast) -> Report:
        """The clipped report with the client's share of the noise, in float64. UserError: the server asks for less
        noise than a share in a cohort of all clients."""
        deviation = float(received[HONEST])
        if self.noise_multiplier is not None and self._clients is not None:
            shares = max(1, math.floor(self.honest * self._clients))
            least = self.noise_multiplier * self.bound / math.sqrt(shares)
            if not deviation >= least * (1 - 1e-9):
                raise UserError(
                    f"the server asks for noise of standard deviation {deviation:g}, but a share in a cohort of all "
                    f"{self._clients} clients is {least:g}: nothing is sent; agree on DistributedNoise's settings"
                )
        return {name: _noised(term, deviation) for name, term in super().at_client(report, received).items()}

    def at_server(self, total: Total, cohort: int) -> Total:
        """The sums as they are: their noise has come with them. UserError: so many clients have dropped out that the
        noise is less than was promised."""
        members = max((float(total[name]) for name in total.counts), default=float(cohort))
        if members < self._shares:
            raise UserError(
                f"only {members:g} of {cohort} clients have answered, and {self._shares} shares of the noise were "
                "promised: the sum is not used; run the round again, or expect less of DistributedNoise's honest"
            )
        return super().at_server(total, cohort)

    def deviations(self, names: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(names, 0.0)

    def _how(self) -> str:
        return (
            f"each report clipped to {self.bound:g} by its client, which adds one of {self._shares} shares of the "
            "noise; for whoever sees sums only, as under secure aggregation"
        )


def _noised(term: Term, deviation: float) -> Term:
    if isinstance(term, Count):
        return term
    tensor = tensor_of(term).double()
    noised = tensor + deviation * secure_normal(tensor.numel()).view(tensor.shape).to(tensor.device)
    return Weighted(noised) if isinstance(term, Weighted) else noised
