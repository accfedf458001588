"""``python -m lit_epgan privacy show LEDGER``: what a private data set has paid, and for what."""

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lit_epgan.errors import UserError
from lit_epgan.privacy.book import EVERYONE, Book
from lit_epgan.privacy.ledger import Ledger
from lit_epgan.text import markup, printable

USAGE = "python -m lit_epgan privacy show LEDGER"


def privacy(args: list[str]) -> int:
    """Print a ledger."""
    if args in (["-h"], ["--help"], ["show", "-h"], ["show", "--help"]):
        print(
            f"Usage: {USAGE}\n\nWhat every run, query and rerun on one data set has released, and what it adds up to."
        )
        return 0
    if len(args) != 2 or args[0] != "show":
        raise UserError(f"Usage: {USAGE}")
    path = Path(args[1])
    if not path.is_file():
        raise UserError(f"There is no ledger {path}.")
    show(Ledger(path).read(), Console())
    return 0


def show(book: Book, console: Console) -> None:
    """Print what was spent on what, and what may still be spent."""
    table = Table(box=SIMPLE_HEAD)
    whose = "records of" if book.unit == "record" else "users"
    for heading in ("since", "run", whose, "releases", "state"):
        table.add_column(heading, overflow="fold")
    for account in book.accounts.values():
        state = "ended" if account.ended else f"{account.made} of {account.planned.count} made, all reserved"
        cells = (account.since, account.what, account.group, str(account.releases), state)
        table.add_row(*map(markup, cells))
    console.print(table)
    for group in book.groups():
        name = "all together" if group == EVERYONE else f"on {group}"
        console.print(f"{printable(name)}: {book.spent(group)}", markup=False, highlight=False)
    if book.budget.epsilon is not None:
        left = max(0.0, book.budget.epsilon - book.total().epsilon)
        console.print(f"budget: epsilon {book.budget.epsilon:g} at delta {book.budget.delta:g}; {left:.3g} is left")
