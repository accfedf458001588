"""Expectation propagation in function space by messages that sum: a client's site is its data's mean embedding."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.embedding import EmbeddingFactor, SimplexWeights
from lit_epgan.engine import (
    Algorithm,
    Around,
    Broadcast,
    Client,
    Exchange,
    Report,
    Rounds,
    Server,
    Total,
    Work,
    passing,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.function_space.embedding_release import VERSION, EmbeddingRelease
from lit_epgan.federated.function_space.release_units import MEMBERS, TOTAL
from lit_epgan.federated.tilted_batch import batch_rows, check_tilted, row_counts, tilted_batch

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
    ``EmbeddingOnServer``. Herding costs seconds on a CPU for small images, whenever a client joins.

    Args:
        inner: the algorithm that merges the parameters and adds its own prior; FedAvg by default.
        own_rows, other_rows: rows of own data and of points in a minibatch; by default the latter keep its size.
        release_round: the round, from 0, at whose end clients release; ``features`` that name a submodule of the model
            are taken as the round's clients receive them.
        release: ``features``, ``frequencies``, ``bandwidths``, ``dimensions``, ``stacked``, ``bound``, ``points``,
            ``herding_steps``, ``herding_rate``, ``smoothing``, ``noise_multiplier``, ``delta``, ``noise_seed``,
            ``unit`` and ``embedding`` of EmbeddingRelease.

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
        for name, count, least in (("own_rows", own_rows, 1), ("release_round", release_round, 0),
                                   ("other_rows", other_rows, 1)):  # fmt: skip
            if count is not None and count < least:
                raise UserError(f"EmbeddingSites' {name} is {count}; it must be at least {least}")
        self.own_rows, self.other_rows, self.release_round = own_rows, other_rows, release_round
        self.release = EmbeddingRelease(**release)

    def guarantee(self) -> str | None:
        """What the release of a client guarantees; None without noise. It does not cover the rounds' reports."""
        release = self.release.guarantee
        return super().guarantee() if release is None else f"each client's release: {release}"

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        """The features."""
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
            return replace(exchange, sent=lambda k: {**exchange.sent_to(k), **known}, kept={**exchange.kept, **kept})

        def back(exchange: Exchange, total: Total) -> None:
            if TOTAL in total:
                released.append(Total({n: total.sums.pop(n) for n in (TOTAL, MEMBERS) if n in total}))

        released: list[Total] = []
        yield from passing(super().round(server), out, back)
        for each in released:
            self.release.add(server, each)

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The points in the minibatch, and the release, after the inner algorithm's work."""
        inner = super().works(question, client, received)
        return [*inner, EmbeddingWork(self, client, received)] if question == "train" else inner

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``herded``: the points alone, of one message of each client and no round."""
        return super().samples(server, n, start) | self.release.samples(server, n, start)


class EmbeddingWork(Work):
    """A client's minibatches of own rows and points weighed to its cavity; its release, once."""

    def __init__(self, settings: EmbeddingSites, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings, self.release = settings, settings.release

    def cavity(self) -> EmbeddingFactor | None:
        """The product of the other clients' sites; None if there are none yet."""
        if TOTAL not in self.received:
            return None
        total, client = self.release.total(self.received), self.client
        cavity = total / EmbeddingFactor(self.release.of(client)) if SENT in client.state else total
        return cavity if float(cavity.count) >= 0.5 else None  # counts may be noisy

    def begin(self) -> None:
        """The weights of the points, anew when these or the total have changed."""
        client, received = self.client, self.received
        self.release.take(client, received)
        cavity = self.cavity()
        self._others = 0.0 if cavity is None else float(cavity.count)
        if cavity is None:
            return
        self._points: Tensor = client.remember("points", lambda: self.release.herded(received))
        of = client.state.get(WEIGHTS_OF)
        if of is None or not torch.equal(of, received[VERSION]):
            simplex = client.remember("simplex", lambda: SimplexWeights(self.release.phi(self._points)))
            client.state[WEIGHTS] = simplex(cavity.mean.to(self._points)).cpu()
            client.state[WEIGHTS_OF] = received[VERSION].clone()

    def batch(self, batch: Any) -> Any:
        """Own rows and points, with the rows' weights."""
        if not self._others:
            return batch
        settings, client = self.settings, self.client
        own, rows = row_counts(len(batch_rows(batch)), settings.own_rows, settings.other_rows)
        drawn = torch.multinomial(client.state[WEIGHTS], rows, replacement=True)
        replay = self._points[drawn.to(self._points.device)]
        return tilted_batch(batch, own, replay, self._share())

    def _share(self) -> float:
        """The client's share of all records, n_k / n, or of all users, 1 / n."""
        own = self.release.unit.weight(self.client)
        return own / (own + self._others)

    def report(self) -> Report:
        """The release, once; the same again if the round in which it was sent did not count."""
        if SENT in self.client.state or self.client.round < self.settings.release_round:
            return {}
        self.client.state[SENT] = torch.ones(1)
        return self.release.report(self.client)
