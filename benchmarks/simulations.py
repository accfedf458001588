"""FedAvg simulated, 10 to 1,000 clients a round: processor time and memory beside Flower's simulation and Apple's pfl.

pip install --target PEERS -r benchmarks/requirements-peers.txt
export OMP_NUM_THREADS=1 PYTHONPATH=.:PEERS
python benchmarks/simulations.py --repeats 1 --output benchmarks/results/simulations.md
    --models "MLP 3k" "MLP 50k" --clients 100 --output benchmarks/results/simulations_calm.md

Where a peer is not installed, its rows are left out, and the notes say so. Linux only: memory is read from /proc.
"""

import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from side_by_side import markdown, options, publish
from simulation_task import MODELS, RATE, STEPS, Task, Watch, memory
from simulators import SIMULATORS

NEEDS = {"pfl": "pfl", "Flower": "flwr"}
OURS = ["plain driver", "plain driver, vectorized", "Trainer", "Trainer, side_by_side"]
ONE = [(name, 1) for name in ["bare loop", *OURS, "Trainer alone", "pfl"]]
TWO = [(name, 2) for name in ["bare loop", *OURS, "pfl", "Flower"]]
TASKS = {  # rounds of each
    Task("MLP 3k"): 8,
    Task("MLP 50k"): 8,
    Task("MLP 500k"): 4,
    Task("MLP 5M"): 2,
    Task("CNN 29k"): 3,
    Task("MLP 50k", 10): 20,
    Task("MLP 50k", 1000): 3,
}
Candidate = tuple[str, int]  # a simulator, its processes


@dataclass
class Seen:
    """What repetitions of one candidate gave: quickest rounds / s, processor seconds of a round, bytes, accuracy."""

    speeds: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    accuracy: float = 0.0
    first: torch.Tensor | None = None


def work(simulator: str, task: Task, rounds: int, result: Path) -> None:
    """One simulation, in a process of its own."""
    torch.set_num_threads(1)
    watch = Watch()
    network = SIMULATORS[simulator](task, rounds, watch)
    watch.publish(result, network, *task.test)


def simulate(candidate: Candidate, task: Task, rounds: int, seen: Seen) -> None:
    """Start the candidate's processes, watch their memory, and read what they measured; round 1 warms up."""
    simulator, processes = candidate[0], 1 if candidate[0] == "Flower" else candidate[1]
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        result = Path(folder) / "result"
        words = [sys.executable, __file__, "--simulator", simulator, "--models", task.model]
        words += ["--clients", str(task.clients), "--rounds", str(rounds)]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "simulation"}
        running = []
        for number in range(processes):
            ranked = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(processes)}
            env = os.environ | (meeting | ranked if processes > 1 else {})
            with (Path(folder) / f"log.{number}").open("wb") as log:
                words_of_rank = [*words, "--result", str(result)]
                running.append(subprocess.Popen(words_of_rank, env=env, stdout=log, stderr=log, cwd=folder))
        peak = 0
        while any(process.poll() is None for process in running):
            peak = max(peak, sum(memory(process.pid) for process in running))
            time.sleep(1)
        if any(process.returncode for process in running):
            raise SystemExit((Path(folder) / "log.0").read_text(encoding="utf-8", errors="replace")[-3000:])
        told = [json.loads(result.with_suffix(f".{k}.json").read_text(encoding="utf-8")) for k in range(processes)]
        seen.first = torch.load(result.with_suffix(".0.pt"))
    ended = told[0]["ended"]
    seen.speeds.append(1 / min(later - earlier for earlier, later in pairwise(ended)))
    seen.processor.append(sum(each["worked"][-1] - each["worked"][0] for each in told) / (rounds - 1))
    seen.bytes.append(peak)
    seen.accuracy = told[0]["accuracy"]


