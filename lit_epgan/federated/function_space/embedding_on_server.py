"""One release per client, and everything else on the server: a GAN on herded points, or a generator that is matched."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Exchange,
    Message,
    Plan,
    Rounds,
    Server,
    check_server_training,
)
from lit_epgan.federated.function_space.embedding_release import EmbeddingRelease, Release
from lit_epgan.lib.errors import UserError
from lit_epgan.networks.average import ParameterAverage


class EmbeddingOnServer(Algorithm):
    """Clients release their mean embeddings once; the server trains the module on points herded to the sum.

    first round   every client of the cohort releases (n_k, n_k mu_k) and nothing else: no parameters, no buffers, and
                  no step of training; the server herds points to the total, as EmbeddingSites does
    then          no client works; ``server_steps`` of the module's own training steps on the points, every round

    With ``noise_multiplier`` z all that is learned from the records is one release of the Gaussian mechanism per
    client, added by the client itself: whatever is computed from it afterwards, the points and the model, has its
    guarantee, at no further price. With ``unit`` user and a mechanism such as ``CentralNoise`` in its place, each
    client is protected as a whole, and the noise is drawn once for all of them. As DP-MERF (Harder, Adamczewski and
    Park 2021) with a GAN on herded points in place of a matched generator, which is ``MatchedEmbedding``.

    Price: 1 + 2 ``frequencies`` numbers up, once (of moments 1 + 2 d, d the features); under secure aggregation less
    noise would do for the same guarantee.
    Not covered: what a simulation shows of its clients beside it (PartitionReport's numbers and labels, ClientMetrics),
    metrics against held-out records, and settings that were tuned on the clients' data.

    Args:
        server_steps: training steps in a round.
        batch_size: rows of the server's batches.
        inner: must be left out: nothing but the release leaves a client.
        release: ``features``, ``frequencies``, ``bandwidths``, ``dimensions``, ``stacked``, ``bound``, ``points``,
            ``herding_steps``, ``herding_rate``, ``smoothing``, ``noise_multiplier``, ``delta``, ``noise_seed``,
            ``ledger``, ``budget``, ``unit`` and ``embedding`` of EmbeddingRelease.

    Raises:
        UserError: if an argument is out of its range, an inner algorithm is asked for, or the module cannot be sampled.
    """

    def __init__(
        self, server_steps: int = 200, batch_size: int = 32, inner: Algorithm | None = None, **release: Any
    ) -> None:
        name = type(self).__name__
        if inner is not None:
            raise UserError(
                f"{name} aggregates nothing but the clients' releases, so {type(inner).__name__} cannot be its inner "
                "algorithm: leave inner out, or take EmbeddingSites"
            )
        check_server_training(self, server_steps, batch_size)
        self.server_steps, self.batch_size = server_steps, batch_size
        self.release = EmbeddingRelease(**release)

    def guarantee(self) -> str | None:
        """What holds for each client's release, and for the trained model; None without noise."""
        release = self.release.guarantee
        return None if release is None else str(release)

    def trains(self, round_: int) -> bool:
        """Never: no record reaches a training step, nor any loss that it logs."""
        return False

    def exchanges(self, start: int, stop: int) -> int:
        return int(start == 0 < stop)

    def begin(self, plan: Plan) -> None:
        self.release.mechanism.begin(plan)

    def end(self) -> None:
        self.release.mechanism.end()

    def build(self, module: nn.Module, seed: int) -> None:
        self.release.build(module, seed)

    def start(self, server: Server) -> None:
        """A resumed server's features are those that it had."""
        self.release.start(server)

    def round(self, server: Server) -> Rounds:
        if server.round == 0:
            releases = yield Exchange({}, question="released", training=False, answer=Release)
            self.release.add(server, releases)
        else:
            self.train_server(server)

    def released(self, client: Client, sent: Broadcast) -> Message:
        return self.release.report(client)

    def train_server(self, server: Server) -> None:
        server.train(self._batches(server))

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``herded``: the points that the server trains on."""
        return self.release.samples(server, n, start)

    def _batches(self, server: Server) -> Iterator[list[Tensor]]:
        points = self.release.herded(server.state).to(server.parameters.dtype)
        for _ in range(self.server_steps):
            rows = torch.randint(len(points), (self.batch_size,))
            yield [points[rows.to(points.device)]]


class MatchedEmbedding(EmbeddingOnServer):
    """The server trains the module's generator G to match the total embedding: DP-MERF (Harder et al. 2021).

    min over G of || mean_z phi(G(z)) - sum_k n_k mu_k / n ||^2, by Adam with fresh noise at every step; the rate falls
    linearly within each round. The herding's points are made as well, for comparison (``samples``). All else is as in
    EmbeddingOnServer, the guarantee included. With ``embedding`` moments and public ``features`` it is DP-MEPF (Harder
    et al. 2023), without labels.

    Args:
        server_steps: training steps in a round.
        batch_size: rows of generated data at each step; their mean stands for the generator's embedding, so hundreds.
        lr: Adam's learning rate.
        average: decay of the moving average of the generator's parameters, where the module has a submodule
            ``average`` for it.
        inner: must be left out: nothing but the release leaves a client.
        release: as for EmbeddingOnServer.

    Raises:
        UserError: if an argument is out of its range, or the module has no ``generator`` or no ``latent_dim``.
    """

    def __init__(
        self,
        server_steps: int = 200,
        batch_size: int = 500,
        lr: float = 1e-3,
        average: float = 0.99,
        inner: Algorithm | None = None,
        **release: Any,
    ) -> None:
        super().__init__(server_steps, batch_size, inner, **release)
        if not lr > 0 or not 0 <= average < 1:
            raise UserError(f"MatchedEmbedding's lr and average are {lr} and {average}; give lr > 0, 0 <= average < 1")
        self.lr, self.average = lr, average

    def build(self, module: nn.Module, seed: int) -> None:
        missing = [name for name in ("generator", "latent_dim") if not hasattr(module, name)]
        if missing:
            raise UserError(
                f"MatchedEmbedding trains the submodule generator from noise (n, latent_dim), but "
                f"{type(module).__name__} has no {' and no '.join(missing)}"
            )
        super().build(module, seed)

    def train_server(self, server: Server) -> None:
        with server.holding():
            self._match(server)

    def _match(self, server: Server) -> None:
        generator: nn.Module = server.module.get_submodule("generator")
        latent: int = server.module.latent_dim  # type: ignore[assignment]
        members: int = getattr(server.module, "members", 1)  # a mixture's rows are equal blocks
        rows = members * -(-self.batch_size // members)
        twin = getattr(server.module, "average", None)
        averaging = ParameterAverage(generator, twin, 1 - self.average) if isinstance(twin, nn.Module) else None
        optimizer = torch.optim.Adam(generator.parameters(), lr=self.lr, betas=(0.9, 0.99))
        for step in range(self.server_steps):
            optimizer.param_groups[0]["lr"] = self.lr * (1 - 0.95 * step / self.server_steps)
            noise = torch.randn(rows, latent).to(server.parameters)
            loss = self.release.squared_discrepancy(server, generator(noise))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if averaging is not None:
                averaging.update()
