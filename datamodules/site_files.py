"""A site's table in a CSV file: text, numbers and categories, every fault with its site, line and column."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from lit_epgan.datamodules.alignment import hashed_columns
from lit_epgan.errors import UserError
from lit_epgan.listing import few

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class SiteFile:
    """A site's table as it stands in its file.

    Attributes:
        site: the site's name.
        table: strings, with the line of the file as index.
        columns: the table's columns by the hashes of their names.
    """

    site: str
    table: "pd.DataFrame"
    columns: Mapping[str, str]

    def text(self, column: str) -> "pd.Series":
        """A column, by its hash, as strings.

        Raises:
            UserError: a cell is empty.
        """
        cells = self.table[self.columns[column]]
        if cells.isna().any():
            raise UserError(f"{self._where(column, cells.isna())} is empty: fill it in, or leave the row or column out")
        return cells.str.strip()

    def numbers(self, column: str) -> np.ndarray:
        """A column, by its hash, as float64 (n,).

        Raises:
            UserError: a cell is no finite number.
        """
        import pandas as pd

        cells = self.text(column)
        numbers = pd.to_numeric(cells, errors="coerce").astype("float64")
        wrong = numbers.isna() | numbers.isin([np.inf, -np.inf])
        if wrong.any():
            raise UserError(
                f"{self._where(column, wrong)} holds {cells[wrong].iloc[0]!r}, which is no finite number: mend it, "
                "name the columns of numbers by --data.features, or those of categories by --data.categories"
            )
        return numbers.to_numpy()

    def codes(self, column: str, categories: Sequence[str], option: str) -> np.ndarray:
        """A column, by its hash, as indices of categories, int64 (n,).

        Raises:
            UserError: a cell holds another category than those which ``option`` names.
        """
        import pandas as pd

        cells = self.text(column)
        wrong = ~cells.isin(list(categories))
        if wrong.any():
            raise UserError(
                f"{self._where(column, wrong)} holds {cells[wrong].iloc[0]!r}, which {option} does not name beside "
                f"{few(list(map(repr, categories)))}: write it as one of them, or name it, too"
            )
        return pd.Categorical(cells, categories=list(categories)).codes.astype(np.int64)

    def _where(self, column: str, wrong: "pd.Series") -> str:
        line = self.table.index[wrong.to_numpy()][0]
        return f"site {self.site!r}, line {line}: the column {self.columns[column]!r}"


def read_site(site: str, path: Path, salt: bytes) -> SiteFile:
    """Read a site's file.

    Args:
        site: its name.
        path: of a CSV file with a line of column names.
        salt: the sites' secret, for the hashes of the columns' names.

    Raises:
        UserError: the file is missing, or no table with a name for each column.
    """
    import pandas as pd

    if not path.is_file():
        raise UserError(f"site {site!r}: there is no file {path.absolute()}: place its CSV table there")
    try:
        table = pd.read_csv(path, header=None, dtype=str, encoding="utf-8-sig", skipinitialspace=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"site {site!r}: {path} cannot be read as a CSV file ({reason}): mend it") from error
    names, rows = table.iloc[0], table.iloc[1:]
    if names.isna().any():
        raise UserError(f"site {site!r}: {path} has no name for column {int(names.isna().argmax()) + 1}: give it one")
    if rows.empty:
        raise UserError(f"site {site!r}: {path} has no rows")
    columns = [str(name).strip() for name in names]
    return SiteFile(site, rows.set_axis(columns, axis=1).set_axis(rows.index + 1), hashed_columns(columns, site, salt))
