"""What 10 and 1,000 institutions with the papers' networks need: bytes, hours on the line, the server's memory, work.

OMP_NUM_THREADS=1 python benchmarks/institution_costs.py --output benchmarks/results/institution_costs.md

The bytes are those of encoded messages, the seconds and the memory those of a server that takes in such reports; the
rest is arithmetic.
"""

import importlib
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from side_by_side import markdown, options, publish
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Answer, PlainFederation, Round
from lit_epgan.engine.runner import WEIGHT
from lit_epgan.engine.wire import decode_answer, encode_answer, encode_task
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.runs.config_files import config_folders

CONFIGS = config_folders()[-1]  # the package's own, installed or not
RATES = (10, 100, 1000)  # Mbit/s
FEDERATIONS = (10, 1000)
ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "FedAvg": FedAvg,
    # a prior that stays proper whatever sites are taken in again and again
    "EP": lambda: ExpectationPropagation(prior_scale=1.0, prior_precision=1e6),
    "tied EP": lambda: ExpectationPropagation(prior_scale=1.0, prior_precision=1e6, tied=True),
}


class Paper(NamedTuple):
    """A paper's model: what it is built of, and for how many rounds it was trained."""

    networks: list[tuple[str, str, dict[str, Any]]]  # configuration, path of the network in it, what is the paper's
    rounds: int


WORDS = {"symbols": 10_003, "hidden": 670, "embedding": 96}
PAPERS = {
    "EP-GAN's DCGANs, CIFAR-10": Paper(
        [("cifar.yaml", "model.init_args.generator", {}), ("cifar.yaml", "model.init_args.discriminator", {})], 25
    ),
    "EP-GAN's SRU-HMM": Paper([("speech.yaml", "model.init_args.network", {"hidden": 1280, "layers": 12})], 12),
    "DP-FedAvg-GAN's CIFG-LSTM": Paper([("docstrings_words.yaml", "model.init_args.network", WORDS)], 2000),
}


class Cost(NamedTuple):
    """What was measured: of one client and round in bytes and processor seconds, of the server in bytes."""

    parameters: int
    down: int
    up: int
    seconds: float
    memory: int


def network(config: str, path: str, papers: dict[str, Any], small: bool) -> nn.Module:
    """The network that a configuration names, with the paper's sizes."""
    settings: Any = yaml.safe_load((CONFIGS / config).read_text(encoding="utf-8"))
    for word in path.split("."):
        settings = settings[word]
    room, _, name = settings["class_path"].rpartition(".")
    sizes = settings["init_args"] | papers
    if small:
        sizes |= {k: 8 for k in ("width", "hidden", "embedding", "projection") if k in sizes}
    built: nn.Module = getattr(importlib.import_module(room), name)(**sizes)
    return built


def squares(module: nn.Module, batch: Any) -> Tensor:
    """A loss () of nothing but parameters: what the messages hold does not matter here."""
    return torch.stack([p.square().sum() for p in module.parameters()]).sum()


def resident(entry: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(entry))


def federation(paper: str, algorithm: str, small: bool) -> PlainFederation:
    """The paper's model under an algorithm, for two clients."""
    torch.manual_seed(0)
    module = nn.ModuleList(network(*each, small) for each in PAPERS[paper].networks)
    return PlainFederation(
        ALGORITHMS[algorithm](),
        module,
        squares,
        lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        lambda k, round_: [(torch.zeros(1),)],
        [1.0, 1.0],
    )


def messages(paper: str, algorithm: str, small: bool) -> tuple[int, int, int, bytes]:
    """Parameters, bytes down and up of a client in the second round, and an answer of it."""
    torch.set_num_threads(1)
    plain = federation(paper, algorithm, small)
    plain.round(0)
    plain.model.optimizers.round_begins()
    plain.model.attributes.round_begins()
    round_ = Round(plain.federation, 1)
    private = plain.federation.private.take_up("client-0")
    task = round_.task(0, private.delivered)
    down, answer = len(encode_task(task)), encode_answer(plain.answer(task, private))
    return plain.server.flat.numel, down, len(answer), answer


