"""Points of a noisy parabola, an interval of it at each client: the FedNP paper's toy."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for

INTERVALS = ((-7.0, -5.0, 30), (-2.0, 2.0, 20), (4.0, 8.0, 50))  # from, to, points


def parabola(x: Tensor) -> Tensor:
    """-x^2 + 2x + 4."""
    return -x.square() + 2 * x + 4


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
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``warmup_steps``, ``clients_per_round``,
            ``num_workers``, ``seed`` and ``collate_fn`` of FederatedDataModule.

    Raises:
        UserError: an argument is out of its range.
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
        if not noise_variance >= 0:
            raise UserError(f"data.noise_variance is {noise_variance}; it must be 0 or more")
        if not 1 <= clients <= len(INTERVALS):
            raise UserError(f"The polynomial toy has between 1 and {len(INTERVALS)} clients, not {clients}.")
        if partition not in ("intervals", "iid", "pooled"):
            raise UserError(f"There is no partition {partition!r} here: choose intervals, iid or pooled.")
        self.noise_variance = noise_variance
        self.partition = partition
        self.clients_wanted = clients
        self.data_seed = self.seed if data_seed is None else data_seed

    def load(self) -> ClientData:
        """Draw the noise and deal the points out: x and y, float tensors (n, 1)."""
        intervals = INTERVALS[: self.clients_wanted]
        x = torch.cat([torch.linspace(low, high, n) for low, high, n in intervals])[:, None]
        noise = torch.randn(x.shape, generator=generator_for(self.data_seed, "noise"))
        y = parabola(x) + self.noise_variance**0.5 * noise
        sizes = [n for *_, n in intervals]
        order = torch.arange(len(x))
        if self.partition == "iid":
            order = torch.randperm(len(x), generator=generator_for(self.data_seed, "partition"))
        parts = order.split(sizes if self.partition != "pooled" else len(x))
        every = TensorDataset(x, y)
        train = {f"client-{k}": TensorDataset(x[part], y[part]) for k, part in enumerate(parts)}
        return ClientData(train=train, val=every, test=every)
