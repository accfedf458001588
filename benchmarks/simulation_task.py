"""What every simulator of simulations.py is given: a model, clients' data, the order of their batches, a watch."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.datamodules.clients import index_batches

BATCH, STEPS, RATE, SEED = 20, 5, 0.1, 0
RECORDS = BATCH * STEPS  # of a client, read once a round
TEST = 2000


def mlp(pixels: int, hidden: int) -> nn.Module:
    """(pixels + 1) hidden + 10 (hidden + 1) parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, 10))


def cnn() -> nn.Module:
    """28,938 parameters, some forty times the arithmetic of an MLP of 50,890."""
    first = (nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 49, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP 3k": lambda: mlp(64, 40),
    "MLP 50k": lambda: mlp(784, 64),
    "MLP 500k": lambda: mlp(784, 640),
    "MLP 5M": lambda: mlp(784, 6400),
    "CNN 29k": cnn,
}


@dataclass(frozen=True)
class Task:
    """What is simulated.

    Attributes:
        model: one of ``MODELS``.
        clients: all of them take part in every round.
        device: holds the model and all records.
    """

    model: str
    clients: int = 100
    device: str = "cpu"

    @property
    def side(self) -> int:
        """Pixels of an image's side."""
        return 8 if self.model == "MLP 3k" else 28

    def network(self) -> nn.Module:
        """The same initial parameters for everybody."""
        torch.manual_seed(SEED)
        return MODELS[self.model]().to(self.device)

    @cached_property
    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        patterns = torch.randn(10, 1, self.side, self.side, generator=generator)

        def drawn(*shape: int) -> tuple[Tensor, Tensor]:
            labels = torch.randint(10, shape, generator=generator)
            noise = torch.randn(*shape, 1, self.side, self.side, generator=generator)
            return noise.mul_(self.side / 7).add_(patterns[labels]).to(self.device), labels.to(self.device)

        return (*drawn(self.clients, RECORDS), *drawn(TEST))

    @property
    def records(self) -> tuple[Tensor, Tensor]:
        """Ten noisy patterns: the clients' images (clients, records, 1, side, side) and labels (clients, records)."""
        return self._drawn[0], self._drawn[1]

    @property
    def test(self) -> tuple[Tensor, Tensor]:
        """Images (TEST, 1, side, side) and labels (TEST,)."""
        return self._drawn[2], self._drawn[3]

    def batches(self, client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A client's batches of a round: images (BATCH, 1, side, side), labels (BATCH,)."""
        (x, y), drawn = self.records, order(client, round_).to(self.device)
        return zip(x[client][drawn].split(BATCH), y[client][drawn].split(BATCH), strict=True)


def order(client: int, round_: int) -> Tensor:
    """The records (RECORDS,) of a client in the order in which its batches of a round read them."""
    batches = index_batches(RECORDS, BATCH, STEPS, 1, SEED, round_, client)
    return torch.tensor([index for batch in batches for index in batch])


def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy ()."""
    return F.cross_entropy(network(batch[0]), batch[1])


@torch.no_grad()
def accuracy(network: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of correct labels."""
    return float((network.eval()(x).argmax(1) == y).float().mean())


def rank() -> int:
    """This process's number among those of one simulation."""
    return int(os.environ.get("RANK", "0"))


def ranks() -> int:
    """How many processes share the clients."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass
class Watch:
    """When each round ended, and what the model was after the first.

    Attributes:
        ended: seconds of the clock at the end of each round.
        worked: processor seconds of this process and all that it started, then.
        first: the parameters after the first round, flat (d,).
    """

    ended: list[float] = field(default_factory=list)
    worked: list[float] = field(default_factory=list)
    first: Tensor | None = None

    def round_ended(self, parameters: list[Tensor]) -> None:
        """Note it."""
        if self.first is None:
            self.first = torch.cat([p.detach().flatten().clone() for p in parameters])
        if parameters[0].is_cuda:
            torch.cuda.synchronize()  # until the device has done all it was asked to
        self.ended.append(time.perf_counter())
        self.worked.append(sum(processor_seconds(pid) for pid in family(os.getpid())))

    def publish(self, path: Path, network: nn.Module, x: Tensor, y: Tensor) -> None:
        """Write what was seen beside the model after the first round, for the process that asked."""
        seen = {"ended": self.ended, "worked": self.worked, "accuracy": accuracy(network, x, y)}
        torch.save(self.first, path.with_suffix(f".{rank()}.pt"))
        path.with_suffix(f".{rank()}.json").write_text(json.dumps(seen), encoding="utf-8")


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def processor_seconds(pid: int) -> float:
    """What a process has used so far, its ended children included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> int:
    """Bytes that a process and its descendants hold, what they share counted once (proportional set size)."""
    total = 0
    for each in family(pid):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))
    return total
