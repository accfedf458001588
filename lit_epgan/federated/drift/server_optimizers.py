"""FedAvgM, FedAdam and FedYogi: the server treats a round's merged change as a gradient."""

from abc import abstractmethod

import torch
from torch import Tensor

from lit_epgan.engine import Algorithm, Around, Rounds, Server
from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError


class ServerOptimizer(Around):
    """Around any algorithm: its server update gives a change D = merged - theta, and ``step`` says what to do with it.

    Args:
        lr: the server's step size.
        inner: the algorithm that merges; FedAvg by default.
    """

    def __init__(self, lr: float, inner: Algorithm | None = None) -> None:
        super().__init__(inner)
        above(0, self, lr=lr)
        self.lr = lr

    @abstractmethod
    def step(self, server: Server, change: Tensor) -> Tensor:
        """What is added to the server's parameters (d,), from a round's ``change`` (d,)."""

    def round(self, server: Server) -> Rounds:
        """The inner algorithm's round, and what ``step`` makes of its change."""
        before = server.parameters.clone()
        yield from super().round(server)
        change = server.parameters - before
        server.parameters.copy_(before + self.step(server, change))


class FedAvgM(ServerOptimizer):
    """Server momentum (Hsu, Qi and Brown 2019): m <- momentum m + D;  theta <- theta + lr m."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.9, inner: Algorithm | None = None) -> None:
        super().__init__(lr, inner)
        within("[0, 1)", self, momentum=momentum)
        self.momentum = momentum

    def step(self, server: Server, change: Tensor) -> Tensor:
        mean = server.state.setdefault("server_momentum", torch.zeros_like(change))
        mean.mul_(self.momentum).add_(change)
        return self.lr * mean


class FedAdam(ServerOptimizer):
    """Adaptive federated optimization (Reddi et al. 2021, algorithm 2), without bias correction, as there.

        m <- b1 m + (1 - b1) D;   v <- b2 v + (1 - b2) D^2;   theta <- theta + lr m / (v^1/2 + tau),   v_0 = tau^2

    Args:
        lr: the server's step size.
        betas: b1, b2.
        tau: degree of adaptivity.
        inner: the algorithm that merges; FedAvg by default.
    """

    def __init__(
        self,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
        inner: Algorithm | None = None,
    ) -> None:
        super().__init__(lr, inner)
        if not all(0 <= beta < 1 for beta in betas) or not tau > 0:
            raise UserError(
                f"{type(self).__name__}'s betas and tau are {tuple(betas)} and {tau}; give betas in [0, 1) and tau > 0"
            )
        self.betas, self.tau = betas, tau

    def step(self, server: Server, change: Tensor) -> Tensor:
        """lr m / (v^1/2 + tau) (d,)."""
        mean = server.state.setdefault("server_momentum", torch.zeros_like(change))
        square = server.state.setdefault("server_square", torch.full_like(change, self.tau**2))
        mean.lerp_(change, 1 - self.betas[0])
        self.accumulate(square, change.square())
        return self.lr * mean / (square.sqrt() + self.tau)

    def accumulate(self, square: Tensor, new: Tensor) -> None:
        """v (d,), in place, from D^2 (d,)."""
        square.lerp_(new, 1 - self.betas[1])


class FedYogi(FedAdam):
    """As FedAdam, with v <- v - (1 - b2) D^2 sign(v - D^2) (Reddi et al. 2021, algorithm 2)."""

    def accumulate(self, square: Tensor, new: Tensor) -> None:
        """v (d,), in place, from D^2 (d,)."""
        square.sub_((1 - self.betas[1]) * new * torch.sign(square - new))
