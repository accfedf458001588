"""The fault of ``joined_tokens.py`` by a language model under a guarantee, and how many users that takes.

A character model learns the words outside a vocabulary of 10,000 words. A fault has joined the first two words of a
share of the sentences. Found it is where the share of joined words that the model makes exceeds a bound, which models
without the fault pass with a probability of 1 % (a normal variable's next value, and at least 1 %).

Every user takes part in every round, which is the least noise on a coordinate of the mean that epsilon allows. It is
simulated with 10 users a round and as much less noise. Those who hold no word outside the vocabulary report zeros: z is
that of all users, and the mean that of those who hold some. Fewer users are simulated by more noise. All shares are
tried with the most users, and the fault in all sentences with fewer.

OMP_NUM_THREADS=1 python -m evidence.joined_tokens_guarantee --seeds 5 \\
    --output evidence/results/joined_tokens_guarantee.md
"""

import argparse
import json
import multiprocessing
import statistics
import sysconfig
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.side_by_side import markdown, options, publish
from evidence.detection import bound, least, power, surely, told
from evidence.joined_tokens import COHORT, MADE, trained
from lit_epgan.datamodules.text import docstrings
from lit_epgan.privacy import Releases, noise_multiplier_for

DELTA = 1e-5
EPSILONS = (1.0, 2.0, 4.0, 8.0)
ALL = 705  # the modules
USERS = (705, 500, 400, 300, 200, 100)
SHARES = (1.0, 0.3, 0.1, 0.03, 0.01)  # with the most users; 1.0 with fewer
LEAST_ALARM = 0.01


class Run(NamedTuple):
    """One model."""

    users: int
    share: float
    epsilon: float
    seed: int


def noise(users: int, z: float, holders: int) -> float:
    """The simulation's noise multiplier, of which ``holders`` of ALL have words, as of ``users`` users."""
    return COHORT * z / (holders * users / ALL)


def measured(rounds: int, run: Run) -> tuple[float, float, list[str], float]:
    """The share of joined words that a model makes, that of the users' words, the likeliest words, and seconds."""
    z = noise_multiplier_for(run.epsilon, DELTA, lambda z: [Releases(z, rounds)])
    found = trained("characters", run.share, rounds, run.seed, partial(noise, run.users, z))
    return found["made"].share, found["held"], found["top"][:4], found["seconds"]


def kept(path: Path | None) -> dict[Run, tuple]:
    """What an earlier call has finished."""
    lines = path.read_text().splitlines() if path and path.is_file() else []
    return {Run(*run): tuple(found) for run, found in map(json.loads, lines)}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--users", type=int, nargs="*", default=USERS)
    parser.add_argument("--shares", type=float, nargs="*", default=SHARES)
    parser.add_argument("--epsilons", type=float, nargs="*", default=EPSILONS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", type=Path, help="finished runs: goes on with them, and shows all")
    args = parser.parse_args()
    docstrings(Path(sysconfig.get_paths()["stdlib"]))  # once, before the processes part
    args.shares = sorted({1.0, *args.shares}, reverse=True)
    shares = {users: args.shares if users == max(args.users) else [1.0] for users in args.users}
    cases = [(u, share, e) for u in args.users for share in (0.0, *shares[u]) for e in args.epsilons]
    planned = [Run(*case, seed) for seed in range(args.seeds) for case in cases]
    results = kept(args.kept)
    wanted = [run for run in planned if run not in results]
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for run, found in zip(wanted, pool.imap(partial(measured, args.rounds), wanted), strict=True):
            results[run] = found
            if args.kept:
                with args.kept.open("a") as file:
                    file.write(json.dumps([run, found]) + "\n")
    publish(report(args, results), args.output)


def shown(word: str) -> str:
    """A word in a cell of a table, whatever bytes it has."""
    return "`" + ascii(word)[1:-1].replace("|", "\\x7c").replace("`", "\\x60") + "`"


def report(args: argparse.Namespace, results: dict[Run, tuple]) -> str:
    """The tables."""
    rows, powers = [], {}
    for users, share, epsilon in dict.fromkeys(run[:3] for run in results if run.share):
        faulty = [found for run, found in results.items() if run[:3] == (users, share, epsilon)]
        clean = [found[0] for run, found in results.items() if run[:3] == (users, 0.0, epsilon)]
        made, alarm = [found[0] for found in faulty], max(LEAST_ALARM, bound(clean))
        powers[users, share, epsilon] = power(made, alarm)
        hits = sum(each > alarm for each in made)
        rows.append([f"{epsilon:g}", users, f"{share:.0%}", f"{statistics.fmean(f[1] for f in faulty):.2f}",
                     told(made), told(clean), f"{alarm:.2f}", f"{hits} of {len(made)}",
                     surely(hits, len(made)), f"{powers[users, share, epsilon]:.0%}",
                     ", ".join(map(shown, faulty[0][2])),
                     f"{statistics.fmean(f[3] for f in faulty):.0f}"])  # fmt: skip
    return markdown(
        "First tokens joined, by a language model under a guarantee",
        ["epsilon", "users", "sentences with the fault", "joined, of the users' words", "of the words made",
         "without the fault", "alarm above", "found", "power at least", "if normal", "the most probable", "seconds"],
        rows,
        f"Character model of 128 cells, {args.rounds} rounds, {MADE:,} words made. Delta "
        f"{DELTA:g}, one user's data emptied; everyone takes part in every round (Gaussian mechanism, exactly). "
        f"Simulated with {COHORT} users a round and the same noise on each coordinate of the mean of holders of words.",
    ) + least(powers, 1.0)  # fmt: skip


if __name__ == "__main__":
    main()
