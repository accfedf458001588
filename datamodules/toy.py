"""Toys: Gaussians in the plane (the EP-GAN paper's four, the GRAFFL paper's three, K on a ring), FedNP's parabola."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.partition import partition
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

FOUR_CENTRES = ((-3.0, 3.0), (3.0, 3.0), (-3.0, -3.0), (3.0, -3.0))
THREE_CENTRES = ((-9.0, 3.0), (0.0, -9.0), (8.0, 3.0))
INTERVALS = ((-7.0, -5.0, 30), (-2.0, 2.0, 20), (4.0, 8.0, 50))  # from, to, points


@dataclass(frozen=True)
class GaussianMixture2d:
    """Round Gaussians in the plane with equal weights: p(x) = 1/K sum_k N(x; mean_k, variance_k I); means (K, 2),
    variances (K,)."""

    means: Tensor
    variances: Tensor

    def density(self, points: Tensor) -> Tensor:
        """The density (n,) at points (n, 2)."""
        squares = (points[:, None] - self.means).square().sum(-1)
        heights = torch.exp(-squares / (2 * self.variances)) / (2 * math.pi * self.variances)
        return heights.mean(1)

    def sample(self, each: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """``each`` points of every Gaussian: points (K each, 2) and the Gaussian of each, int64 (K each,)."""
        component = torch.arange(len(self.means)).repeat_interleave(each)
        noise = torch.randn(len(component), 2, generator=generator)
        return self.means[component] + self.variances[component].sqrt()[:, None] * noise, component


class ToyDataModule(FederatedDataModule):
    """A mixture of Gaussians, dealt out to clients (EP-GAN, section 5.1 and appendix F.2).

    Args:
        layout: ``four``: centres (+-3, +-3), as in the paper; ``three``: centres (-9, 3), (0, -9) and (8, 3), as in
            GRAFFL's section 4.2; ``ring``: evenly spaced on a circle.
        components: number of Gaussians on the ring (ignored by the others).
        radius: of the ring.
        variances: range from which each Gaussian's variance is drawn uniformly. By default the paper's (.3, .5), and on
            a crowded ring less, so that neighbours stay at least eight standard deviations apart; 1 of ``three``.
        points: training points of each Gaussian.
        test_points: test points of each Gaussian.
        partition: ``one_class``: one Gaussian per client; ``iid``; ``dirichlet``; ``pooled``: one client holds all.
        clients: number of clients, by default one for each Gaussian; fewer under ``one_class`` leave the later
            Gaussians out of the mixture altogether.
        beta: concentration of ``dirichlet``.
        data_seed: decides variances, points and partition; null takes ``seed``, so that each seed has its own.
        data_dir, download: of no effect, since the points are computed; taken so that one command line fits every
            configuration.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        mixture: the true distribution of all clients' data together.
        shape: (2,), the shape of a point.
    """

    def __init__(
        self,
        layout: Literal["four", "three", "ring"] = "four",
        components: int = 8,
        radius: float = 4.0,
        variances: tuple[float, float] | None = None,
        points: int = 1024,
        test_points: int = 1024,
        partition: Literal["one_class", "iid", "dirichlet", "pooled"] = "one_class",
        clients: int | None = None,
        beta: float = 0.5,
        data_seed: int | None = 0,
        data_dir: str = "data",
        download: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        at_least(1, "data", components=components, points=points, test_points=test_points)
        self.points, self.test_points, self.partition, self.beta = points, test_points, partition, beta
        self.data_seed = self.seed if data_seed is None else data_seed
        self.shape = (2,)
        means = _centres(layout, components, radius)
        if partition == "one_class" and clients is not None:
            if not 1 <= clients <= len(means):
                raise UserError(
                    f"One Gaussian per client makes between 1 and {len(means)} clients, not {clients}: "
                    f"set --data.clients to at most {len(means)}, or choose another --data.partition."
                )
            means = means[:clients]
        low, high = variances if variances is not None else _default_variances(layout, components, radius)
        if not 0 < low <= high:
            raise UserError(f"data.variances is ({low}, {high}); give the least and the greatest, both above 0")
        drawn = low + (high - low) * torch.rand(len(means), generator=generator_for(self.data_seed, "variances"))
        self.mixture = GaussianMixture2d(means, drawn)
        self.clients_wanted = 1 if partition == "pooled" else clients if clients is not None else len(means)

    def load(self) -> ClientData:
        """Draw the points and deal them out. UserError: if the partition cannot be made."""
        x, component = self.mixture.sample(self.points, generator_for(self.data_seed, "train"))
        test = self.mixture.sample(self.test_points, generator_for(self.data_seed, "test"))
        kind = "iid" if self.partition == "pooled" else self.partition
        parts = partition(component, kind, self.clients_wanted, generator_for(self.data_seed, "partition"), self.beta)
        rows = {f"client-{k}": part for k, part in enumerate(parts)}
        held_out = TensorDataset(*test)
        return ClientData(
            train={name: TensorDataset(x[part], component[part]) for name, part in rows.items()},
            val=held_out,
            test=held_out,
            labels={name: component[part] for name, part in rows.items()},
        )


def _centres(layout: str, components: int, radius: float) -> Tensor:
    if layout == "four":
        return torch.tensor(FOUR_CENTRES)
    if layout == "three":
        return torch.tensor(THREE_CENTRES)
    if layout != "ring":
        raise UserError(f"There is no toy layout {layout!r}: choose four, three or ring.")
    angles = 2 * math.pi * torch.arange(components) / components
    return radius * torch.stack([angles.cos(), angles.sin()], 1)


def _default_variances(layout: str, components: int, radius: float) -> tuple[float, float]:
    if layout == "three":
        return 1.0, 1.0
    if layout == "four" or components == 1:
        return 0.3, 0.5
    spacing = 2 * radius * math.sin(math.pi / components)
    high = min(0.5, (spacing / 8) ** 2)
    return 0.6 * high, high


class PolynomialDataModule(FederatedDataModule):
    """y = -x^2 + 2x + 4 + N(0, noise_variance), three clients with an interval of evenly spaced x each.

    FedNP (AAAI 2023), appendix D.2 and its published script: 30 points on [-7, -5], 20 on [-2, 2], 50 on [4, 8]; the
    error is taken on all of them, as no part is held out.

    Args:
        noise_variance: of y.
        partition: ``intervals``; ``iid``: the same points and client sizes, dealt out at random; ``pooled``: one client
            holds all points.
        clients: how many of the three; the points of the others do not exist.
        data_seed: decides noise and the random deal; null takes ``seed``, so that each seed has its own.
        data_dir, download: of no effect, since the points are computed; taken so that one command line fits every
            configuration.
        federated: settings of ``FederatedDataModule``.
    """

    def __init__(
        self,
        noise_variance: float = 25.0,
        partition: Literal["intervals", "iid", "pooled"] = "intervals",
        clients: int = 3,
        data_seed: int | None = 0,
        data_dir: str = "data",
        download: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        at_least(0, "data", noise_variance=noise_variance)
        if not 1 <= clients <= len(INTERVALS):
            raise UserError(f"The polynomial toy has between 1 and {len(INTERVALS)} clients, not {clients}.")
        if partition not in ("intervals", "iid", "pooled"):
            raise UserError(f"There is no partition {partition!r} here: choose intervals, iid or pooled.")
        self.noise_variance, self.partition, self.clients_wanted = noise_variance, partition, clients
        self.data_seed = self.seed if data_seed is None else data_seed

    def load(self) -> ClientData:
        """Draw the noise and deal the points out: x and y, float tensors (n, 1)."""
        intervals = INTERVALS[: self.clients_wanted]
        x = torch.cat([torch.linspace(low, high, n) for low, high, n in intervals])[:, None]
        noise = torch.randn(x.shape, generator=generator_for(self.data_seed, "noise"))
        y = -x.square() + 2 * x + 4 + self.noise_variance**0.5 * noise
        sizes = [n for *_, n in intervals]
        order = torch.arange(len(x))
        if self.partition == "iid":
            order = torch.randperm(len(x), generator=generator_for(self.data_seed, "partition"))
        parts = order.split(sizes if self.partition != "pooled" else len(x))
        every = TensorDataset(x, y)
        train = {f"client-{k}": TensorDataset(x[part], y[part]) for k, part in enumerate(parts)}
        return ClientData(train=train, val=every, test=every)
