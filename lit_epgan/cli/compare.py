"""``python -m lit_epgan compare``: what federation buys each client, beside training alone, in one place, and trees."""

import argparse
import csv
import html
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_epgan.cli.study_plan import OWN_KEY, Method
from lit_epgan.cli.study_run import CLI, Run, cli_command
from lit_epgan.cli.study_runner import Display, default_workers, run_all, say
from lit_epgan.lib.atomic import replacing, write_text
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import csv_cell, few, markup, mathtext, printable
from lit_epgan.runs.config_files import find_config
from lit_epgan.runs.lock import locked
from lit_epgan.runs.run_folder import CONFIG
from lit_epgan.runs.yaml_files import load_yaml

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from lit_epgan.datamodules import FederatedDataModule

RECORDS = "test_records.csv"
TITLES = {
    "alone": "each client alone",
    "pooled": "all in one place",
    "fedavg": "FedAvg",
    "fedyogi": "FedYogi",
    "noise": "FedAvg, records hidden (epsilon 3)",
    "trees": "bagged trees",
}
FEDERATED = ("fedavg", "fedyogi")
MOST_ALONE = 12  # clients that train alone
RESAMPLES = 1000
TREES = 200
WHOLE = "mean over clients"
HELD_OUT = "held-out data"


def compare(args: list[str]) -> int:
    """Run the methods on a configuration, and write the table, the picture and the page. Returns 0, or 1 if a run
    failed."""
    options, words = _parser().parse_known_args(args)
    if not options.config:
        raise UserError("compare needs a configuration: --config table_classifier.yaml, say.")
    at_least(1, "trees", min_samples_leaf=options.leaf)
    output, settings, console = _output(options), _settings(words), Console()
    with locked(output, "--output"):
        if failed := _train(_methods(options, settings, ["fedavg"]), options, console):
            return _told(failed)
        by_seed = {seed: data_of(output / "runs" / "fedavg" / f"seed-{seed}") for seed in options.seeds}
        data = by_seed[options.seeds[0]]
        records = {name: client.records or 0 for name, client in zip(data.client_names, data.clients, strict=True)}
        alone = sorted(records, key=lambda name: -records[name])[:MOST_ALONE]
        others = _methods(options, settings, ["pooled", "fedyogi", "noise", *alone], data.released)
        failed = _train(others, options, console)
        tested = _records(output, options.seeds, alone)
        if (trees := bagged_trees(by_seed, options.leaf)) is not None:
            tested["trees"] = trees
        report(tested, options.seeds, output, shlex.join(["python", "-m", "lit_epgan", "compare", *args]), console)
        return _told(failed) if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lit_epgan compare",
        description="Each client alone, all in one place, federated, with noise, and trees: a table by client. Other "
        "words are fit's, as --data.path, or one method's, as --noise.model.optimizer.lr (alone, pooled, fedavg, "
        "fedyogi, noise); stopped, it goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", "-c", action="append", help="as fit's, e.g. table_classifier.yaml")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of the runs, whose means are shown")
    parser.add_argument("--workers", type=int, default=default_workers(), help="runs at a time")
    parser.add_argument("--trees.min_samples_leaf", dest="leaf", type=int, default=3, help="records in a tree's leaf")
    parser.add_argument("--output", type=Path, help="folder of runs and page (default: runs/compare/NAME)")
    return parser


def _settings(words: list[str]) -> dict[str, str]:
    """``--KEY VALUE`` and ``--KEY=VALUE`` as a study's settings."""
    settings, rest = dict[str, str](), iter(words)
    for word in rest:
        key, equals, value = word.partition("=")
        if not key.startswith("--") or (not equals and (value := next(rest, "")) == ""):
            raise UserError(f"compare takes --KEY VALUE, as fit does, and {word!r} is none.")
        settings[key[2:]] = value
    return settings


def _methods(
    options: argparse.Namespace, given: Mapping[str, str], names: Sequence[str], released: str = ""
) -> list[Method]:
    """What is run: methods by their names in ``TITLES``; any other name is that of a client that trains alone.
    ``released`` is the data module's: what noise does not cover."""
    common = {key: value for key, value in given.items() if key.partition(".")[0] not in TITLES}
    own, ledger = [find_config(name) for name in options.config], _output(options) / "ledger.jsonl"
    noise = {"federation.mechanism.target_epsilon": 3, "federation.mechanism.ledger": str(ledger.absolute())}
    if released:
        noise["data.unprotected_sums"] = True
    extra: dict[str, tuple[list[str], dict[str, Any]]] = {
        "fedavg": ([], {}),
        "pooled": ([], {"data.trained_on": "pooled"}),
        "fedyogi": (["algorithms/fedyogi.yaml"], {}),
        "noise": (["algorithms/record_noise.yaml"], noise),
    }
    found, alone = [], 0
    for name in names:
        configs, settings = extra.get(name, ([], {"data.trained_on": name}))
        key = name if name in extra else f"alone-{alone}"
        alone += key != name
        first = f"{name if name in extra else 'alone'}."
        of_method = {key.removeprefix(first): value for key, value in given.items() if key.startswith(first)}
        settings = {**common, **settings, **of_method}
        said = {"config": [*own, *map(find_config, configs)], "set": settings, "title": name}
        found.append(TypeAdapter(Method).validate_python({OWN_KEY: key, **said}, by_alias=True, by_name=False))
    return found


