"""Discriminators federated, the generator trained on the server."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server, check_server_training, scalar
from lit_epgan.federated.report import Report, Weighted
from lit_epgan.randomness import generator_for


class FedAvgGAN(FederatedAlgorithm):
    """FedAvg over discriminators; the generator never leaves training on the server (Augenstein et al. 2020).

    Algorithm 1 without its clipping and noise:

        client   trains its discriminator on own records against samples of the server's generator, and sends it
        server   averages the discriminators by n_k, then takes ``server_steps`` generator steps against the average

    Rounds must be short: generators and discriminators alternate once a round (6 local steps in the paper). Give the
    federation ``optimizer_state: keep``, so that neither side's optimizer starts afresh each round.

    A module must offer ``turns``, the names of the networks that its training step trains (as ``GAN`` does), with a
    submodule of each name.

    Price: one discriminator up, which sums over clients; the server pays for the generator's training.

    Args:
        server_steps: the generator's steps in a round.
        batch_size: rows of the server's batches.

    Raises:
        UserError: if an argument is below 1, or the module offers no ``turns``.
    """

    on_server = ("generator", "average")  # a client's generator trains nobody: its statistics are of no use

    def __init__(self, server_steps: int = 6, batch_size: int = 32) -> None:
        check_server_training(self, server_steps, batch_size)
        self.server_steps = server_steps
        self.batch_size = batch_size

    def start_fit(self, server: Server) -> None:
        module = server.module
        if not all(hasattr(module, name) for name in ("turns", "generator", "discriminator")):
            raise UserError(
                f"{type(self).__name__} trains generator and discriminator in different places: the module must have "
                f"both submodules and take turns (an attribute 'turns', as in lit_epgan.modules.GAN); "
                f"{type(module).__name__} does not"
            )
        server.module.turns = ("discriminator",)  # type: ignore[assignment]
        self._discriminator = server.flat.slices(list(module.discriminator.parameters()))  # type: ignore[union-attr]

    def end_fit(self, server: Server) -> None:
        server.module.turns = ("discriminator", "generator")  # type: ignore[assignment]

    def client_report(self, client: Client) -> Report:
        part = Weighted(self._read(client.parameters), client.weight)
        return {"discriminator": part, "weight": scalar(client.weight)}

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        self._write(server.parameters, total["discriminator"] / total["weight"])
        self._train_generator(server)

    def _train_generator(self, server: Server) -> None:
        server.module.turns = ("generator",)  # type: ignore[assignment]
        server.train(self._batches(server))
        server.module.turns = ("discriminator",)  # type: ignore[assignment]

    def _batches(self, server: Server) -> Iterator[list[Tensor]]:
        """A generator's step looks at no record: rows of zeros say how many samples to make."""
        shape = server.module.sample(1, generator_for("shape")).shape[1:]  # type: ignore[operator]
        empty = torch.zeros(self.batch_size, *shape).to(server.parameters)
        for _ in range(self.server_steps):
            yield [empty]

    def _read(self, vector: Tensor) -> Tensor:
        return torch.cat([vector[s] for s in self._discriminator])

    def _write(self, vector: Tensor, values: Tensor) -> None:
        start = 0
        for s in self._discriminator:
            vector[s] = values[start : start + s.stop - s.start]
            start += s.stop - s.start
