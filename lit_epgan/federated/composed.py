"""An algorithm around another one."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server
from lit_epgan.federated.fedavg import FedAvg
from lit_epgan.federated.report import Report


class Composed(FederatedAlgorithm):
    """Passes every hook on to ``inner``; a subclass adds to the hooks that it needs, by ``super()``.

    Both keep their tensors in the same ``state`` of client and server, under names of their own.

    Args:
        inner: the algorithm that it goes around, which also merges the parameters; FedAvg by default.
    """

    def __init__(self, inner: FederatedAlgorithm | None = None) -> None:
        self.inner = inner if inner is not None else FedAvg()

    @property
    def merges(self) -> bool:  # type: ignore[override]
        return self.inner.merges

    @property
    def on_server(self) -> Sequence[str]:  # type: ignore[override]
        return self.inner.on_server

    def overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Composed, hook) or self.inner.overrides(hook)

    def build(self, module: nn.Module) -> nn.ModuleDict | None:
        return self.inner.build(module)

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        return self.inner.network_optimizer(networks)

    def start_fit(self, server: Server) -> None:
        self.inner.start_fit(server)

    def end_fit(self, server: Server) -> None:
        self.inner.end_fit(server)

    def clients_work(self, round_: int) -> bool:
        return self.inner.clients_work(round_)

    def visits(self, cohort: list[int], seed: int, round_: int) -> list[int]:
        return self.inner.visits(cohort, seed, round_)

    def start_round(self, server: Server) -> None:
        self.inner.start_round(server)

    def start_client(self, client: Client) -> None:
        self.inner.start_client(client)

    def client_download(self, client: Client) -> Report:
        return self.inner.client_download(client)

    def client_batch(self, client: Client, batch: Any) -> Any:
        return self.inner.client_batch(client, batch)

    def extra_loss(self, client: Client) -> Tensor | None:
        return self.inner.extra_loss(client)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        self.inner.adjust_gradients(client, optimized)

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        self.inner.after_step(client, optimized)

    def end_client(self, client: Client) -> None:
        self.inner.end_client(client)

    def pre_report(self, client: Client) -> Report | None:
        return self.inner.pre_report(client)

    def client_report(self, client: Client) -> Report:
        return self.inner.client_report(client)

    def report_taken(self, client: Client) -> None:
        self.inner.report_taken(client)

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        self.inner.server_update(server, total)

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        return self.inner.samples(server, n, start)
