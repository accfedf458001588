"""A miniature of the packed emoji packages."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_epgan.lib.emoji_package import CATEGORIES

EACH = 5  # emoji of a category
TONES = 2  # further skin tones of the first person


def write_emoji(root: Path, vendors: Iterable[str] = ("google", "twitter")) -> None:
    """Packed files of five emoji in each category and one swatch; every picture is of one colour, ``colour_of``'s."""
    for vendor in vendors:
        write_package(root, vendor, published(vendor))


def published(vendor: str) -> dict[str, bytes]:
    about = {"name": f"emoji-datasource-{vendor}", "version": "16.0.0"}
    pictures = {
        f"img/{vendor}/64/{entry['image']}": picture(colour_of(entry["image"], vendor)) for entry in all_pictures()
    }
    return {
        "package.json": json.dumps(about).encode(),
        "emoji.json": json.dumps(entries()).encode(),
        f"img/{vendor}/sheets/64.png": b"never looked at",
        **pictures,
    }


def entries() -> list[dict[str, Any]]:
    found = [
        {"image": f"{category}-{k}.png", "category": name, "sort_order": 1 + len(CATEGORIES) * k + category}
        for k in range(EACH)
        for category, name in enumerate(CATEGORIES)
    ]
    person = next(entry for entry in found if entry["category"] == "People & Body")
    person["skin_variations"] = {f"tone-{t}": {"image": f"tone-{t}.png"} for t in range(TONES)}
    return [*found, {"image": "swatch.png", "category": "Component", "sort_order": 999}]


def all_pictures() -> list[dict[str, Any]]:
    return [one for entry in entries() for one in (entry, *entry.get("skin_variations", {}).values())]


def colour_of(image: str, vendor: str) -> tuple[int, int, int]:
    first, second = image.removesuffix(".png").split("-") if "-" in image else ("9", "0")
    return (10 * int(first) if first.isdigit() else 200, 20 * int(second), 100 if vendor == "google" else 50)


def picture(colour: tuple[int, ...], side: int = 64) -> bytes:
    pixels = np.tile(np.array(colour, dtype=np.uint8), (side, side, 1))
    return png(Image.fromarray(pixels))


def png(image: Image.Image) -> bytes:
    content = io.BytesIO()
    image.save(content, format="png")
    return content.getvalue()


def write_package(root: Path, vendor: str, files: dict[str, bytes], link: str | None = None) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    path = root / f"emoji-datasource-{vendor}-16.0.0.tgz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        if link is not None:
            member = tarfile.TarInfo(f"package/{link}")
            member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
            archive.addfile(member)
    return path
