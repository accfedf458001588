"""``python -m lit_epgan inspect``: a look at data nobody may look at."""

from argparse import ArgumentError, ArgumentTypeError
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_epgan.cli.error_messages import own_error
from lit_epgan.cli.parser import parse_error
from lit_epgan.cli.run_setup import say
from lit_epgan.inspection.inspection import Inspection, page, paid, verdict
from lit_epgan.inspection.view import Findings
from lit_epgan.lib import tensor_file
from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import isolated, seed_on_host
from lit_epgan.lib.text import markup, printable
from lit_epgan.runs.config_files import resolve_configs
from lit_epgan.runs.lock import locked

PAGE, RELEASED = "index.html", "released.pt"


def inspect(args: list[str]) -> int:
    """Ask, and write the page; a UserError says if the budget would be passed."""
    parser = _parser()
    words = resolve_configs(args)
    if words in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    config = _parsed(parser, words)
    names = [Path(str(path)).stem for path in config.pop("config") or []]
    folder = Path(config.pop("output") or Path("runs") / (names[-1] if names else "inspection"))
    config.pop("base")
    inspection = Inspection(**vars(_built(parser, config)))
    with locked(folder, "--output"):
        ask = inspection.ask(folder.name)
        say(f"This inspection will have cost {ask.price}.")
        findings = inspection.run(ask, say)
        _keep_earlier(folder)
        tensor_file.save(findings.kept, folder / RELEASED)
        command = " ".join(["python -m lit_epgan inspect", *args])
        write_text(folder / PAGE, page(inspection, findings, ask, command))
    show(findings, Console())
    cost, total = paid(ask)
    for line in (f"cost: {cost}", f"in the ledger: {total}", f"page: {folder / PAGE}"):
        print(printable(line))
    return 0


def show(findings: Findings, console: Console) -> None:
    """Print the detectors, and what to look at next."""
    table = Table(title=verdict(findings.checks), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for heading in ("detector", "estimate", "interval", ""):
        table.add_column(heading, overflow="fold")
    for check in findings.checks:
        interval = f"{check.low:+.2f} to {check.high:+.2f}"
        state = "[bold red]alarm[/]" if check.alarm else "quiet"
        table.add_row(markup(check.title), f"{check.estimate:+.2f}", interval, state)
    console.print(table)
    for sentence in findings.look_next:
        console.print(printable(sentence), markup=False, highlight=False)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m lit_epgan inspect",
        description="Asks users' data under differential privacy what is wrong with them, and writes one page.",
        exit_on_error=False,
    )
    parser.add_argument("--config", "-c", action="config", help="the YAML, e.g. inspect_digits.yaml")
    parser.add_argument("--base", type=str | list[str] | None, default=None, help="a config that this one starts from")
    parser.add_argument("--output", type=str | None, default=None, help="folder of the page (default: runs/NAME)")
    parser.add_class_arguments(Inspection)
    return parser


def _parsed(parser: ArgumentParser, words: list[str]) -> Any:
    try:
        return parser.parse_args(words)
    except (ArgumentError, ArgumentTypeError) as error:
        raise UserError(parse_error(error, words, parser).replace("`fit --help`", "`inspect --help`")) from error


def _built(parser: ArgumentParser, config: Any) -> Any:
    try:
        with isolated():
            seed_on_host(config.seed)  # for the primary model's first parameters
            return parser.instantiate_classes(config)
    except (ValueError, TypeError) as error:
        if (own := own_error(error)) is None:
            raise
        raise own from error


def _keep_earlier(folder: Path) -> None:
    """Give an earlier inspection's files the first free number: what they hold was paid for."""
    number = 1
    while (folder / f"{number}-{PAGE}").exists():
        number += 1
    for name in (PAGE, RELEASED):
        if (folder / name).exists():
            (folder / name).rename(folder / f"{number}-{name}")
