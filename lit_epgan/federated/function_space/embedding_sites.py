"""Expectation propagation in function space by messages that sum: a client's site is its data's mean embedding."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.embedding import EmbeddingFactor, Guarantee, SimplexWeights
from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server, unsent
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.function_space.embedding_release import CODES, NETWORK, OWN, TOTAL, EmbeddingRelease
from lit_epgan.federated.report import Report
from lit_epgan.federated.tilted_batch import batch_rows, row_counts, tilted_batch


class EmbeddingSites(Composed):
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

    Price: 1 + 2 ``frequencies`` numbers up once and the same and the points down once; they sum, so secure aggregation
    hides each client's. With ``noise_multiplier`` the release is differentially private (``guarantee``), but the
    rounds' parameters are not: those need a mechanism of their own, or ``EmbeddingOnServer``. Herding costs seconds on
    a CPU for small images, whenever a client joins.

    Args:
        inner: the algorithm that merges the parameters and adds its own prior; FedAvg by default.
        own_rows, other_rows: rows of own data and of points in a minibatch; by default the latter keep its size.
        release_round: the round, from 0, at whose end clients release; ``features`` that name a submodule of the model
            are taken as the round's clients receive them.
        release: ``features``, ``frequencies``, ``bandwidths``, ``dimensions``, ``stacked``, ``bound``, ``points``,
            ``herding_steps``, ``herding_rate``, ``smoothing``, ``noise_multiplier``, ``delta`` and ``noise_seed`` of
            EmbeddingRelease.

    Raises:
        UserError: if an argument is out of its range, or the module cannot be sampled.
    """

    def __init__(
        self,
        inner: FederatedAlgorithm | None = None,
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

    @property
    def guarantee(self) -> Guarantee | None:
        """What the release of a client guarantees; None without noise. It does not cover the rounds' reports."""
        return self.release.guarantee

    def start_fit(self, server: Server) -> None:
        super().start_fit(server)
        self.release.build(server)
        self._herded: Tensor | None = None  # the codes that what follows belongs to

    def start_round(self, server: Server) -> None:
        super().start_round(server)
        if server.round == self.release_round > 0 and TOTAL not in server.state:
            server.state.pop(NETWORK, None)
            self.release.build(server)
        if CODES in server.state and server.state[CODES] is not self._herded:
            self._herded = server.state[CODES]
            self._points = self.release.herded(server)
            self._simplex = SimplexWeights(self.release.phi(self._points))
            self._weights: dict[int, Tensor] = {}

    def cavity(self, client: Client) -> EmbeddingFactor | None:
        """The product of the other clients' sites; None if there are none yet."""
        if TOTAL not in client.server.state:
            return None
        total = self.release.total(client.server)
        cavity = total / EmbeddingFactor(client.state[OWN]) if OWN in client.state else total
        return cavity if float(cavity.count) >= 0.5 else None  # counts may be noisy

    def start_client(self, client: Client) -> None:
        super().start_client(client)
        cavity = self.cavity(client)
        self._others = 0.0 if cavity is None else float(cavity.count)
        if cavity is not None and client.index not in self._weights:
            self._weights[client.index] = self._simplex(cavity.mean.to(self._points)).cpu()

    def client_download(self, client: Client) -> Report:
        """The total and the points once, beside what ``inner`` needs."""
        known = [name for name in (TOTAL, CODES) if name in client.server.state]
        return dict(super().client_download(client)) | unsent(client, known)

    def client_batch(self, client: Client, batch: Any) -> Any:
        batch = super().client_batch(client, batch)
        if not self._others:
            return batch
        own, rows = row_counts(len(batch_rows(batch)), self.own_rows, self.other_rows)
        drawn = torch.multinomial(self._weights[client.index], rows, replacement=True)
        replay = self._points[drawn.to(self._points.device)]
        return tilted_batch(batch, own, replay, client.weight / (client.weight + self._others))

    def client_report(self, client: Client) -> Report:
        report = dict(super().client_report(client))
        if OWN not in client.state and client.server.round >= self.release_round:
            report[TOTAL] = self.release.of(client)
        return report

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        super().server_update(server, total)
        if TOTAL in total:
            self.release.add(server, total[TOTAL])

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``herded``: the points alone, no federation."""
        return super().samples(server, n, start) | self.release.samples(server, n, start)
