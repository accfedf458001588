"""What messages of half size change: the error of one round's sum, and the accuracy on digits at the end.

OMP_NUM_THREADS=1 python benchmarks/half_messages.py --output benchmarks/results/half_messages.md

Tasks and answers are written as bytes and read back, whole or halved, in one process.
"""

import csv
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from side_by_side import markdown, options, publish
from torch import Tensor

from lit_epgan.cli.main import main as command
from lit_epgan.engine import Round, Task
from lit_epgan.engine.wire import decode_answer, decode_task, encode_answer, encode_task
from lit_epgan.lib import tensor_file
from lit_epgan.runs.checkpoints import newest_whole

CONFIG = "digits_classifier.yaml"
ALGORITHMS = {
    "FedAvg": [],
    "SCAFFOLD": ["--config", "algorithms/scaffold.yaml"],
    "EP with Laplace": ["--config", "algorithms/ep_laplace.yaml"],
}


@contextmanager
def carried(half: bool, count: list[int]) -> Iterator[None]:
    """Within, all messages go through bytes, whose number is added to ``count``."""
    task, receive = Round.task, Round.receive

    def sent(round_: Round, client: int, *more: Any, **options: Any) -> Task:
        whole = task(round_, client, *more, **options)
        data = encode_task(Task(**vars(whole) | {"known": frozenset()}), half)
        count[0] += len(data)
        return decode_task(data, {})

    def taken(round_: Round, client: int, answer: Any, *more: Any) -> None:
        data = encode_answer(answer, half)
        count[0] += len(data)
        answer.report = decode_answer(data).report
        receive(round_, client, answer, *more)

    with mock.patch.object(Round, "task", sent), mock.patch.object(Round, "receive", taken):
        yield


def trained(words: list[str], rounds: int, seed: int, half: bool) -> tuple[Tensor, float, int]:
    """The server's parameters, the accuracy on the test images, and the bytes of all messages."""
    count = [0]
    with tempfile.TemporaryDirectory() as made, carried(half, count):
        more = ["--trainer.max_epochs", str(rounds), "--seed_everything", str(seed)]
        code = command(["fit", "--config", CONFIG, *words, *more, "--trainer.default_root_dir", made])
        assert code == 0
        *_, last = csv.DictReader((Path(made) / "metrics.csv").open())
        state = tensor_file.load(newest_whole(Path(made) / "checkpoints"))["state_dict"]
    return torch.cat([value.flatten().double() for value in state.values()]), float(last["accuracy"]), count[0]


def row(words: list[str], rounds: int, seeds: int) -> list[str]:
    """The error of the first round, relative to the norm of its step; accuracies and bytes after all rounds."""
    errors, gaps, ends, sizes = [], [], [], []
    for seed in range(seeds):
        start, _, _ = trained([*words, "--model.init_args.optimizer.init_args.lr", "1e-30"], 1, seed, False)
        first = [trained(words, 1, seed, half)[0] for half in (False, True)]
        errors.append(float((first[1] - first[0]).norm() / (first[0] - start).norm()))
        exact, halved = (trained(words, rounds, seed, half) for half in (False, True))
        gaps.append(halved[1] - exact[1])
        ends.append(exact[1])
        sizes.append(halved[2] / exact[2])
    deviation = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    told = [f"{statistics.mean(errors):.1e}", f"{max(errors):.1e}", f"{statistics.mean(ends):.4f}"]
    return [*told, f"{statistics.mean(gaps):+.4f} ± {deviation:.4f}", f"{statistics.mean(sizes):.2f}"]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS))
    args = parser.parse_args()
    header = [
        "algorithm",
        "error of the first round's step, mean",
        "largest",
        "accuracy, whole",
        "halved - whole",
        "bytes",
    ]
    notes = (
        f"`{CONFIG}`, {args.rounds} rounds, {args.seeds} seeds. The error is |halved - whole| / |whole - start| of the "
        "server's parameters after one round. The difference of accuracies is paired by seeds, with its "
        "standard error. Bytes are of halved messages per byte of whole ones."
    )
    rows = [[name, *row(ALGORITHMS[name], args.rounds, args.seeds)] for name in args.algorithms]
    publish(markdown("Messages of half size", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
