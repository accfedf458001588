"""The emoji of two npm packages, read from the packed files; nothing is unpacked to disk.

Google's pictures (Noto) are under the Apache License 2.0, Twitter's (Twemoji) under CC-BY 4.0; the packages' own
data are under the MIT licence.
"""

import gzip
import io
import json
import tarfile
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from lit_epgan.lib.class_splits import Split, split_by_class
from lit_epgan.lib.errors import MissingFileError, UserError

Vendor = Literal["google", "twitter", "both"]

VENDORS = ("google", "twitter")
VERSION = "16.0.0"
CATEGORIES = (
    *("Activities", "Animals & Nature", "Flags", "Food & Drink", "Objects"),
    *("People & Body", "Smileys & Emotion", "Symbols", "Travel & Places"),
)
LEFT_OUT = "Component"  # five swatches of skin tones: too few to learn from, and nothing to draw
PUBLISHED_SIDE = 64
SIDE = 32
MOST_UNPACKED = 2**28  # bytes; the packages have 7e7
MOST_BYTES = {".json": 2**23, ".png": 2**16}  # of a file that is read; the packages' largest have 1.3e6 and 9e3
# what a file raises that is not as published
DAMAGED = (
    *(tarfile.TarError, zlib.error, OSError, EOFError, SyntaxError, Image.DecompressionBombError),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError),
)


@dataclass(frozen=True)
class Emoji:
    """Pictures of emoji, uint8 (n, 3, 32, 32), and int64 (n,): their places in ``CATEGORIES``, in Unicode's order,
    which vendors and skin tones share, and in ``VENDORS``."""

    pixels: Tensor
    categories: Tensor
    numbers: Tensor
    vendors: Tensor

    def rows(self, chosen: Tensor) -> "Emoji":
        """Some of the pictures; ``chosen`` is a bool tensor (n,)."""
        return Emoji(self.pixels[chosen], self.categories[chosen], self.numbers[chosen], self.vendors[chosen])


def read_emoji(data_dir: str | Path, vendor: Vendor = "both", skin_tones: bool = False) -> Emoji:
    """The emoji of one vendor or of both, on white, at half of their published side.

    Args:
        data_dir: the folder that holds the packed files, such as ``emoji-datasource-google-16.0.0.tgz``.
        vendor: whose.
        skin_tones: also the same people and hands in five further tones, about twice as many pictures.

    Raises:
        MissingFileError: a packed file is not there.
        UserError: one is damaged or another package, or there is no such vendor.
    """
    if vendor not in (*VENDORS, "both"):
        raise UserError(f"There are no emoji of the vendor {vendor!r}: choose google, twitter or both.")
    folder = Path(data_dir).expanduser().absolute()
    paths = {one: folder / f"{_package(one)}-{VERSION}.tgz" for one in VENDORS if vendor in (one, "both")}
    if missing := [one for one, path in paths.items() if not path.is_file()]:
        files = " and ".join(paths[one].name for one in missing)
        raise MissingFileError(f"The emoji are in {files}, which {folder} lacks: {_fetch(missing)} in that folder.")
    parts = [_read(path, one, skin_tones) for one, path in paths.items()]
    return Emoji(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Emoji)))


def split_by_emoji(emoji: Emoji, split_seed: int, split: Split = "fixed", own_seed: int = 0) -> tuple[Emoji, Emoji]:
    """The pictures that train and those that test: of every category 80 % and 20 % of the emoji, as in
    ``split_by_class``. All pictures of an emoji, whoever has drawn them and in whatever tone, are on the same side."""
    numbers, places = emoji.numbers.unique(return_inverse=True)
    categories = torch.zeros_like(numbers).scatter_(0, places, emoji.categories)
    train, test = split_by_class(categories, split_seed, split, own_seed)
    return emoji.rows(torch.isin(places, train)), emoji.rows(torch.isin(places, test))


def _read(path: Path, vendor: str, skin_tones: bool) -> Emoji:
    """The emoji of one packed file, in the order of its list."""
    try:
        files = _files(path, vendor)
        about = json.loads(files["package.json"])
        if (about["name"], about["version"]) != (_package(vendor), VERSION):
            raise ValueError(f"it is {about['name']} {about['version']}")
        entries = [entry for entry in json.loads(files["emoji.json"]) if entry["category"] != LEFT_OUT]
        pictures = [(entry, one) for entry in entries for one in _pictures(entry, skin_tones)]
        pixels = [_on_white(files[f"img/{vendor}/64/{one['image']}"]) for _, one in pictures]
        categories = torch.tensor([CATEGORIES.index(entry["category"]) for entry, _ in pictures])
        numbers = torch.tensor([int(entry["sort_order"]) for entry, _ in pictures])
        vendors = torch.full_like(numbers, VENDORS.index(vendor))
        return Emoji(torch.from_numpy(np.stack(pixels)), categories, numbers, vendors)
    except DAMAGED as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(
            f"{path} is not {_package(vendor)} {VERSION} as it was published ({reason}): delete it, and "
            f"{_fetch([vendor])} in that folder anew."
        ) from error


def _files(path: Path, vendor: str) -> dict[str, bytes]:
    """What is to be read of a packed file, by name; names are looked up and never opened on disk."""
    with gzip.open(path) as packed:
        content = packed.read(MOST_UNPACKED + 1)
    if len(content) > MOST_UNPACKED:
        raise ValueError(f"it unpacks to more than {MOST_UNPACKED:,} bytes")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        for member in archive:
            if not member.isreg():
                raise ValueError(f"{member.name} is no plain file")
            name = member.name.removeprefix("package/")
            if name in ("package.json", "emoji.json") or name.startswith(f"img/{vendor}/64/"):
                if member.size > MOST_BYTES[Path(name).suffix]:
                    raise ValueError(f"{name} has {member.size:,} bytes")
                files[name] = archive.extractfile(member).read()  # type: ignore[union-attr]  # a plain file
    return files


def _pictures(entry: dict[str, Any], skin_tones: bool) -> list[dict[str, Any]]:
    """The entry of an emoji and, where wanted, those of its skin tones."""
    return [entry, *(entry.get("skin_variations", {}).values() if skin_tones else [])]


def _on_white(content: bytes) -> np.ndarray:
    """A PNG's pixels, uint8 array (3, 32, 32): each is the mean of four, over white where they are transparent."""
    with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
        if image.size != (PUBLISHED_SIDE, PUBLISHED_SIDE):
            raise ValueError(f"a picture has {image.size[0]} x {image.size[1]} pixels")
        white = Image.new("RGBA", image.size, "white")
        opaque = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return np.asarray(opaque.reduce(PUBLISHED_SIDE // SIDE)).transpose(2, 0, 1)


def _package(vendor: str) -> str:
    return f"emoji-datasource-{vendor}"


def _fetch(vendors: list[str]) -> str:
    packages = " ".join(f"{_package(vendor)}@{VERSION}" for vendor in vendors)
    return f"run `npm pack {packages}`"
