"""``python -m lit_epgan study``."""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from lit_epgan.errors import UserError
from lit_epgan.runs.config_files import find_config
from lit_epgan.study.display import Display
from lit_epgan.study.known import take_known
from lit_epgan.study.plan import Study, read_studies
from lit_epgan.study.run import Command, cli_command, runs_of
from lit_epgan.study.runner import default_workers, run_all


def study(args: list[str], command: Command = cli_command) -> int:
    """Run a study, or go on with it, and write its report.

    Args:
        args: Words after ``study``.
        command: What starts a run.

    Returns:
        0; 1 if a run failed or logged no number for the table; 130 if it was stopped by Ctrl-C.
    """
    options = _parser().parse_args(args)
    if options.workers < 1:
        raise UserError(f"--workers is {options.workers}; it must be at least 1.")
    path = find_config(options.config, studies=True)
    plans = _chosen(read_studies(path), options.variants, path)
    output = options.output or Path("runs") / "studies" / plans[0].name
    runs = {plan.variant: runs_of(plan, output) for plan in plans}
    console = Console()
    for plan in plans:
        for known in options.known:
            taken, changed = take_known(plan, runs[plan.variant], known)
            changes = f"; {changed} more were run with other settings, and run again" if changed else ""
            console.print(f"{known}: {taken} runs are known{changes}.", markup=False, highlight=False, soft_wrap=True)
    try:
        failed = run_all([run for some in runs.values() for run in some], options.workers, Display(console), command)
    except KeyboardInterrupt:
        print("Stopped. The same command goes on where it was.", file=sys.stderr)
        return 130
    from lit_epgan.study.report import (
        missing_metrics,
        print_table,
        write_report,
        write_settings,
    )  # plots only once there is something to plot

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
        trouble.append(f"{len(failed)} of {total} runs failed: {', '.join(run.name for run in failed)}.")
    for sentence in trouble:
        print(f"error: {sentence}", file=sys.stderr)
    for plan in plans:
        page = output / plan.variant / "index.html"
        console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
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
