"""Switching to a client and merging it, against one memory copy of its parameters (FedAvg, optimizer reset).

OMP_NUM_THREADS=1 python benchmarks/client_switch.py --output benchmarks/results/client_switch.md
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from side_by_side import interleaved, markdown, options, publish
from torch import nn

from lit_epgan.callbacks.algorithm_networks import AlgorithmNetworks
from lit_epgan.callbacks.local_state import ModuleTensors, Optimizers
from lit_epgan.callbacks.round import Round, Workplace
from lit_epgan.callbacks.round_state import FederationState
from lit_epgan.datamodules.rounds import Mark
from lit_epgan.federated import FedAvg, FlatParameters, OptimizedParameters, Server
from lit_epgan.federated.report import GROUP, ReportSum, Weighted, is_finite
from lit_epgan.randomness import seed_streams

LAYERS = 8
CLIENTS = GROUP  # of a round


class Wide(LightningModule):
    """LAYERS square layers with ``parameters`` weights in all."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = round((parameters / LAYERS) ** 0.5)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def workplace(module: Wide, optimizer: torch.optim.Optimizer) -> Workplace:
    """Where clients work, as the callback builds it; a Trainer is only asked for its optimizers."""
    trainer = cast(Trainer, SimpleNamespace(optimizers=[optimizer], lr_scheduler_configs=[]))
    algorithm, flat = FedAvg(), FlatParameters.of(module)
    optimized = [OptimizedParameters(0, optimizer, flat, list(module.parameters()))]
    server = Server(flat.vector.clone(), flat, module, optimized, CLIENTS, seed=0)
    networks, state = AlgorithmNetworks(algorithm), FederationState(algorithm)
    names = [f"client-{k}" for k in range(CLIENTS)]
    state.attach(server, networks, names)
    tensors = ModuleTensors(module, (), "average")
    optimizers = Optimizers(trainer, "reset")
    return Workplace(algorithm, server, tensors, optimizers, networks, state, names, lambda client, round_: iter(()))


class Switching:
    """Client after client of one round, without their local steps."""

    def __init__(self, parameters: int) -> None:
        self.module = Wide(parameters)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)
        self.place = workplace(self.module, self.optimizer)
        self.round = Round(self.place, 0)
        self.switched = 0
        self.copied = torch.empty_like(self.place.server.parameters)
        self.sum = ReportSum()

    def used_optimizer(self) -> None:
        """Adam's state as a client's steps would have left it."""
        for parameter in self.module.parameters():
            moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def switch(self) -> None:
        """Merge the client at work, take up the next."""
        self.round._close()
        self.round._open(Mark(self.switched % CLIENTS, 0, True, True, 1, 10.0))
        self.switched += 1

    def parts(self) -> dict[str, Callable[[], Any]]:
        vector = self.place.server.flat.vector
        return {
            "load the server's parameters": lambda: self.place.server.flat.load(self.place.server.parameters),
            "reset the optimizer": lambda: self.place.optimizers.begin(None),
            "seed the random streams": lambda: seed_streams(1),
            "is the report finite?": lambda: is_finite({"parameters": vector}),
            "add the report": lambda: self.sum.add({"parameters": Weighted(vector, 10.0)}),
        }

    def copy(self) -> None:
        self.copied.copy_(self.place.server.parameters)


@torch.no_grad()
def measure(parameters: int, rounds: int) -> list[object]:
    work = Switching(parameters)
    candidates: dict[str, Callable[[], Any]] = {"copy": work.copy, "switch": work.switch}
    candidates |= {"(prepare)": work.used_optimizer, "switch and free": work.switch, **work.parts()}
    times = interleaved(candidates, rounds * CLIENTS, group=CLIENTS)
    copy = times["copy"]
    parts = [f"{times[name] / copy:.2f}" for name in work.parts()]
    actual = work.place.server.flat.numel / 1e6
    ratios = [f"{times[name] / copy:.2f}" for name in ("switch", "switch and free")]
    return [f"{actual:.1f} M", f"{copy * 1e3:.3f}", f"{times['switch'] * 1e3:.3f}", *ratios, *parts]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 4, 16], help="millions of parameters")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    header = ["parameters", "copy, ms", "switch and merge, ms", "**ratio**", "with Adam's state to free"]
    header += Switching(LAYERS).parts()
    rows = [measure(size * 10**6, args.rounds) for size in args.sizes]
    notes = (
        f"Medians of {args.rounds} rounds of {CLIENTS} clients, interleaved; all but the times in units of the copy. "
        "Adam's moments are twice the parameters; giving them back to the system is part of a reset. "
        "Bar: a ratio of at most 3."
    )
    publish(markdown("Switching to a client and merging it, against one memory copy", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
