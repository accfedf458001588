"""Ten rounds of a federation of eight institutions, two of which are killed, and one of these started again.

Nine processes on this machine, the server's and one for each institution, which share nothing but sockets. The table
says who contributed when: the server's own list, contributions.csv.

python benchmarks/killed_institutions.py --output benchmarks/results/killed_institutions.md
"""

import argparse
import csv
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from side_by_side import markdown, options, publish

from lit_epgan.carriers.fit import QUIET
from lit_epgan.carriers.protocol import Endpoint
from lit_epgan.cli.study_runner import Process, start

KILLED, AGAIN = ("client-1", "client-2"), "client-2"


def started(folder: Path, where: Endpoint, args: argparse.Namespace, *words: str) -> Process:
    """A fit as one end of the federation."""
    settings = {
        "--data.clients": args.institutions,
        "--data.local_steps": args.steps,
        "--trainer.max_epochs": args.rounds,
        "--trainer.default_root_dir": folder / (where.name or "server"),
    }
    given = [str(word) for pair in settings.items() for word in pair]
    command = [sys.executable, "-m", "lit_epgan", "fit", "--config", "digits_classifier.yaml", *given, *words]
    return start(command, folder / f"{where.name or 'server'}.log", append=True, variables=where.environment())


def rounds_done(folder: Path) -> int:
    """How many rounds the server has listed."""
    path = folder / "server" / "contributions.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    return 1 + max((int(row["round"]) for row in rows), default=-1)


def wait_for_round(folder: Path, number: int, server: Process) -> None:
    while rounds_done(folder) < number:
        if server.poll() is not None:
            raise SystemExit(f"the server has ended: {(folder / 'server.log').read_text()}")
        time.sleep(0.02)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--institutions", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2000, help="of an institution in a round")
    args = parser.parse_args()
    quiet = [word for key, value in QUIET.items() for word in (f"--trainer.{key}", value)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        key, address = secrets.token_hex(32), str(folder / "link")
        server = started(folder, Endpoint("server", address, key), args, "--trainer.logger", "false")
        places = [Endpoint("institution", address, key, f"client-{k}") for k in range(args.institutions)]
        processes = {each.name: started(folder, each, args, *quiet) for each in places}
        begun = time.monotonic()
        try:
            wait_for_round(folder, 2, server)
            for each in KILLED:
                os.kill(processes[each].pid, signal.SIGKILL)
            wait_for_round(folder, 3, server)
            again = next(each for each in places if each.name == AGAIN)
            processes[AGAIN] = started(folder, again, args, *quiet, "--ckpt_path", "last")
            code = server.wait()
        finally:
            for process in (server, *processes.values()):
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
        seconds = time.monotonic() - begun
        rows = list(csv.DictReader((folder / "server" / "contributions.csv").open()))
    publish(report(args, rows, code, seconds), args.output)


def report(args: argparse.Namespace, rows: list[dict[str, str]], code: int, seconds: float) -> str:
    """A row for each institution, a column for each round."""
    marks = {(row["client"], int(row["round"])): "yes" if row["counted"] == "1" else row["why"] for row in rows}
    names = list(dict.fromkeys(row["client"] for row in rows))
    table = [[name, *(marks[name, number] for number in range(args.rounds))] for name in names]
    sent = sum(int(row["bytes"]) for row in rows)
    return markdown(
        "Institutions killed and started again",
        ["institution", *(str(number) for number in range(args.rounds))],
        table,
        f"digits_classifier.yaml, {args.institutions} institutions, {args.rounds} rounds of {args.steps} steps. "
        f"{' and '.join(KILLED)} were killed after round 1, and {AGAIN} was started again a round later, from its own "
        f"checkpoint. The server ended with {code}, after {seconds:.0f} seconds; {sent:,} bytes of answers came. Whose "
        "update counted in a round, or why not.",
    )


if __name__ == "__main__":
    main()
