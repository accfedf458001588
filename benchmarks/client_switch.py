"""Switching to a client and merging it, against one memory copy of its parameters (FedAvg, optimizer reset).

OMP_NUM_THREADS=1 python benchmarks/client_switch.py --output benchmarks/results/client_switch.md
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lit_epgan.engine.workplace import optimized_parameters
from side_by_side import interleaved, markdown, options, publish
from torch import Tensor, nn

from lit_epgan.engine import Federation, FlatParameters, Round, Seat, Server, Sum, Weighted, Workplace
from lit_epgan.engine.aggregation import GROUP
from lit_epgan.engine.attributes import Attributes
from lit_epgan.engine.messages import is_finite
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.networks import AlgorithmNetworks
from lit_epgan.engine.optimizer_state import OptimizerStates
from lit_epgan.federated import FedAvg
from lit_epgan.randomness import seed_streams

LAYERS = 8
CLIENTS = GROUP  # of a round


class Wide(nn.Module):
    """LAYERS square layers with ``parameters`` weights in all."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        width = round((parameters / LAYERS) ** 0.5)
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def no_data(client: int, round_: int) -> Iterator[Any]:
    """Nobody trains here."""
    return iter(())


def no_gradient(batches: Iterator[Any]) -> Tensor:
    """Nobody asks for one."""
    raise NotImplementedError


def federation(module: Wide, optimizer: torch.optim.Optimizer) -> tuple[Federation, Seat]:
    """The server's side and the seat, as the callback builds them."""
    algorithm, flat = FedAvg(), FlatParameters.of(module)
    networks = AlgorithmNetworks(algorithm, module, flat.vector, 0)
    tensors, names = ModuleState(module, flat.names), [f"client-{k}" for k in range(CLIENTS)]
    place = Workplace(
        module,
        flat,
        optimized_parameters([optimizer], flat),
        tensors,
        networks,
        OptimizerStates([optimizer], [], "reset"),
        Attributes(module),
        no_data,
        no_gradient,
        no_gradient,
    )
    place.optimizers.round_begins()
    server = Server(flat.vector.clone(), flat, module, CLIENTS, 0)
    served = Federation(algorithm, server, tensors, networks, names, list(range(CLIENTS)))
    return served, Seat(algorithm, place, names, 0)


class Switching:
    """Client after client of one round, without their local steps."""

    def __init__(self, parameters: int) -> None:
        self.module = Wide(parameters)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-3)
        self.federation, self.seat = federation(self.module, self.optimizer)
        self.round, self.private = Round(self.federation, 0), self.federation.private
        self.server = self.federation.server
        self.switched = 0
        self.copied = torch.empty_like(self.server.parameters)
        self.sum = Sum()

    def used_optimizer(self) -> None:
        """Adam's state as a client's steps would have left it."""
        for parameter in self.module.parameters():
            moments = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}
            self.optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}

    def switch(self) -> None:
        """Merge the client at work, take up the next."""
        client, answer = self.seat.client, self.seat.close()
        if client is not None and answer is not None:
            self.round.receive(client.index, answer)
        k = self.switched % CLIENTS
        private = self.private.take_up(self.federation.names[k])
        self.seat.open(self.round.task(k, private.delivered), private, 1)
        self.seat.batch(None, 10.0)
        self.switched += 1

    def parts(self) -> dict[str, Callable[[], Any]]:
        flat = self.seat.place.flat
        return {
            "load the server's parameters": lambda: flat.load(self.server.parameters),
            "reset the optimizer": lambda: self.seat.place.optimizers.begin(None),
            "seed the random streams": lambda: seed_streams(1),
            "is the report finite?": lambda: is_finite({"parameters": flat.vector}),
            "add the report": lambda: self.sum.add(0, "parameters", Weighted(flat.vector, 10.0)),
        }

    def copy(self) -> None:
        self.copied.copy_(self.server.parameters)


@torch.no_grad()
def measure(parameters: int, rounds: int) -> list[object]:
    work = Switching(parameters)
    candidates: dict[str, Callable[[], Any]] = {"copy": work.copy, "switch": work.switch}
    candidates |= {"(prepare)": work.used_optimizer, "switch and free": work.switch, **work.parts()}
    times = interleaved(candidates, rounds * CLIENTS, group=CLIENTS)
    copy = times["copy"]
    parts = [f"{times[name] / copy:.2f}" for name in work.parts()]
    actual = work.seat.place.flat.numel / 1e6
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
