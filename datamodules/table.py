"""Any table whose rows belong to clients: a file for each, or one file with a column that says whose a row is."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_epgan.datamodules.client_tables import ClientTables
from lit_epgan.datamodules.preparation import is_missing
from lit_epgan.lib.csv_table import read_csv_table
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few, same_name

if TYPE_CHECKING:
    import pandas as pd

FILES = (".csv", ".tsv", ".parquet")
TOTALS = {"total", "totals", "subtotal", "grand total", "sum", "average", "mean", "gesamt", "summe", "overall"}


class TableDataModule(ClientTables):
    """The rows of CSV or Parquet files by client; names that a person reads as one are one client.

    Args:
        path: a folder with a file for each client, who bears its name; or a file. ``.csv`` is in UTF-8, with a line of
            column names, and commas, semicolons or tabs between the fields.
        client: the column that says whose a row is.
        options: settings of ``ClientTables`` and of ``FederatedDataModule``.
    """

    def __init__(self, path: str = "table.csv", client: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.path, self.client = Path(path).expanduser(), client
        if client is not None and client in (self.label, *(self.features or [])):
            raise UserError(f"data.client is {client!r}, which is the label or a feature: a column is one of them")

    def read(self) -> "dict[str, pd.DataFrame]":
        """The clients' tables. UserError: a file is missing, or no such table; with file and line."""
        import pandas as pd

        tables = [_read(file) for file in self._files()]
        asked = [self.label, *([self.client] if self.client else []), *(self.features or [])]
        columns = {same_name(name): name for name in asked}  # as they are asked for, else as the first file writes them
        for k, table in enumerate(tables):
            named = {name: columns.setdefault(same_name(str(name)), str(name)) for name in table}
            tables[k] = table.rename(columns=named)
        lacking = [table for table in tables if self.label not in table]
        if 0 < len(lacking) < len(tables):
            file, columns_there = lacking[0].index[0][0], few([*map(str, lacking[0])], 20)
            raise UserError(f"{file} has no column {self.label!r}, the label; its columns are {columns_there}")
        whole = pd.concat(tables).fillna("") if len(tables) > 1 else tables[0]
        if self.client is None:
            names = pd.Series(whole.index.get_level_values(0), index=whole.index, dtype=object)
            names = names.map(lambda file: Path(file).stem)
        elif self.client in whole:
            names = whole.pop(self.client)
            for file, line in whole.index[names.map(is_missing)]:
                raise UserError(f"{file}, line {line}: the column {self.client!r} is empty")
        else:
            raise UserError(f"{self.path} has no column {self.client!r}: its columns are {few([*map(str, whole)], 20)}")
        if self.client is None and len(tables) == 1:
            self._found.append(
                f"all rows of {self.path} are one client's: say by --data.client which column says whose a row is"
            )
        return self._by_client(whole, names)

    def _by_client(self, whole: "pd.DataFrame", names: "pd.Series") -> "dict[str, pd.DataFrame]":
        keys = {str(name): same_name(str(name)) for name in names.unique()}
        first: dict[str, str] = {}
        for name, key in keys.items():
            first.setdefault(key, name)
        if alike := [f"{first[key]!r} and {name!r}" for name, key in keys.items() if first[key] != name]:
            self._found.append(f"one client is meant by {few(alike)}")
        rows = whole.groupby(names.map(keys).to_numpy(), sort=True).indices
        own = {first[str(key)]: whole.iloc[each] for key, each in rows.items()}
        # a column of other files is none of a client's whose own files lack it
        return {
            name: table.loc[:, (table != "").any().to_numpy() | (table.columns == self.label)]
            for name, table in own.items()
        }

    def _files(self) -> list[Path]:
        if self.path.is_dir():
            found = sorted(f for f in self.path.iterdir() if f.suffix.lower() in FILES and not f.name.startswith("."))
            if not found:
                raise UserError(f"{self.path.absolute()} has no file that ends in {', '.join(FILES)}")
            return found
        if not self.path.is_file():
            raise UserError(
                f"there is no table {self.path.absolute()}: place a CSV file there, or a folder with one for each "
                "client, or say by --data.path where it is"
            )
        return [self.path]


def _read(file: Path) -> "pd.DataFrame":
    """All texts of a file, by (file, line). UserError: it is no table, has no rows, or ends in a row of totals."""
    import pandas as pd

    if file.suffix.lower() == ".parquet":
        table = _parquet(file)
    else:
        found = read_csv_table(file, [])
        table = pd.DataFrame(found.rows, columns=found.columns, index=found.lines, dtype=object)
    if not len(table):
        raise UserError(f"{file} has no rows")
    names = [str(name) for name in table if name]
    for name in names:
        if len(several := [other for other in names if same_name(other) == same_name(name)]) > 1:
            raise UserError(f"{file} has columns that one takes for one, {few(list(map(repr, several)))}: rename one")
    table = table[names]  # what has no name is a row's own
    last = table.iloc[-1]
    for name, text in zip(names, last, strict=True):
        if same_name(text) in TOTALS and (table[name] == text).sum() == 1:
            raise UserError(
                f"{file}, line {table.index[-1]} looks like a row of totals, {text!r} in {name!r}: remove it"
            )
    table.index = pd.MultiIndex.from_product([[str(file)], table.index])
    return table


def _parquet(file: Path) -> "pd.DataFrame":
    import pandas as pd

    try:
        table = pd.read_parquet(file, dtype_backend="numpy_nullable")  # else whole numbers with gaps are rounded
    except ImportError as error:
        raise UserError(f"{file} is a Parquet file, for which pandas needs pyarrow: pip install pyarrow") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a Parquet file: {error}") from error
    texts = table.apply(lambda column: column.map(str, na_action="ignore")).astype(object)
    return texts.where(table.notna(), "").set_axis(range(1, len(table) + 1))
