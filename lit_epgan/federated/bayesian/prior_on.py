"""Another algorithm's prior on some of a module's networks only."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.report import Report


class PriorOn(Composed):
    """What ``inner`` does to an optimizer's parameters, it does to those of the named networks; others have FedAvg.

    So EP-GAN's SRU w/ EP-ProbGAN has a prior on generators and discriminators and none on the recogniser (appendix
    F.4.3), and SRU (EP) w/ EP-ProbGAN has it on all. Price: ``inner``'s, with messages of all parameters.

    Args:
        inner: the algorithm with a prior, such as ``TiltedExpectationPropagation``.
        networks: names of submodules, each trained by optimizers of its own.

    Raises:
        UserError: no name is given, or one is no submodule that an optimizer trains.
    """

    def __init__(self, inner: FederatedAlgorithm, networks: Sequence[str]) -> None:
        super().__init__(inner)
        if not networks:
            raise UserError("PriorOn's networks are none: name at least one submodule.")
        self.networks = tuple(networks)

    def start_fit(self, server: Server) -> None:
        self._chosen: set[int] = set()  # optimizers
        for network in self.networks:
            own = {each.index for each in server.optimized if _belongs(server, each, network)}
            if not own:
                raise UserError(f"PriorOn's networks: no optimizer trains {network!r}; name a submodule that one does.")
            self._chosen |= own
        super().start_fit(server)

    def start_client(self, client: Client) -> None:
        super().start_client(self._seen(client))

    def client_batch(self, client: Client, batch: Any) -> Any:
        return super().client_batch(self._seen(client), batch)

    def extra_loss(self, client: Client) -> Tensor | None:
        return super().extra_loss(self._seen(client))

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        if optimized.index in self._chosen:
            super().adjust_gradients(self._seen(client), optimized)

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        if optimized.index in self._chosen:
            super().after_step(self._seen(client), optimized)

    def end_client(self, client: Client) -> None:
        super().end_client(self._seen(client))

    def pre_report(self, client: Client) -> Report | None:
        return super().pre_report(self._seen(client))

    def client_report(self, client: Client) -> Report:
        return super().client_report(self._seen(client))

    def overrides(self, hook: str) -> bool:
        return self.inner.overrides(hook) or hook == "start_fit"

    def _seen(self, client: Client) -> Client:
        """The client as ``inner`` sees it: of its optimizers only the networks'; its state is the client's own."""
        server = client.server
        chosen = [each for each in server.optimized if each.index in self._chosen]
        return replace(client, server=replace(server, optimized=chosen))


def _belongs(server: Server, optimized: OptimizedParameters, network: str) -> bool:
    """Whether the optimizer trains the submodule ``network``."""
    first = optimized.parameters[0] if optimized.parameters else None
    named = server.module.named_parameters()
    return any(p is first and name.startswith(f"{network}.") for name, p in named)