def _output(options: argparse.Namespace) -> Path:
    output: Path = options.output or Path("runs") / "compare" / Path(options.config[-1]).stem
    return output


def _train(methods: Sequence[Method], options: argparse.Namespace, console: Console) -> list[Run]:
    runs = [Run(method, seed, _output(options) / "runs") for seed in options.seeds for method in methods]
    return run_all(runs, options.workers, Display(console), fit_and_test)


def fit_and_test(run: Run) -> list[str]:
    """The words of the process that trains a run and then tests it."""
    return [*CLI, "fit-and-test", *cli_command(run)[len(CLI) + 1 :]]


def _told(failed: Sequence[Run]) -> int:
    names = ", ".join(run.name for run in failed)
    print(f"error: runs failed: {printable(names)}. The same command goes on with them.", file=sys.stderr)
    return 1


def data_of(run: Path) -> "FederatedDataModule":
    """The data module of a run that its folder tells of, set up."""
    from jsonargparse import ArgumentParser
    from lightning.pytorch import LightningDataModule

    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int)
    parser.add_subclass_arguments(LightningDataModule, "data")
    parser.link_arguments("seed_everything", "data.init_args.seed")  # as fit does; the file does not say it
    content = {key: value for key, value in load_yaml(run / CONFIG).items() if key in ("seed_everything", "data")}
    data: FederatedDataModule = parser.instantiate_classes(parser.parse_object(content)).data
    data.setup("fit")
    return data


# What was tested ------------------------------------------------------------------------------------------------------

Tested = list["pd.DataFrame"]  # by seed: client, target, and what is answered


def _records(output: Path, seeds: Sequence[int], alone: Sequence[str]) -> dict[str, Tested]:
    """Every method's tested records; of those that train alone each client's own, or a table for each client where all
    are tested on one set."""
    import pandas as pd

    found: dict[str, Tested] = {}
    for name in ("pooled", *FEDERATED, "noise"):
        files = [output / "runs" / name / f"seed-{seed}" / RECORDS for seed in seeds]
        if all(file.is_file() for file in files):
            found[name] = [pd.read_csv(file, dtype={"client": str}) for file in files]
    own: Tested = []
    for seed in seeds:
        files = [output / "runs" / f"alone-{k}" / f"seed-{seed}" / RECORDS for k in range(len(alone))]
        tables = [(pd.read_csv(f, dtype={"client": str}), n) for f, n in zip(files, alone, strict=True) if f.is_file()]
        parts = [table[table["client"] == csv_cell(name)] for table, name in tables]
        if any(map(len, parts)):
            own.append(pd.concat(parts))
        else:
            own += [table for table, _ in tables]  # on one set for all
    return {"alone": own, **found} if own else found


def bagged_trees(by_seed: Mapping[int, "FederatedDataModule"], leaf: int = 3) -> Tested | None:
    """A random forest for each client, whose answers are averaged with weights n_k: only forests leave a client.

    scikit-learn's, of ``TREES`` trees with at least ``leaf`` records in a leaf, for each seed and its data. None where
    records are no vectors (d,) with a class or a number, or none is held out by client.
    """
    import pandas as pd
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from torch.utils.data import TensorDataset

    found: Tested = []
    for seed, data in by_seed.items():
        held, train = data.data.test, {n: own for n, own in data.data.train.items() if len(own)}  # type: ignore[arg-type]
        sets = [*train.values(), *(held.values() if isinstance(held, Mapping) else [held])]
        if not isinstance(held, Mapping) or not all(type(s) is TensorDataset and s.tensors[0].dim() == 2 for s in sets):
            return None
        arrays = {n: [t.numpy() for t in own.tensors] for n, own in train.items()}  # type: ignore[attr-defined]
        tests = {n: [t.numpy() for t in own.tensors] for n, own in held.items()}  # type: ignore[attr-defined]
        total = sum(len(y) for _, y in arrays.values())
        parts: dict[str, Any] = dict.fromkeys(tests, 0.0)
        for x, y in arrays.values():
            kind = RandomForestRegressor if y.ndim == 2 else RandomForestClassifier
            forest = kind(TREES, min_samples_leaf=leaf, random_state=seed).fit(x, y.squeeze())
            for name, (test, _) in tests.items():
                answers = forest.predict(test)[:, None] if y.ndim == 2 else _of_classes(forest, test, data)
                parts[name] = parts[name] + len(y) / total * answers
        tables = []
        for name, (_, y) in tests.items():
            columns = {f"{'output' if y.ndim == 2 else 'class'}_{k}": each for k, each in enumerate(parts[name].T)}
            tables.append(pd.DataFrame({"client": csv_cell(name), "target": y.squeeze(), **columns}))
        found.append(pd.concat(tables))
    return found


