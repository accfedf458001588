"""Letters and digits of fonts in a folder, drawn as small grey images: a typeface for a person's hand."""

import string
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from lit_epgan.lib.errors import MissingFileError, UserError

CHARACTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase  # in EMNIST's order
SIDE, INK = 28, 24  # of an image, and of the square in it that holds the largest character
FINER = 4  # drawn so many times as large: strokes are not moved to whole pixels
SUFFIXES = {".ttf", ".otf", ".woff"}
LIST = Path(__file__).parent.parent / "configs" / "typefaces.txt"  # npm packages and their licences
JUDGES = 6  # every sixth family judges samples


def read_typefaces(folder: str | Path, judges: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """The typefaces in a folder that holds a folder for each family, at any depth.

    A family is drawn in each of its upright fonts. The 62 characters of a font have one size, such that the highest and
    the widest fit into 24 x 24 pixels, and one baseline; each stands in the middle. Fonts without all of the characters
    (another script's, symbols') are passed over, and so is one that draws what another of its family does. Every sixth
    family in alphabetical order is set aside to judge samples.

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
    families: dict[str, dict[bytes, Tensor]] = {}
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    for family in (own for place, own in enumerate(folders) if (place % JUDGES == 0) == judges):
        for path in sorted(path for path in family.rglob("*") if path.suffix.lower() in SUFFIXES):
            if _is_upright(path):
                images = drawn(path)
                families.setdefault(family.name, {}).setdefault(images.numpy().tobytes(), images)
    if not families:
        raise MissingFileError(
            f"{root} holds no folder with a font of digits and Latin letters ({', '.join(sorted(SUFFIXES))}). Three "
            f"hundred openly licensed families: npm install --prefix data/typefaces $(cut -d' ' -f1 {LIST}); or say by "
            "--data.data_dir where folders of fonts are, one for each family."
        )
    labels = torch.arange(len(CHARACTERS))
    return {family: (torch.cat(list(fonts.values())), labels.repeat(len(fonts))) for family, fonts in families.items()}


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
