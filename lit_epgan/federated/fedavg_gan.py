"""Discriminators federated, the generator trained on the server."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    FlatParameters,
    Message,
    Server,
    check_server_training,
    merged,
)
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for


class FedAvgGAN(Algorithm):
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

    class Report(Message):
        """What leaves a client: its discriminator's change."""

        discriminator: Tensor = merged("mean")

    def __init__(self, server_steps: int = 6, batch_size: int = 32) -> None:
        check_server_training(self, server_steps, batch_size)
        self.server_steps, self.batch_size = server_steps, batch_size

    def build(self, module: nn.Module, seed: int) -> None:
        """Check that the module takes turns; on clients it is the discriminator's."""
        if not all(hasattr(module, name) for name in ("turns", "generator", "discriminator")):
            raise UserError(
                f"{type(self).__name__} trains generator and discriminator in different places: the module must have "
                f"both submodules and take turns (an attribute 'turns', as in lit_epgan.modules.GAN); "
                f"{type(module).__name__} does not"
            )

    def leave(self, module: nn.Module) -> None:
        module.turns = ("discriminator", "generator")  # type: ignore[assignment]

    def start(self, server: Server) -> None:
        """Between rounds, too, the module trains the discriminator alone: so it logs no generator's loss."""
        server.module.turns = ("discriminator",)  # type: ignore[assignment]

    def train(self, client: Client, sent: Broadcast) -> Message:
        with taking_turns(client.module, "discriminator"):
            client.fit(sent["parameters"])
        return self.Report(discriminator=DiscriminatorPart(client.flat, client.module).read(client.change))

    def merge(self, server: Server, report: Any) -> None:
        part = DiscriminatorPart(server.flat, server.module)
        part.write(server.parameters, part.read(server.parameters) + report.discriminator)
        self.train_generator(server, self.batches(server))

    def train_generator(self, server: Server, batches: Iterable[list[Tensor]]) -> None:
        """One step on each batch against the server's discriminator."""
        with taking_turns(server.module, "generator"):
            server.train(batches)

    def batches(self, server: Server) -> Iterator[list[Tensor]]:
        """A generator's step looks at no record: rows of zeros (batch_size, ...) say how many samples to make."""
        shape = server.module.sample(1, generator_for("shape")).shape[1:]  # type: ignore[operator]
        empty = torch.zeros(self.batch_size, *shape).to(server.parameters)
        for _ in range(self.server_steps):
            yield [empty]


@contextmanager
def taking_turns(module: nn.Module, *turns: str) -> Iterator[None]:
    """Within, a module's training step trains these networks alone."""
    found = module.turns
    module.turns = turns  # type: ignore[assignment]
    try:
        yield
    finally:
        module.turns = found


class DiscriminatorPart:
    """The part of a flat vector that is the module's submodule ``discriminator``."""

    def __init__(self, flat: FlatParameters, module: nn.Module) -> None:
        self._numel = flat.numel
        self._slices = flat.slices(list(module.discriminator.parameters()))  # type: ignore[union-attr]

    def read(self, vector: Tensor) -> Tensor:
        """The part of a flat vector (d,), copied."""
        return torch.cat([vector[s] for s in self._slices])

    def write(self, vector: Tensor, values: Tensor) -> None:
        """Set the part of a flat vector (d,) in place."""
        start = 0
        for s in self._slices:
            vector[s] = values[start : start + s.stop - s.start].to(vector.dtype)
            start += s.stop - s.start

    def rest(self, vector: Tensor) -> Tensor:
        """What of a flat vector (d,) is not the discriminator's, copied."""
        return vector[~self._mask(vector)]

    def joined(self, own: Tensor, rest: Tensor) -> Tensor:
        """The flat vector (d,) of a discriminator's part and the rest."""
        vector = own.new_empty(self._numel)
        vector[~self._mask(own)] = rest
        self.write(vector, own)
        return vector

    def _mask(self, like: Tensor) -> Tensor:
        mask = torch.zeros(self._numel, dtype=torch.bool, device=like.device)
        for s in self._slices:
            mask[s] = True
        return mask
