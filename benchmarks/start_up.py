"""Processor time to start: a few commands and imports, each in fresh processes, of this checkout and of an earlier one.

git worktree add ../before COMMIT
OMP_NUM_THREADS=1 python benchmarks/start_up.py --before ../before --output benchmarks/results/start_up.md
"""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from side_by_side import markdown, options, publish

ROOT = Path(__file__).parent.parent
COMMANDS = {
    "`--version`": ["-m", "lit_epgan", "--version"],
    "`--help`": ["-m", "lit_epgan", "--help"],
    "`fit --config toy.yaml --print_config`": ["-m", "lit_epgan", "fit", "--config", "toy.yaml", "--print_config"],
    "`inspect --help`": ["-m", "lit_epgan", "inspect", "--help"],
    "`import lit_epgan.callbacks`": ["-c", "import lit_epgan.callbacks"],
    "Lightning alone: `import lightning.pytorch.cli`": ["-c", "import lightning.pytorch.cli"],
}


def processor_seconds(words: list[str], checkout: Path) -> float:
    """User and system time of one process with the package of ``checkout``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    subprocess.run([sys.executable, *words], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--before", type=Path, default=ROOT, help="a checkout of an earlier commit")
    parser.add_argument("--commands", type=int, default=len(COMMANDS), help="only the first so many")
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    checkouts = {"before": args.before.resolve(), "now": ROOT}
    commands = dict(list(COMMANDS.items())[: args.commands])
    seconds: dict[tuple[str, str], list[float]] = {(c, place): [] for c in commands for place in checkouts}
    for _ in range(args.repeats):
        for (command, place), found in seconds.items():
            found.append(processor_seconds(commands[command], checkouts[place]))
    rows = []
    for command in commands:
        before, now = (statistics.median(seconds[command, place]) for place in checkouts)
        rows.append([command, f"{before:.2f}", f"{now:.2f}", f"{now / before:.2f}"])
    notes = f"Medians of {args.repeats} fresh processes each, in turn. Bar: half of what it was."
    header = ["", "before, s", "now, s", "**ratio**"]
    publish(markdown("Processor time to start", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
