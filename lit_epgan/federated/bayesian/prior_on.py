"""Another algorithm's prior on some of a module's networks only."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lit_epgan.engine import Algorithm, Around, Broadcast, Client, Message, OptimizedParameters
from lit_epgan.lib.errors import UserError


class PriorOn(Around):
    """What ``inner`` does to an optimizer's parameters, it does to those of the named networks; others have FedAvg.

    So EP-GAN's SRU w/ EP-ProbGAN has a prior on generators and discriminators and none on the recogniser (appendix
    F.4.3), and SRU (EP) w/ EP-ProbGAN has it on all. Price: ``inner``'s, with messages of all parameters.

    Args:
        inner: the algorithm with a prior, such as ``TiltedExpectationPropagation``.
        networks: names of submodules, each trained by optimizers of its own.

    Raises:
        UserError: no name is given, or one is no submodule that an optimizer trains.
    """

    def __init__(self, inner: Algorithm, networks: Sequence[str]) -> None:
        super().__init__(inner)
        if not networks:
            raise UserError("PriorOn's networks are none: name at least one submodule.")
        self.networks = tuple(networks)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The inner algorithm's training, by a client that has no other optimizers than the networks'."""
        return super().train(self._restricted(client), sent)

    def __getattr__(self, question: str) -> Any:
        found = super().__getattr__(question)
        if not callable(found):
            return found
        return lambda who, *rest: found(self._restricted(who) if isinstance(who, Client) else who, *rest)

    def _restricted(self, client: Client) -> Client:
        chosen: set[int] = set()
        for network in self.networks:
            own = {each.index for each in client.optimized if _belongs(client.module, each, network)}
            if not own:
                raise UserError(f"PriorOn's networks: no optimizer trains {network!r}; name a submodule that one does.")
            chosen |= own
        return replace(client, optimized=[each for each in client.optimized if each.index in chosen])


def _belongs(module: nn.Module, optimized: OptimizedParameters, network: str) -> bool:
    """Whether the optimizer trains the submodule ``network``."""
    first = optimized.parameters[0] if optimized.parameters else None
    return any(p is first and name.startswith(f"{network}.") for name, p in module.named_parameters())
