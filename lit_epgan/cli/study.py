"""``python -m lit_epgan study``."""

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from lit_epgan.cli.study_plan import Study, read_studies
from lit_epgan.cli.study_run import Command, Record, Run, cli_command, runs_of
from lit_epgan.cli.study_runner import Display, default_workers, run_all, say
from lit_epgan.lib.atomic import replacing, write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.signals import Stopped
from lit_epgan.lib.text import csv_cell, printable
from lit_epgan.runs.config_files import find_config
from lit_epgan.runs.lock import locked
from lit_epgan.runs.run_folder import METRICS, FitEnd, write_end


def study(args: list[str], command: Command = cli_command) -> int:
    """Run a study, or go on with it, and write its report. Returns 0; 1 if a run failed or logged no number for the
    table; 130 if it was stopped by Ctrl-C, 143 by SIGTERM."""
    options = _parser().parse_args(args)
    if options.workers < 1:
        raise UserError(f"--workers is {options.workers}; it must be at least 1.")
    path = find_config(options.config, studies=True)
    plans = _chosen(read_studies(path), options.variants, path)
    output = options.output or Path("runs") / "studies" / plans[0].name
    try:
        with locked(output, "--output"):
            return _run(plans, options, output, command)
    except Stopped as stopped:
        print("Stopped. The same command goes on where it was.", file=sys.stderr)
        return stopped.exit_code


def _run(plans: list[Study], options: argparse.Namespace, output: Path, command: Command) -> int:
    runs = {plan.variant: runs_of(plan, output) for plan in plans}
    console = Console()
    for plan in plans:
        for known in options.known:
            taken, changed = take_known(plan, runs[plan.variant], known)
            why = "were run with other settings or do not tell them, and are run again"
            say(console, f"{known}: {taken} runs are known{f'; {changed} more {why}' if changed else ''}.")
    failed = run_all([run for some in runs.values() for run in some], options.workers, Display(console), command)
    # plots only once there is something to plot
    from lit_epgan.cli.plots import write_settings
    from lit_epgan.cli.report import missing_metrics, print_table, write_report

    words = [
        "python -m lit_epgan study --config",
        options.config,
        *(["--variants", *options.variants] if options.variants else []),
        *(["--output", str(output)] if options.output else []),
        *(word for known in options.known for word in ("--known", str(known))),
    ]
    trouble, settings = [], write_settings(plans, runs, output)
    for plan in plans:
        rows = write_report(plan, runs[plan.variant], output / plan.variant, " ".join(words), settings)
        print_table(plan, rows, console)
        trouble += missing_metrics(plan, rows)
    if failed:
        total = sum(len(some) for some in runs.values())
        names = ", ".join(run.name for run in failed)
        trouble.append(f"{len(failed)} of {total} runs failed: {names}. The same command goes on with them.")
    for sentence in trouble:
        print(f"error: {printable(sentence)}", file=sys.stderr)
    for plan in plans:
        say(console, f"page: {output / plan.variant / 'index.html'}")
    return 1 if trouble else 0


def _chosen(plans: list[Study], names: list[str] | None, path: Path) -> list[Study]:
    """The variants of these names, in the study's order; all without names."""
    there = [plan.variant for plan in plans if plan.variant]
    for name in names or []:
        if name not in there:
            raise UserError(f"--variants: {path} has no variant {name!r}, but {', '.join(there) or 'none at all'}.")
    return [plan for plan in plans if not names or plan.variant in names]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lit_epgan study",
        description="Runs methods x seeds in parallel and compares them; stopped, it goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", "-c", required=True, help="the study's YAML, e.g. studies/demo.yaml")
    parser.add_argument(
        "--workers", type=int, default=default_workers(), help="runs at a time (default: one for each core)"
    )
    parser.add_argument("--variants", nargs="+", metavar="NAME", help="only these of the study's variants")
    parser.add_argument("--output", type=Path, help="folder for runs, tables and the page (default: runs/studies/NAME)")
    parser.add_argument(
        "--known",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier runs.csv of this study; its runs with the same settings are not run again",
    )
    return parser


NEEDED = ("method", "seed", "exit_code", "seconds")  # older tables have no variant, rounds and settings
Line = dict[str, str]


def take_known(study: Study, runs: Sequence[Run], path: Path) -> tuple[int, int]:
    """Let runs count as finished whose numbers stand in ``path``; only those of the same settings, and none twice.

    What counts of each metric becomes the one line of the run's ``metrics.csv``; checkpoints and pictures stay where
    they were made. Returns how many were taken, and how many left because their settings have changed or are not told.
    """
    lines = _read(path)
    taken = changed = 0
    for run in runs:
        line = lines.get(_key(run.variant, run.method.name, run.seed))
        if run.is_finished() or line is None or line["exit_code"] != "0":
            continue
        if line.get("settings") != run.settings:
            changed += 1
            continue
        seconds, rounds = _number(line, "seconds", path), _whole_number(line, "rounds", path)
        values = {"epoch": str(rounds - 1)}
        for method in (m for m in study.methods.values() if m.runs_of == run.method.name):
            row = lines.get(_key(run.variant, method.name, run.seed), {})
            for metric in study.metrics:
                column, source = csv_cell(metric.name), method.metric(metric)
                if row.get(column) and source:
                    values[source] = repr(_number(row, column, path) / metric.scale)
        with replacing(run.folder / METRICS) as beside, beside.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([values.keys(), values.values()])
        write_end(run.folder, FitEnd(rounds, rounds, finished=True, logged=rounds))
        write_text(run.log, f"taken from {path}\n")
        run.write(Record(run.settings, 0, seconds))
        taken += 1
    return taken, changed


def _key(variant: str, method: str, seed: int | str) -> tuple[str, str, str]:
    """What a line is found by, as it stands in the table."""
    return csv_cell(variant), csv_cell(method), str(seed)


def _read(path: Path) -> dict[tuple[str, str, str], Line]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"--known {path} cannot be read: {error}.") from error
    missing = [name for name in NEEDED if lines and name not in lines[0]]
    if missing or not lines:
        why = f"it has no column {missing[0]}" if missing else "it is empty"
        raise UserError(f"--known {path} is no runs.csv of a study: {why}.")
    return {_key(line.get("variant", ""), line["method"], line["seed"]): line for line in lines}


def _number(line: Line, column: str, path: Path) -> float:
    try:
        return float(line[column])
    except (KeyError, ValueError):
        raise _no_number(line, column, path) from None


def _whole_number(line: Line, column: str, path: Path) -> int:
    try:
        return int(line[column])
    except (KeyError, ValueError):
        raise _no_number(line, column, path) from None


def _no_number(line: Line, column: str, path: Path) -> UserError:
    run = f"{line['method']}, seed {line['seed']}"
    return UserError(f"--known {path}: {column} of {run} is {line.get(column)!r}, but a number is expected.")