def ratio(own: list[float], other: list[float]) -> str:
    """Median and range of the repetitions' ratios."""
    ratios = [a / b for a, b in zip(own, other, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"


def difference(seen: Seen, base: Seen) -> str:
    """Largest relative difference of the model after one round to the bare loop's."""
    assert seen.first is not None
    assert base.first is not None
    return f"{float((seen.first - base.first).abs().max() / base.first.abs().max()):.0e}"


def rows_of(task: Task, seen: dict[Candidate, Seen]) -> list[list[str]]:
    """One row for each candidate; ratios are to candidates with as many processes."""
    found = []
    for (simulator, processes), own in seen.items():
        base = seen["bare loop", processes]
        cells = [f"{statistics.median(own.speeds):.2f}", f"{statistics.median(own.processor):.2f}"]
        cells += [f"{max(own.bytes) / 1e6:.0f}", ratio(own.speeds, base.speeds), ratio(base.processor, own.processor)]
        for peer in NEEDS:
            there = seen.get((peer, processes))
            cells += [ratio(own.speeds, there.speeds), ratio(there.processor, own.processor)] if there else ["", ""]
        same = "another" if simulator == "Trainer alone" else difference(own, base)
        found.append([task.model, f"{task.clients:,}", str(processes), simulator, *cells, same, f"{own.accuracy:.3f}"])
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100, 1000], help="of a round")
    parser.add_argument("--rounds", type=int, help="of one simulation; the first warms up")
    parser.add_argument("--simulators", nargs="+", default=list(SIMULATORS), help="beside the bare loop")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--simulator", choices=list(SIMULATORS), help="run this one alone, for --result")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    if args.simulator:
        work(args.simulator, Task(args.models[0], args.clients[0]), args.rounds, args.result)
        return
    missing = [peer for peer, package in NEEDS.items() if importlib.util.find_spec(package) is None]
    there = {"bare loop", *args.simulators} - set(missing)
    tasks = [task for task in TASKS if task.model in args.models and task.clients in args.clients]
    seen = {task: {each: Seen() for each in [*ONE, *TWO] if each[0] in there} for task in tasks}
    for repeat in range(args.repeats):
        for task, candidates in seen.items():
            for candidate, own in candidates.items():
                simulate(candidate, task, args.rounds or TASKS[task], own)
        publish(table(seen, repeat + 1, missing), args.output)


def table(seen: dict[Task, dict[Candidate, Seen]], repeats: int, missing: list[str]) -> str:
    """What so many repetitions have shown."""
    header = ["model", "clients", "processes", "simulator", "rounds / s", "processor s a round", "MB at most"]
    header += ["**speed to the bare loop's**", "in processor time", "**speed to pfl's**", "in processor time"]
    header += ["**speed to Flower's**", "in processor time", "difference after round 1", "accuracy"]
    notes = (
        f"FedAvg, all clients in every round, {STEPS} local steps of SGD at {RATE:g}; a model is named by its "
        "parameters. Every simulation has processes of its own (Flower: its server and Ray's, two actors); medians of "
        f"{repeats} interleaved ones, ranges in brackets. Bars, in processor time: vectorized at least 8 times pfl's "
        "speed at 3k, twice at 50k, ten times Flower's, never slower than the bare loop; the plain driver without it "
        "at least pfl's / 1.3. Rounds / s are those of a simulation's quickest round, as others use the machine; "
        "processor time is that of all rounds but the first, and depends less on them (but for Flower's, whose "
        "processes work while they wait). Memory is the proportional "
        "set size of all processes. The difference is the largest of any parameter to the bare loop's, relative to the "
        "largest parameter. `Trainer alone` trains the same batches in Lightning's own loop without a federation. Load "
        f"average of the machine, which has {os.cpu_count()} cores: {os.getloadavg()[2]:.1f}."
    )
    if missing:
        notes += f" Not installed: {', '.join(missing)}."
    rows = [row for task, candidates in seen.items() for row in rows_of(task, candidates)]
    return markdown("Simulations of 10 to 1,000 clients a round", header, rows, notes)


if __name__ == "__main__":
    main()
