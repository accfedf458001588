"""A user's CSV table: every field a text, every row with the line on which it begins; and the files it names."""

import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

NAMED = 20  # columns that a message lists


@dataclass(frozen=True)
class CsvTable:
    """What a CSV file holds: the columns' names in its first line, each row's fields, as many, and the line on which it
    begins."""

    columns: list[str]
    lines: list[int]
    rows: list[list[str]]

    def records(self) -> Iterator[tuple[int, dict[str, str]]]:
        """The line of each row, and its fields by column."""
        for line, row in zip(self.lines, self.rows, strict=True):
            yield line, dict(zip(self.columns, row, strict=True))


def read_csv_table(file: Path, needed: Sequence[str], any_case: bool = False) -> CsvTable:
    """Read a CSV file in UTF-8 whose first line names the columns, those of ``needed`` among them, in upper case or
    lower where ``any_case``. Commas part the fields, or semicolons, tabs or bars where the first line has more of
    these. Blanks around a field are left out, as are empty rows. UserError: it is no such table, a column is missing or
    there twice, a row has too few fields or too many, or one under no name, but for the first."""
    lines, rows = [], []
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            first, skipped = text.readline(), 0
            if told := re.fullmatch(r"sep=(.)\s*", first):  # as Excel says it
                skipped = 1
            else:
                text.seek(0)
            outside = re.sub(r'"[^"]*"', "", first)
            reader = csv.reader(text, strict=True, delimiter=told[1] if told else max(",;\t|", key=outside.count))
            columns = [name.strip().lower() if any_case else name.strip() for name in next(reader, [])]
            _check_columns(file, columns, needed)
            line = reader.line_num + 1 + skipped
            for row in reader:
                fields = [field.strip() for field in row]
                if any(fields):
                    _check_length(f"{file}, line {line}", fields, columns)
                    lines.append(line)
                    rows.append(fields)
                line = reader.line_num + 1 + skipped
    except (csv.Error, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{file} cannot be read as a CSV table in UTF-8: {error}.") from error
    return CsvTable(columns, lines, rows)


def _check_columns(file: Path, columns: list[str], needed: Sequence[str]) -> None:
    found = f"its first line names {few(columns, NAMED) or 'nothing'}"
    for name in needed:
        if name not in columns:
            raise UserError(f"{file} has no column {name!r}: {found}.")
    for name in columns:
        if name and columns.count(name) > 1:
            raise UserError(f"{file} has more than one column {name!r}: {found}; rename or remove the others.")


def _check_length(where: str, fields: list[str], columns: list[str]) -> None:
    if len(fields) != len(columns):
        hint = ": a field with a comma in it stands in quotation marks" if len(fields) > len(columns) else ""
        raise UserError(
            f"{where} has {len(fields)} fields, but the first line names {len(columns)} columns, "
            f"{few(columns, NAMED)}{hint}."
        )
    for number, (column, field) in enumerate(zip(columns, fields, strict=True)):
        if number and field and not column:  # the first may be a row's own name
            raise UserError(
                f"{where} holds {field!r} where the first line names no column: leave out the comma there, and put a "
                "field with a comma in it in quotation marks."
            )


def named_file(folder: Path, name: str, where: str, outside: bool = False) -> Path:
    """The file that a table in ``folder`` calls ``name``, relative to it; ``where`` is the table and the row, as a
    message names them. UserError: it lies elsewhere, by an absolute name, by ``..`` or by a link, and not
    ``outside``."""
    path = folder / os.path.normpath(name)  # what is checked is what is opened, also where a link precedes ``..``
    if outside:
        return path
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # links that lead in a circle, a name that none can be
        raise UserError(f"{where}: {name!r} is no name of a file ({error}).") from error
    if not inside:
        raise UserError(
            f"{where}: {name} lies outside of {folder}: put the file there, or set --data.outside true if you trust "
            "the table."
        )
    return path