def _of_classes(forest: Any, x: np.ndarray, data: "FederatedDataModule") -> np.ndarray:
    """Probabilities (n, classes), 0 of classes that the client has not."""
    classes = 1 + max(int(own.max()) for own in (data.data.labels or {}).values() if len(own))
    found = np.zeros((len(x), classes))
    found[:, forest.classes_] = forest.predict_proba(x)
    return found


@dataclass(frozen=True)
class Score:
    """A metric of records: its name, the better way, and its value of targets (n,) and answers (n, outputs); NaN where
    it is not defined."""

    name: str
    higher: bool
    of: Callable[[np.ndarray, np.ndarray], float]


def score_for(table: "pd.DataFrame") -> Score:
    """AUROC of two classes, accuracy of several, and of a number the root of the mean squared error."""
    answers = [name for name in table if str(name).startswith(("class_", "output_"))]
    if answers[0] == "output_0":
        return Score("RMSE", False, lambda y, p: float(np.sqrt(np.mean((y - p[:, 0]) ** 2))))
    if len(answers) == 2:
        return Score("AUROC", True, auroc)
    return Score("accuracy", True, lambda y, p: float(np.mean(p.argmax(1) == y)))


def auroc(targets: np.ndarray, answers: np.ndarray) -> float:
    """Of classes 0 and 1 (n,) and their probabilities (n, 2), by the ranks; NaN of one class."""
    from scipy.stats import rankdata

    ill = targets == 1
    n, m = int(ill.sum()), int((~ill).sum())
    return float((rankdata(answers[:, 1])[ill].sum() - n * (n + 1) / 2) / (n * m)) if n and m else float("nan")


def calibration_error(targets: np.ndarray, answers: np.ndarray) -> float:
    """The expected calibration error in 15 bins of the answered class's probability; of two classes the second's."""
    import torch
    from torchmetrics.functional.classification import binary_calibration_error, multiclass_calibration_error

    y, p = torch.tensor(targets).long(), torch.tensor(answers).float()
    if p.shape[1] == 2:
        return float(binary_calibration_error(p[:, 1], y, 15))
    return float(multiclass_calibration_error(p, y, p.shape[1], 15))


def by_client(
    records: Mapping[str, Tested], score: Score, seed: int = 0
) -> tuple["pd.DataFrame", dict[str, np.ndarray]]:
    """A row for each method and client, and the mean over the clients that all methods have: the score, the 95 %
    percentile interval of ``RESAMPLES`` bootstrap samples of the client's records, and the calibration error; means
    over seeds. And every method's resampled means (RESAMPLES,), of the same samples for all methods."""
    import pandas as pd

    clients = list(dict.fromkeys(name for tables in records.values() for name in tables[0]["client"].fillna("")))
    there = [set(tables[0]["client"].fillna("")) for tables in records.values()]
    shared = set.intersection(*there) or set(clients)
    rows: list[tuple[Any, ...]] = []
    means: dict[str, np.ndarray] = {}
    for method, tables in records.items():
        own: list[tuple[Any, np.ndarray, Any, int]] = []
        for number, client in enumerate(clients):
            parts = [t[t["client"].fillna("") == client] for t in tables]
            if not len(parts[0]):
                continue
            targets = [part["target"].to_numpy() for part in parts]
            answers = [part.filter(regex="^(class|output)_").to_numpy() for part in parts]
            generator, n = np.random.default_rng([seed, number]), len(parts[0])
            samples = generator.integers(0, n, (RESAMPLES, n))
            drawn = np.array(
                [np.mean([score.of(y[s], p[s]) for y, p in zip(targets, answers, strict=True)]) for s in samples]
            )
            value = np.mean([score.of(y, p) for y, p in zip(targets, answers, strict=True)])
            error: Any = np.nan
            if score.name != "RMSE":
                error = np.mean([calibration_error(y, p) for y, p in zip(targets, answers, strict=True)])
            rows.append((method, client or HELD_OUT, n, value, *_interval(drawn), error))
            if client in shared and not np.isnan(value):
                own.append((value, drawn, error, n))
        if own:
            values, draws, errors, sizes = zip(*own, strict=True)
            means[method] = np.nanmean(draws, 0)
            interval = _interval(means[method])
            rows.append((method, WHOLE, sum(sizes), np.mean(values), *interval, np.mean(errors)))
    columns = ["method", "client", "records", score.name, "low", "high", "calibration_error"]
    return pd.DataFrame(rows, columns=columns), means


