"""A user's own images as a federation, without code: a folder or a CSV manifest, every mistake in it named."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import functional

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.datamodules.image_files import brief
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.csv_table import named_file, read_csv_table
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few, in_order

if TYPE_CHECKING:
    import pandas as pd

SPLITS = {  # what people call them, in any case
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
COLUMNS = ("path", "client", "label", "split")
UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises on broken files
BYTES_OF_16_BITS = 257  # 65535 / 255


class ImageFiles(BatchDataset):
    """Images (C, H, W) read from disk when they are asked for: the shorter side is resized to H = W and the middle cut
    out; C is 1 (grey) or 3 (RGB). Labels are int64 (n,), or None. ``cache`` keeps the bytes of every image once read, C
    H W each."""

    def __init__(
        self, paths: Sequence[str], labels: Tensor | None, shape: tuple[int, int, int], cache: bool = True
    ) -> None:
        self.paths = list(paths)
        self.labels, self.shape = labels, shape
        self.cache: dict[int, Tensor] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One image, float tensor (C, H, W) in [-1, 1], and its label where there are labels."""
        image = self.pixels(index).float() / 127.5 - 1
        return (image,) if self.labels is None else (image, self.labels[index])

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: [images, float tensor (b, C, H, W) in [-1, 1]] and, where there are labels, int64 (b,)."""
        images = torch.stack([self.pixels(index) for index in indices]).float().div_(127.5).sub_(1)
        return [images] if self.labels is None else [images, self.labels[indices]]

    def pixels(self, index: int) -> Tensor:
        """One image, uint8 tensor (C, H, W). UserError: if the file cannot be read as an image."""
        if self.cache is not None and index in self.cache:
            return self.cache[index]
        try:
            pixels = read_pixels(self.paths[index], self.shape)
        except UNREADABLE as error:
            raise _unreadable(self.paths[index], error) from error
        if self.cache is not None:
            self.cache[index] = pixels
        return pixels


class FolderDataModule(FederatedDataModule):
    """A user's own images: batches ``[images]``, float32 (b, C, H, W) in [-1, 1], or ``[images, labels]``, labels int64
    (b,), where there are labels.

    Args:
        path: a folder ``[SPLIT/]CLIENT/[LABEL/]IMAGE``, where SPLIT is train, val or test, in any case, or training,
            valid, validation, dev or testing (without these folders all images are for training); or a CSV manifest
            with the columns path (relative to the manifest), client and, if wanted, label and split.
        image_size: side of the square that every image is resized and cut to, in pixels.
        color: ``rgb`` or ``grayscale``.
        classes: the labels in the order of their indices; by default those of the images, sorted.
        on_error: an image that cannot be read is refused, or skipped with a warning that names it. To be sure, ``skip``
            decodes every image once at the start; ``refuse`` looks at the files' headers, and at the rest in use.
        cache: keep what was read: image_size^2 bytes per image and channel.
        outside: whether a manifest may name files outside of its folder, by an absolute path, by ``..`` or by a link;
            for manifests that you trust.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        shape: (C, H, W) of an image.
        label_names: the name of label 0, 1, ..., known once the data are loaded.
    """

    def __init__(
        self,
        path: str,
        image_size: int = 32,
        color: Literal["rgb", "grayscale"] = "rgb",
        classes: Sequence[str] | None = None,
        on_error: Literal["refuse", "skip"] = "refuse",
        cache: bool = True,
        outside: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        at_least(1, "data", image_size=image_size)
        self.path, self.classes, self.outside = path, classes, outside
        self.on_error, self.cache = on_error, cache
        self.shape = (3 if color == "rgb" else 1, image_size, image_size)
        self.label_names: list[str] = []

    def load(self) -> ClientData:
        """Find the images and their clients. UserError: names the first mistake in the folder or manifest, see
        ``read_records``, or an unreadable image."""
        import pandas as pd

        with pd.option_context("mode.string_storage", "python"):  # Arrow's strings hold UTF-8 alone; names need not be
            return self._found()

    def _found(self) -> ClientData:
        records = self._readable(read_records(self.path, self.outside))
        self.label_names = self._classes(set(records["label"]) - {""})
        train = self._by_client(records[records["split"] == "train"])
        val = self._by_client(records[records["split"] == "val"])
        test = records[records["split"] == "test"]
        return ClientData(
            train=train,
            val=val or None,
            test=self._dataset(test) if len(test) else None,
            labels={name: d.labels for name, d in train.items() if d.labels is not None} or None,
        )

    def _classes(self, found: set[str]) -> list[str]:
        self.numbers_own_classes = bool(found) and self.classes is None
        if self.classes is None:
            return sorted(found, key=in_order)
        names = [str(name) for name in self.classes]
        if unknown := found - set(names):
            raise UserError(f"{self.path} has images of the class {few(sorted(unknown))}, which data.classes omits")
        return names if found else []

    def _by_client(self, records: "pd.DataFrame") -> dict[str, ImageFiles]:
        return {str(client): self._dataset(own) for client, own in records.groupby("client", sort=True)}

    def _dataset(self, records: "pd.DataFrame") -> ImageFiles:
        number = {name: index for index, name in enumerate(self.label_names)}
        labels = torch.tensor([number[name] for name in records["label"]]) if number else None
        return ImageFiles(records["path"].tolist(), labels, self.shape, self.cache)

    def _readable(self, records: "pd.DataFrame") -> "pd.DataFrame":
        skipped = []
        for path in records["path"]:
            try:
                read_pixels(path, self.shape) if self.on_error == "skip" else check_header(path)
            except UNREADABLE as error:
                if self.on_error == "refuse":
                    raise _unreadable(path, error) from error
                skipped.append(path)
        if skipped:
            rank_zero_warn(f"left out {len(skipped)} unreadable images: {few(skipped)}")
        kept = records[~records["path"].isin(skipped)]
        for client in records["client"][records["split"] == "train"].unique():
            if client not in set(kept["client"][kept["split"] == "train"]):
                raise UserError(f"Client {client} is empty: none of its training images can be read.")
        return kept


def _unreadable(path: str, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read as an image ({brief(error)}): mend or remove it, "
        "or set --data.on_error skip to leave such images out."
    )


def read_records(source: str | Path, outside: bool = False) -> "pd.DataFrame":
    """One row per image, in a folder or CSV file as ``FolderDataModule`` takes it; test rows need no client.

    Args:
        source: the folder or file.
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


