"""FedAvg simulated on a GPU: many clients as one batched computation beside one after another, seconds of a round.

python benchmarks/gpu_simulation.py --output benchmarks/results/gpu_simulation.md

Runs on the CPU, too (--device cpu), but says something about a GPU only.
"""

import statistics
from collections import defaultdict
from itertools import pairwise

import torch
from side_by_side import markdown, options, publish
from simulation_task import MODELS, STEPS, Task, Watch
from simulators import SIMULATORS
from torch import Tensor

COMPARED = ("bare loop", "plain driver", "plain driver, vectorized")
TASKS = {"MLP 3k": [100, 1000], "MLP 50k": [100, 1000], "MLP 500k": [100], "MLP 5M": [100], "CNN 29k": [100, 1000]}


def seconds(simulator: str, task: Task, rounds: int) -> tuple[list[float], Tensor]:
    """Seconds of each round after the first, and the parameters after the first."""
    watch = Watch()
    SIMULATORS[simulator](task, rounds, watch)
    assert watch.first is not None
    return [later - earlier for earlier, later in pairwise(watch.ended)], watch.first


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--clients", nargs="+", type=int, default=[100, 1000], help="of a round")
    parser.add_argument("--rounds", type=int, default=4, help="of one simulation; the first warms up")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    rows: list[list[str]] = []
    for task in [Task(m, n, args.device) for m in args.models for n in TASKS[m] if n in args.clients]:
        rows += rows_of(task, args.rounds, args.repeats)
        publish(table(rows, args.device, args.repeats), args.output)


def rows_of(task: Task, rounds: int, repeats: int) -> list[list[str]]:
    """One row for each simulator."""
    seen, first = defaultdict[str, list[float]](list), dict[str, Tensor]()
    for _ in range(repeats):
        for simulator in COMPARED:
            spent, first[simulator] = seconds(simulator, task, rounds)
            seen[simulator].append(statistics.median(spent))
    bare = COMPARED[0]
    found = []
    for simulator, own in seen.items():
        ratios = [a / b for a, b in zip(seen[bare], own, strict=True)]
        apart = float((first[simulator] - first[bare]).abs().max() / first[bare].abs().max())
        speed = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        cells = [f"{statistics.median(own):.4f}", speed, f"{apart:.0e}"]
        found.append([task.model, f"{task.clients:,}", simulator, *cells])
    return found


def table(rows: list[list[str]], device: str, repeats: int) -> str:
    """What has been measured so far."""
    name = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else "CPU"
    notes = (
        f"{name}; FedAvg, all clients in every round, {STEPS} local steps of SGD; model and records lie on the device. "
        f"A model is named by its parameters. Medians of {repeats} interleaved simulations, whose figure is the median "
        "of their rounds but the first; ranges in brackets. The difference is the largest of any parameter to the bare "
        "loop's after a round, relative to the largest parameter."
    )
    header = ["model", "clients", "simulator", "seconds a round", "speed to the bare loop's"]
    header += ["difference after a round"]
    return markdown("Many clients on one device", header, rows, notes)


if __name__ == "__main__":
    main()
