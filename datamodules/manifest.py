"""Which image belongs to which client: read from a folder's layout or from a CSV manifest, every mistake named."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lit_epgan.csv_table import named_file, read_csv_table
from lit_epgan.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

SPLITS = {  # what people call them, in any case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
COLUMNS = ("path", "client", "label", "split")


def read_records(source: str | Path, outside: bool = False) -> "pd.DataFrame":
    """One row per image.

    Args:
        source: a folder, ``[SPLIT/]CLIENT/[LABEL/]IMAGE``, where SPLIT is train, val or test, or one of the further
            names in ``SPLITS`` (without these folders all images are for training); or a CSV file with the columns
            ``path`` (relative to the file's folder) and ``client``, and if wanted ``label`` and ``split``. Test rows
            need no client.
        outside: whether a CSV file may name files outside of its folder.

    Returns:
        Strings in the columns path, client, label (empty where there are none), split (train, val or test), and where:
        the line or file as a message names it.

    Raises:
        UserError: names the first mistake and its line: a missing column, file, client, label or split, an image listed
            twice, outside of the manifest's folder or in no client's, a client without training images.
    """
    import pandas as pd

    path = Path(source).expanduser().absolute()
    if path.is_dir():
        records = pd.DataFrame(_scan(path), columns=[*COLUMNS, "where"], dtype=str)
    elif path.is_file():
        records = _read_manifest(path, outside)
    else:
        raise UserError(f"There is no folder or CSV file at {path}: set --data.path to where your images are.")
    _check_labels(records)
    _check_clients(records, path)
    return records


def _scan(root: Path) -> Iterator[tuple[str, ...]]:
    folders = _folders(root)
    splits = [folder for folder in folders if _split(folder)]
    others = [folder for folder in folders if not _split(folder)]
    if splits and others:
        raise UserError(
            f"{root} mixes split folders with others ({others[0].name}): "
            "put every client's folder inside train, val or test, or use none of these names."
        )
    _check_splits(splits)
    _check_no_images(root)
    for split, parent in [(_split(folder), folder) for folder in splits] or [("train", root)]:
        _check_no_images(parent)
        for client in _folders(parent):
            yield from _scan_client(client, split)


def _split(folder: Path) -> str:
    """The split that a folder's name means, or nothing."""
    return SPLITS.get(folder.name.lower(), "")


def _check_splits(folders: list[Path]) -> None:
    meant: dict[str, Path] = {}
    for folder in folders:
        other = meant.setdefault(_split(folder), folder)
        if other != folder:
            raise UserError(f"{other} and {folder.name} both mean the split {_split(folder)}: make one folder of them.")


def _check_no_images(parent: Path) -> None:
    """Images in a folder of clients' folders belong to nobody."""
    for image in _images(parent.iterdir()):
        raise UserError(f"{image} is in no client's folder: move it into one, or out of {parent}.")


def _scan_client(client: Path, split: str) -> Iterator[tuple[str, ...]]:
    direct = _images(client.iterdir())
    labelled = {folder.name: _images(folder.rglob("*")) for folder in _folders(client)}
    if direct and any(labelled.values()):
        raise UserError(
            f"{client} holds images beside folders of images: put each image into a folder named by its label."
        )
    if not direct and not any(labelled.values()):
        raise UserError(f"Client {client.name} is empty: {client} holds no image ({', '.join(sorted(SUFFIXES))}).")
    for folder in [parent for images in labelled.values() for image in images for parent in image.parents]:
        if folder.is_relative_to(client) and folder != client and _split(folder):
            raise UserError(f"{folder} means a split, not a label: put the folders of splits above those of clients.")
    for label, images in {"": direct, **labelled}.items():
        for image in images:
            yield str(image), client.name, label, split, str(image)


def _folders(parent: Path) -> list[Path]:
    return sorted(entry for entry in parent.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(entries: Iterable[Path]) -> list[Path]:
    return sorted(e for e in entries if e.suffix.lower() in SUFFIXES and not e.name.startswith(".") and e.is_file())


def _read_manifest(file: Path, outside: bool) -> "pd.DataFrame":
    import pandas as pd

    found = read_csv_table(file, ("path", "client"), any_case=True)
    defaults = {"label": "", "split": "train"}
    records = [defaults | fields | {"where": f"{file}, line {line}"} for line, fields in found.records()]
    table = pd.DataFrame(records, columns=[*COLUMNS, "where"], dtype=str)
    table["split"] = [SPLITS.get(split.lower(), split) for split in table["split"]]
    _check_rows(table)
    folder, named = Path(os.path.normpath(file.parent)), zip(table["path"], table["where"], strict=True)
    table["path"] = [os.path.normpath(named_file(folder, path, where, outside)) for path, where in named]
    _check_files(table)
    return table


def _check_rows(table: "pd.DataFrame") -> None:
    for column in ("path", "split"):
        for where in table.loc[table[column] == "", "where"]:
            raise UserError(f"{where}: the {column} is empty.")
    for split, where in table.loc[~table["split"].isin(SPLITS.values()), ["split", "where"]].to_numpy():
        raise UserError(f"{where}: the split is {split!r}; it must be one of train, val, test.")
    for where in table.loc[(table["client"] == "") & (table["split"] != "test"), "where"]:
        raise UserError(f"{where}: the client is empty; every train and val row needs one.")


def _check_files(table: "pd.DataFrame") -> None:
    seen: dict[str, str] = {}
    for path, where in table[["path", "where"]].to_numpy():
        if not Path(path).is_file():
            raise UserError(f"{where}: there is no file {path}.")
        if path in seen:
            raise UserError(f"{where}: {path} is listed already in {seen[path].rpartition(', ')[2]}.")
        seen[path] = where


def _check_labels(records: "pd.DataFrame") -> None:
    unlabelled = records["label"] == ""
    if unlabelled.any() and not unlabelled.all():
        raise UserError(f"{records.loc[unlabelled, 'where'].iloc[0]} has no label, but others have: label all or none.")


def _check_clients(records: "pd.DataFrame", source: Path) -> None:
    trained = set(records.loc[records["split"] == "train", "client"])
    if not trained:
        raise UserError(f"{source} has no image for training: put clients' images there, or rows with split 'train'.")
    for client, where in records.loc[records["split"] == "val", ["client", "where"]].to_numpy():
        if client not in trained:
            raise UserError(f"{where}: client {client} has images for validation but none for training.")