def check_header(path: str) -> None:
    """Look at the file's first bytes. OSError, ValueError: one of ``UNREADABLE``: it is no image, or one whose white is
    not known."""
    with Image.open(path) as image:
        _levels(image)


def read_pixels(path: str, shape: tuple[int, int, int]) -> Tensor:
    """Decode an image, resize its shorter side, cut out the middle: uint8 tensor (C, H, W), H = W, C 1 (grey) or 3
    (RGB). Pixels of 16 bits are scaled to 8. Those of 32 bits, whole numbers or not, do not say which of them is white.
    OSError, ValueError: one of ``UNREADABLE``: the file cannot be read, or its white is not known."""
    channels, size, _ = shape
    with Image.open(path) as opened:
        scale = _levels(opened)
        image = ImageOps.exif_transpose(opened)  # photographs state their orientation beside the pixels
        if scale != 1:  # Pillow's own conversion would cut off at 255
            image = Image.fromarray((np.asarray(image) / scale).round().astype(np.uint8))
        image = image.convert("L" if channels == 1 else "RGB")
    return functional.pil_to_tensor(functional.center_crop(functional.resize(image, [size]), [size]))


def _levels(image: Image.Image) -> int:
    """How many of the image's levels make one of 256."""
    of_16_bits = image.mode == "I" and image.format in ("PPM", "PNG")  # Pillow has stretched a PGM's to 65535
    if image.mode.startswith("I;16") or of_16_bits:
        return BYTES_OF_16_BITS
    if image.mode in ("I", "F"):
        kind = "whole" if image.mode == "I" else "real"
        raise ValueError(
            f"its pixels are {kind} numbers of 32 bits, and which of them is white is not said: save it with 8 or 16"
        )
    return 1
