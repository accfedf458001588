"""The private form of GRAFFL: each client releases its mean embedding once, and all inference is the server's own."""

import copy
from typing import Any

import torch
from torch import Tensor

from lit_epgan.bayes import EmbeddingFactor
from lit_epgan.bayes.factor import COUNT_WEIGHT, SENSITIVITY
from lit_epgan.bayes.inference import FOUND
from lit_epgan.bayes.mean_embeddings import answered
from lit_epgan.engine import Algorithm, Broadcast, Client, Exchange, Message, Plan, Rounds, Server, scalar
from lit_epgan.federated.function_space.embedding_release import TOTAL, RecordUnit, Release
from lit_epgan.federated.likelihood_free.gradient_free import GradientFree, summaries
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import GaussianMechanism

CLIENTS = "embedding.clients"


class SearchOnRelease(GradientFree):
    """Inference whose every question is answered by one release of each client.

    first round   client k releases (n_k, sum_i phi(x_i)) under the Gaussian mechanism, and nothing else ever
    then          the server asks the sum over clients, mu~, as often as it likes; no client works

    The posterior knows of the noise (``noise_of``), so its width is right at every z: as if the simulator added
    the same noise to a simulated embedding.

    With ``noise_multiplier`` z everything that is learnt is one release for each client: the posterior, and all data
    that are simulated by it, have its guarantee, at no further price.

    Price: 1 + 2 ``frequencies`` numbers up, once.

    Args:
        noise_multiplier: z, the noise of a release in units of its sensitivity; 0 is no privacy.
        delta: of the release's (epsilon, delta).
        noise_seed: makes the noise repeatable, for studies only; by default it comes from the operating system.
        ledger, budget: of the release, as for ``lit_epgan.privacy.GaussianMechanism``.
        generations: of the search, in a round.
        inner, from_round: must be left out: nothing but the release leaves a client.
        inference: ``frequencies``, ``moves``, ``even``, ``surplus`` and ``most_records`` of Inference.

    Raises:
        UserError: a number is out of its range, an inner algorithm is asked for, or the module holds no particles.
    """

    def __init__(
        self,
        noise_multiplier: float = 0.0,
        delta: float = 1e-5,
        noise_seed: int | None = None,
        ledger: str | None = None,
        budget: float | None = None,
        generations: int = 1,
        inner: Algorithm | None = None,
        from_round: int = 0,
        **inference: Any,
    ) -> None:
        if inner is not None or from_round:
            raise UserError(
                "SearchOnRelease takes nothing but the clients' releases, so nothing is trained before it: leave inner "
                "and from_round out, and give the module a summary that is public"
            )
        at_least(1, self, generations=generations)
        super().__init__(**inference)
        self.unit = RecordUnit(GaussianMechanism(noise_multiplier, delta, noise_seed, ledger, budget))
        self.generations = generations

    def exchanges(self, start: int, stop: int) -> int:
        return int(start == 0 < stop)

    def guarantee(self) -> str | None:
        """What holds for each client's release, and so for all that is found; None without noise."""
        made = self.unit.mechanism.guarantee(SENSITIVITY)
        return None if made is None else f"each client's release: {made}"

    def begin(self, plan: Plan) -> None:
        self.unit.mechanism.begin(plan)

    def end(self) -> None:
        self.unit.mechanism.end()

    def generation(self, server: Server) -> Rounds:
        if server.round == 0:
            releases = yield Exchange({}, question="release", training=False, answer=Release)
            server.state[CLIENTS] = scalar(len(server.cohort))
            server.state[TOTAL] = self.unit.sum_of(releases)
            return
        released = EmbeddingFactor(server.state[TOTAL].cpu())
        records = float(released.count.clamp_min(1))
        noise = noise_of(released, self.unit.mechanism.noise_multiplier, int(server.state[CLIENTS]))
        generator, stage = self.generator(server), self.stage(server)
        if stage is None:
            stage = answered(self.inference.start(generator), released.mean, records, *noise)
        for _ in range(self.generations):
            if stage.kind != FOUND:
                stage = answered(self.inference.step(stage, generator), released.mean, records, *noise)
        self.keep(server, stage)

    @torch.no_grad()
    def release(self, client: Client, sent: Broadcast) -> Message:
        """A client's one release: count and sums (1 + D,), with noise."""
        phi = copy.deepcopy(self.inference.phi).double()  # rounding must not add to the sensitivity
        like = torch.empty(0, dtype=torch.float64)
        return self.unit.report(self.unit.of(client, lambda: EmbeddingFactor.of(summaries(client), phi, like)))


def noise_of(released: EmbeddingFactor, noise_multiplier: float, clients: int) -> tuple[Tensor, float]:
    """The covariance (D, D) of the noise in sqrt(n) mu~, mu~ = sums / count, where each client has noised both.

        Cov = K (z S)^2 / n (I + mu~ mu~^T / w^2)

    to first order in the noise of the count, which is released w times as large as it is (``COUNT_WEIGHT``).

    Args:
        released: the sum of the clients' releases.
        noise_multiplier: z.
        clients: K.

    Returns:
        It, and the factor of mu~ mu~^T in it.
    """
    mean = released.mean
    each = clients * (noise_multiplier * SENSITIVITY) ** 2 / float(released.count.clamp_min(1))
    scaled = each / COUNT_WEIGHT**2
    return each * torch.eye(len(mean), dtype=mean.dtype) + scaled * torch.outer(mean, mean), scaled