def server(paper: str, algorithm: str, small: bool, answer: bytes, reports: int) -> tuple[float, int]:
    """Processor seconds of one report, and bytes of a server that takes in so many, one after another.

    The server is a process of its own, the answers are decoded as they come, and nobody trains here. Its first round,
    without which EP would ask for normalisers, is made of the same answers.
    """
    torch.set_num_threads(1)
    before = resident("VmRSS")
    plain = federation(paper, algorithm, small)
    for number in range(2):
        round_ = Round(plain.federation, number)
        start = time.process_time()
        while round_.exchange is not None:
            for k in list(round_.asked):
                for _ in range(reports // len(round_.asked)):
                    report = dict(decode_answer(answer).report)
                    if not round_.exchange.training:
                        del report[WEIGHT]  # of the module's buffers, which come with a training alone
                    round_.receive(k, Answer(report, plain.federation.private.take_up("client-0")))
            round_.close()
        seconds = time.process_time() - start
    return seconds / reports, resident("VmHWM") - before


def measured(paper: str, algorithm: str, small: bool, reports: int) -> Cost:
    """One network under one algorithm, the clients and the server each in a process of its own."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lit_epgan.federated", "lit_epgan.networks", "safetensors.torch"])
    with ProcessPoolExecutor(1, context) as process:
        parameters, down, up, answer = process.submit(messages, paper, algorithm, small).result()
    with ProcessPoolExecutor(1, context) as process:
        seconds, memory = process.submit(server, paper, algorithm, small, answer, reports).result()
    return Cost(parameters, down, up, seconds, memory)


def hours(count: float, rate: int) -> float:
    """Hours of ``count`` bytes at ``rate`` Mbit/s."""
    return count * 8 / (rate * 1e6) / 3600


def row(paper: str, algorithm: str, cost: Cost) -> list[str]:
    """What was measured, and what follows for the papers' rounds."""
    rounds = PAPERS[paper].rounds
    both = (cost.down + cost.up) * rounds
    cells = [paper, algorithm, f"{cost.parameters / 1e6:.2f}", f"{cost.down / 1e6:.1f}", f"{cost.up / 1e6:.1f}"]
    cells += [str(rounds), " / ".join(f"{hours(both, rate):.2g}" for rate in RATES)]
    for institutions in FEDERATIONS:
        cells.append(" / ".join(f"{hours(both * institutions, rate):.2g}" for rate in RATES))
        cells.append(f"{cost.seconds * institutions * rounds / 3600:.2g}")
    return [*cells, f"{cost.memory / 1e6:.0f}"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--reports", type=int, default=20, help="taken in by the measured server in a round, even")
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--small", action="store_true", help="widths of 8, to see that all of it runs")
    args = parser.parse_args()
    rates = " / ".join(map(str, RATES))
    header = ["network", "algorithm", "million parameters", "MB down", "MB up", "rounds"]
    header.append(f"an institution's hours on its line at {rates} Mbit/s")
    for institutions in FEDERATIONS:
        header += [f"the server's with {institutions:,} institutions", "its processor's hours"]
    header.append("its memory, MB")
    notes = (
        "MB are those of one client and round, encoded as they travel, from the second round on. Hours on the line are "
        "those of all rounds, both ways one after the other; the server's line carries all institutions' messages. It "
        f"takes in {args.reports} reports one after another; its memory is the largest of its process, beyond "
        "Python and its libraries: it holds the model, the state, sums and one report, and does not grow with the "
        "number of reports. The institutions' training is not in it."
    )
    rows: list[list[str]] = []
    for paper in PAPERS:
        for algorithm in args.algorithms:
            rows.append(row(paper, algorithm, measured(paper, algorithm, args.small, args.reports)))
            publish(markdown("What institutions with the papers' networks need", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