def by_seed(records: Mapping[str, Tested], score: Score, seeds: Sequence[int]) -> "pd.DataFrame":
    """A row for each method, seed and client: the score."""
    import pandas as pd

    rows = []
    for method, tables in records.items():
        for k, table in enumerate(tables):
            seed = seeds[k * len(seeds) // len(tables)]  # alone, on one set for all: a table for each client
            for client, own in table.fillna({"client": ""}).groupby("client", sort=False):
                answers = own.filter(regex="^(class|output)_").to_numpy()
                rows.append((method, seed, client or HELD_OUT, score.of(own["target"].to_numpy(), answers)))
    return pd.DataFrame(rows, columns=["method", "seed", "client", score.name])


def _interval(drawn: np.ndarray) -> tuple[float, float]:
    there = drawn[~np.isnan(drawn)]
    low, high = np.percentile(there, [2.5, 97.5]) if len(there) else (np.nan, np.nan)
    return float(low), float(high)


# What is told ---------------------------------------------------------------------------------------------------------


def advice(table: "pd.DataFrame", means: Mapping[str, np.ndarray], score: Score) -> str:
    """One sentence: whether the clients gain by federating, and what privacy and trees do beside it."""
    whole = table[table["client"] == WHOLE].set_index("method")[score.name]
    federated = [name for name in FEDERATED if name in means]
    if not federated or "alone" not in means:
        return "Too few methods have finished to say what helps."
    sign = 1 if score.higher else -1
    best = max(federated, key=lambda name: sign * whole[name])
    gain = sign * (means[best] - means["alone"])
    low, high = np.nanpercentile(gain, [2.5, 97.5])
    found = (
        f"{TITLES[best]} has {score.name} {whole[best]:.3f} in the mean over clients, each alone {whole['alone']:.3f}"
    )
    span = f"(gain {sign * (whole[best] - whole['alone']):.3f}, 95 % interval {low:.3f} to {high:.3f})"
    told = "federate" if low > 0 else "train alone" if high < 0 else "these data do not tell which is better"
    if "trees" in whole and sign * (whole["trees"] - whole[best]) > 0:
        told += f"; bagged trees are better still ({whole['trees']:.3f})"
    if "noise" in whole:
        told += f"; hiding records at epsilon 3 leaves {whole['noise']:.3f}"
    return f"{found} {span}: {told}."


def report(records: Mapping[str, Tested], seeds: Sequence[int], output: Path, command: str, console: Console) -> None:
    """Write ``compare.csv``, ``seeds.csv``, ``compare.png`` and ``index.html``, and print the table and the advice."""
    if not records:
        raise UserError("no run tells of single records: compare needs a module whose test_step returns columns")
    score = score_for(next(iter(records.values()))[0])
    table, means = by_client(records, score)
    sentence = advice(table, means, score)
    for name, rows in {"compare.csv": table, "seeds.csv": by_seed(records, score, seeds)}.items():
        with replacing(output / name) as beside:
            rows.to_csv(beside, index=False, quoting=csv.QUOTE_MINIMAL)
    picture = output / "compare.png"
    with replacing(picture) as beside:
        drawn(table, score).savefig(beside, dpi=150, format="png")
    write_text(output / "index.html", page(table, score, sentence, command))
    _print(table, score, console)
    say(console, sentence)
    say(console, f"page: {output / 'index.html'}")


def _cells(table: "pd.DataFrame", score: Score) -> tuple[list[str], list[list[str]]]:
    """A heading for each method, and cells of several lines for each client."""
    methods = list(dict.fromkeys(table["method"]))
    lines = []
    for client in [c for c in dict.fromkeys(table["client"]) if c != WHOLE] + [WHOLE]:
        line = [client]
        for method in methods:
            row = table[(table["client"] == client) & (table["method"] == method)]
            if not len(row):
                line.append("-")
                continue
            value, low, high, error = row.iloc[0][[score.name, "low", "high", "calibration_error"]]
            shown = ["not defined"] if np.isnan(value) else [f"{value:.3f}", f"{low:.2f}-{high:.2f}"]
            line.append("\n".join(shown + ([f"{error:.2f}"] if not np.isnan(error) else [])))
        lines.append(line)
    return ["client", *(TITLES[method] for method in methods)], lines


def _caption(score: Score) -> str:
    calibrated = "" if score.name == "RMSE" else ", and the calibration error (0 is best)"
    unit = " in standard deviations" if score.name == "RMSE" else ""
    return f"{score.name}{unit} on each client's held-out records, its 95 % bootstrap interval{calibrated}"


def _print(table: "pd.DataFrame", score: Score, console: Console) -> None:
    heads, lines = _cells(table, score)
    shown = Table(title=_caption(score), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in (heads[0], *(line[0] for line in lines)):
        shown.add_column(markup(head), overflow="fold")
    for k, head in enumerate(heads[1:], start=1):  # clients across: methods are more
        shown.add_row(markup(head), *(line[k] for line in lines))
    console.print(shown)


def drawn(table: "pd.DataFrame", score: Score) -> "Figure":
    """A row for each client and the mean, and in it a point with its interval for each method."""
    from matplotlib.figure import Figure

    from lit_epgan.cli.plots import COLOURS

    clients, methods = list(dict.fromkeys(table["client"])), list(dict.fromkeys(table["method"]))
    figure = Figure(figsize=(7, 1.4 + 0.16 * len(clients) * (len(methods) + 1)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    for k, method in enumerate(methods):
        own = table[table["method"] == method]
        heights = [clients.index(c) + 0.8 * (k - (len(methods) - 1) / 2) / len(methods) for c in own["client"]]
        value, low, high = (own[name].to_numpy() for name in (score.name, "low", "high"))
        spread = np.abs([value - low, high - value])
        axes.errorbar(value, heights, xerr=spread, fmt="o", ms=4, color=COLOURS[k], label=TITLES[method], lw=1.2)
    axes.set_yticks(range(len(clients)), [mathtext(printable(c)) for c in clients])
    axes.set_ylim(len(clients) - 0.4, -0.6)
    axes.set_xlabel(f"{score.name} ({'higher' if score.higher else 'lower'} is better)")
    axes.grid(axis="x", color="#e4e4e4")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    return figure


def page(table: "pd.DataFrame", score: Score, sentence: str, command: str) -> str:
    """The page's HTML, beside the picture."""
    heads, lines = _cells(table, score)

    def text(each: str) -> str:
        return html.escape(printable(each))

    head = "".join(f"<th>{text(each)}</th>" for each in heads)
    body = "".join(f"<tr><th>{text(line[0])}<td>{'<td>'.join(line[1:])}" for line in lines).replace("\n", "<br>")
    notes = [
        "Each client's rows are held out within it, and are the same for all methods. The better federated method is "
        "chosen by these very rows.",
        "Alone: the model of a client's own training rows, tested on its own held-out rows; a table's columns are "
        f"prepared as for all. The {MOST_ALONE} largest clients train alone at most, and means are over those that all "
        "methods have.",
        "Bagged trees: a random forest for each client, their answers averaged by its number of rows. No library that "
        "this package knows grows one forest from sums; forests tell much of the rows that they were grown from.",
        "Records hidden: RecordNoise. What a table's preparation takes (means, spreads, levels) is not covered, nor is "
        "this page.",
    ]
    if few_left := [name for name in TITLES if name not in set(table["method"])]:
        notes.append(f"Not here: {few([TITLES[name] for name in few_left])}.")
    told = "".join(f"<li>{text(note)}</li>" for note in notes)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>Comparison</title><style>body{font:16px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;"
        "padding:0 1rem}div{overflow-x:auto;background:linear-gradient(to left,#fff 30%,#fff0) right/3rem 100% "
        "no-repeat local,linear-gradient(to left,#0005,#0000) right/.9rem 100% no-repeat}td,th{padding:.3rem .7rem;"
        "text-align:left;border-bottom:1px solid #ddd}"
        "td{white-space:nowrap}th:first-child{position:sticky;left:0;background:#fff}img{max-width:100%}</style>"
        "<h1>What federation buys each client</h1>"
        f"<p><strong>{text(sentence)}</strong></p>"
        f"<p>{text(_caption(score))}.</p><div><table><tr>{head}</tr>{body}</table></div>"
        f'<img src="compare.png" alt="{text(_caption(score))}"><ul>{told}</ul>'
        f"<p><code>{text(command)}</code></p></html>\n"
    )
