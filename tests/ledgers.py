"""Where a test's ledgers are."""

import os
from pathlib import Path

from lit_epgan.privacy import Ledger
from lit_epgan.privacy.ledger import FOLDER


def paths() -> list[Path]:
    return sorted(Path(os.environ[FOLDER]).glob("*.jsonl"))


def the_ledger() -> Ledger:
    """The only one of the test's data set."""
    (path,) = paths()
    return Ledger(path)
