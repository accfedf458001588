"""Expectation propagation in function space by messages that sum: a client's site is its data's mean embedding."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.bayes import EmbeddingFactor, SimplexWeights
from lit_epgan.engine import Algorithm, Around, Broadcast, Client, Exchange, Message, Plan, Rounds, Server, passing
from lit_epgan.federated.function_space.embedding_release import TOTAL, VERSION, EmbeddingRelease, Release
from lit_epgan.federated.tilted_batch import batch_rows, check_tilted, row_counts, tilted_batch, weighed
from lit_epgan.lib.bounds import at_least

WEIGHTS, WEIGHTS_OF, SENT = "embedding.weights", "embedding.weights_of", "embedding.sent"


class EmbeddingSites(Around):
    """The site factor of client k, exp(n_k <mu_k, f>) in the critic f, by the mean embedding mu_k of its data.

    mu_k = 1/n_k sum_i phi(x_i) with random Fourier features phi. The sites' product has the sum of their statistics,
    and client k subtracts its own from it: the exact cavity, from messages that only sum. So

        first round   (or ``release_round``) plain training; at its end each client releases (n_k, n_k mu_k), once and
                      for all; the server herds points z_i to the total,
                      min_z || 1/N sum_i phi(z_i) - sum_k n_k mu_k / n ||
        then          client k weighs the points to its cavity,
                      min_w || sum_i w_i phi(z_i) - (n mu - n_k mu_k) / (n - n_k) || over the simplex;
                      its minibatch is ``own_rows`` rows of own data, which weigh n_k / n in all, and points drawn by w
                      for the rest
        merge         that of ``inner``: FedAvg, or EP in parameter space

    A client that joins later trains against the total, which is its cavity, then releases; the points are herded again.

    Mean embeddings: Smola et al. 2007; random features: Rahimi and Recht 2007; noised once: DP-MERF (Harder et al.
    2021); pseudocoresets as factors: d'Hondt et al. 2024. Always report the points themselves beside it (``samples``).

    Price: 1 + 2 ``frequencies`` numbers (of moments 1 + 2 d, d the features) up once and the same and the points down
    once; they sum, so secure aggregation hides each client's. With ``noise_multiplier`` the release is differentially
    private (``guarantee``), but the rounds' parameters are not: those need a mechanism of their own, or
    ``EmbeddingOnServer``. Herding costs seconds on a CPU for images of 8 x 8 pixels and minutes for 32 x 32 in colour,
    whenever a client joins.

    Args:
        inner: the algorithm that merges the parameters and adds its own prior; FedAvg by default.
        own_rows, other_rows: rows of own data and of points in a minibatch; by default the latter keep its size.
        release_round: the round, from 0, at whose end clients release; ``features`` that name a submodule of the model
            are taken as the round's clients receive them.
        release: ``features``, ``frequencies``, ``bandwidths``, ``dimensions``, ``stacked``, ``bound``, ``points``,
            ``herding_steps``, ``herding_rate``, ``smoothing``, ``noise_multiplier``, ``delta``, ``noise_seed``,
            ``ledger``, ``budget``, ``unit`` and ``embedding`` of EmbeddingRelease.

    Raises:
        UserError: if an argument is out of its range, the module cannot be sampled, or does not say by
            ``takes_weights = True`` that it takes batches (x, y, weight) whose third entry weighs the rows.
    """

    def __init__(
        self,
        inner: Algorithm | None = None,
        own_rows: int = 8,
        release_round: int = 0,
        other_rows: int | None = None,
        **release: Any,
    ) -> None:
        super().__init__(inner)
        at_least(1, self, own_rows=own_rows, other_rows=other_rows)
        at_least(0, self, release_round=release_round)
        self.own_rows, self.other_rows, self.release_round = own_rows, other_rows, release_round
        self.release = EmbeddingRelease(**release)

    def guarantee(self) -> str | None:
        """What the release of a client guarantees; None without noise. It does not cover the rounds' reports."""
        release = self.release.guarantee
        return super().guarantee() if release is None else f"each client's release: {release}"

    def begin(self, plan: Plan) -> None:
        super().begin(plan)
        self.release.mechanism.begin(plan)

    def end(self) -> None:
        super().end()
        self.release.mechanism.end()

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        check_tilted(module, type(self).__name__)
        self.release.build(module, seed)
        return super().build(module, seed)

    def start(self, server: Server) -> None:
        """A resumed server's features are those that it had."""
        super().start(server)
        self.release.start(server)

    def round(self, server: Server) -> Rounds:
        """The inner algorithm's, with the total and the points out, and releases back."""
        if server.round == self.release_round > 0 and TOTAL not in server.state:
            self.release.rebuild(server)
        known, kept = self.release.broadcast(server), self.release.kept(server)

        def out(exchange: Exchange) -> Exchange:
            if not exchange.training:
                return exchange
            return replace(
                exchange,
                sent=lambda k: {**exchange.sent_to(k), **known},
                kept={**exchange.kept, **kept},
                beside=(*exchange.beside, Release),
            )

        def back(exchange: Exchange, report: Message) -> None:
            if (own := report.part(Release)).embedding is not None:
                released.append(own)

        released: list[Release] = []
        yield from passing(super().round(server), out, back)
        for each in released:
            self.release.add(server, each)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The inner algorithm's steps, on own rows and points weighed to the client's cavity; the release, once."""
        self.release.take(client, sent)
        cavity = self.cavity(client, sent)
        batch = None if cavity is None else self._tilted(client, sent, cavity)
        report = self.inner.train(client if batch is None else client.told(batch=batch), sent)
        if SENT in client.state or client.round < self.release_round:
            return report
        client.state[SENT] = torch.ones(1)
        return report.beside(self.release.report(client))  # the same again if the round in which it is sent is lost

    def cavity(self, client: Client, sent: Broadcast) -> EmbeddingFactor | None:
        """The product of the other clients' sites; None if there are none yet."""
        if TOTAL not in sent:
            return None
        total = self.release.total(sent)
        cavity = total / EmbeddingFactor(self.release.of(client)) if SENT in client.state else total
        return cavity if float(cavity.count) >= 0.5 else None  # counts may be noisy

    def _tilted(self, client: Client, sent: Broadcast, cavity: EmbeddingFactor) -> Callable[[Any], Any]:
        """From a client's batch to own rows and points, with the rows' weights."""
        points: Tensor = client.remember("points", lambda: self.release.herded(sent))
        of = client.state.get(WEIGHTS_OF)
        if of is None or not torch.equal(of, sent[VERSION]):  # the points or the total have changed
            simplex = client.remember("simplex", lambda: SimplexWeights(self.release.phi(points)))
            client.state[WEIGHTS] = simplex(cavity.mean.to(points)).cpu()
            client.state[WEIGHTS_OF] = sent[VERSION].clone()

        def batch(own_batch: Any) -> Any:
            own, rows = row_counts(len(batch_rows(own_batch)), self.own_rows, self.other_rows)
            drawn = torch.multinomial(client.state[WEIGHTS], rows, replacement=True)
            counts = self.release.unit.weight(client)  # n_k of all records, or 1 of all users
            replay = points[drawn.to(points.device)]
            return tilted_batch(own_batch, own, replay, counts / (counts + float(cavity.count)))

        return weighed(batch, client.module)

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``herded``: the points alone, of one message of each client and no round."""
        return super().samples(server, n, start) | self.release.samples(server, n, start)
