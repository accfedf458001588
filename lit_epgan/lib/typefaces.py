"""Letters and digits of fonts in a folder, drawn as small grey images: a typeface for a person's hand."""

import hashlib
import string
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lit_epgan.lib.cache import alone, cache_folder, load_tensors, save_tensors
from lit_epgan.lib.errors import MissingFileError, UserError

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # in EMNIST's order
SIDE, INK = 28, 24  # of an image, and of the square in it that holds the largest character
FINER = 4  # drawn so many times as large: strokes are not moved to whole pixels
SUFFIXES = {".ttf", ".otf", ".woff"}
NONE = torch.empty(0, len(CHARACTERS), 1, SIDE, SIDE, dtype=torch.uint8)
LIST = Path(__file__).parent.parent / "configs" / "typefaces.txt"  # npm packages and their licences
RECIPE = f"upright fonts, {INK} of {SIDE} pixels, drawn {FINER} times as large"  # kept drawings of another are not read
JUDGES = 6  # every sixth family judges samples


def read_typefaces(folder: str | Path, judges: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """The typefaces in a folder that holds a folder for each family, at any depth.

    A family is drawn in each of its upright fonts. The 62 characters of a font have one size, such that the highest and
    the widest fit into 24 x 24 pixels, and one baseline; each stands in the middle. Fonts without all of the characters
    (another script's, symbols') are passed over, and so is one that draws what another of its family does. Every sixth
    family in alphabetical order is set aside to judge samples. Drawings are kept in the user's cache folder, under a
    digest of the fonts' files.

    Args:
        folder: of the families' folders, with files .ttf, .otf and .woff.
        judges: whether to read those set aside, or all others.

    Returns:
        By family images, uint8 (n, 1, 28, 28) with ink 255 on 0, and their characters' places in ``CHARACTERS``, int64
        (n,).

    Raises:
        MissingFileError: there is no such file.
        UserError: a file is damaged.
    """
    root = Path(folder).expanduser().absolute()
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    chosen = [family for place, family in enumerate(folders) if (place % JUDGES == 0) == judges]
    fonts, counts = _fonts([_font_files(family) for family in chosen])
    if not len(fonts):
        raise MissingFileError(
            f"{root} holds no folder with a font of digits and Latin letters ({', '.join(sorted(SUFFIXES))}). Three "
            f"hundred openly licensed families: npm install --prefix data/typefaces $(cut -d' ' -f1 {LIST}); or say by "
            "--data.data_dir where folders of fonts are, one for each family."
        )
    labels, shares = torch.arange(len(CHARACTERS)), fonts.split(counts.tolist())
    return {
        family.name: (own.flatten(0, 1), labels.repeat(len(own)))
        for family, own in zip(chosen, shares, strict=True)
        if len(own)
    }


def _font_files(family: Path) -> list[Path]:
    return sorted(path for path in family.rglob("*") if path.suffix.lower() in SUFFIXES)


def _fonts(families: list[list[Path]]) -> tuple[Tensor, Tensor]:
    """The fonts of families' files (fonts, 62, 1, 28, 28), and how many each family has (families,): drawn now, or kept
    in the cache from when the same files were drawn."""
    content = hashlib.sha256(RECIPE.encode())
    for files in families:
        content.update(b"family")
        for path in files:
            content.update(_digest(path))
    path = cache_folder() / f"typefaces-{content.hexdigest()[:16]}.pt"
    with alone(path):
        kept = load_tensors(path, ("fonts", "counts"))
        if kept is None:
            drawn_ = [_family(files) for files in families]
            kept = {
                "fonts": torch.cat([NONE, *drawn_]),
                "counts": torch.tensor([len(own) for own in drawn_], dtype=torch.int64),
            }
            save_tensors(kept, path)
    return kept["fonts"], kept["counts"]


def _digest(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise _damaged(path, error) from error


def _family(files: list[Path]) -> Tensor:
    """Its fonts (fonts, 62, 1, 28, 28), each drawing once."""
    fonts: dict[bytes, Tensor] = {}
    for path in files:
        if _is_upright(path):
            images = drawn(path)
            fonts.setdefault(images.numpy().tobytes(), images)
    return torch.stack(list(fonts.values())) if fonts else NONE


def _is_upright(path: Path) -> bool:
    """Whether a font has all characters, and is none of italics. UserError: it cannot be read."""
    from fontTools.ttLib import TTFont, TTLibError

    try:
        with TTFont(path, lazy=True) as font:
            covered = set(map(ord, CHARACTERS)) <= set(font.getBestCmap() or ())
            return covered and not font["OS/2"].fsSelection & 1
    except (TTLibError, OSError, ValueError, LookupError, AttributeError, AssertionError) as error:
        raise _damaged(path, error) from error


def drawn(path: Path) -> Tensor:
    """A font's characters, uint8 (62, 1, 28, 28) with ink 255 on 0. UserError: it cannot be drawn."""
    try:
        boxes = _boxes(_font(path, 100))
        extent = max((boxes[:, 2] - boxes[:, 0]).max(), boxes[:, 3].max() - boxes[:, 1].min()) / FINER
        if not extent:
            raise ValueError("its characters are empty")
        font, boxes = _font(path, 100 * INK / extent), boxes * INK / extent
        baseline = (FINER * SIDE - boxes[:, 1].min() - boxes[:, 3].max()) / 2
        begins = (FINER * SIDE - boxes[:, 0] - boxes[:, 2]) / 2
        images = [_image(c, font, (x, baseline)) for c, x in zip(CHARACTERS, begins, strict=True)]
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return torch.from_numpy(np.stack(images))[:, None]


def _font(path: Path, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)


def _boxes(font: ImageFont.FreeTypeFont) -> np.ndarray:
    """Left, top, right and bottom of the characters' ink (62, 4), from where each begins on the baseline."""
    found = []
    for character in CHARACTERS:
        mask, (right, down) = font.getmask2(character, mode="L", anchor="ls")  # getbbox would count the advance, too
        left, top, end, bottom = mask.getbbox() or (0, 0, 0, 0)
        found.append((left + right, top + down, end + right, bottom + down))
    return np.array(found, dtype=float)


def _image(character: str, font: ImageFont.FreeTypeFont, begin: tuple[float, float]) -> np.ndarray:
    image = Image.new("L", (FINER * SIDE, FINER * SIDE))
    ImageDraw.Draw(image).text(begin, character, fill=255, font=font, anchor="ls")
    return np.asarray(image.reduce(FINER))


def _damaged(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} cannot be read as a font ({error}): mend or remove it.")
