"""Files that a table names: inside of the table's folder, unless somebody says otherwise."""

import os
from pathlib import Path

from lit_epgan.errors import UserError


def named_file(folder: Path, name: str, where: str, outside: bool = False) -> Path:
    """The file that a table calls ``name``.

    Args:
        folder: the table's; names are relative to it.
        name: as it stands in the table.
        where: the table and the row, as a message names it.
        outside: whether the file may lie elsewhere.

    Raises:
        UserError: it lies elsewhere, by an absolute name, by ``..`` or by a link.
    """
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
