"""An image file's pixels, whatever it stores them as."""

import numpy as np
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import functional

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises on broken files
BYTES_OF_16_BITS = 257  # 65535 / 255


def check_header(path: str) -> None:
    """Look at the file's first bytes.

    Raises:
        OSError, ValueError: one of ``UNREADABLE``: it is no image, or one whose white is not known.
    """
    with Image.open(path) as image:
        _levels(image)


def read_pixels(path: str, shape: tuple[int, int, int]) -> Tensor:
    """Decode an image, resize its shorter side, cut out the middle: uint8 tensor (C, H, W).

    Pixels of 16 bits are scaled to 8. Pixels of 32 bits, whole numbers or not, do not say which of them is white.

    Args:
        path: the file.
        shape: (C, H, W) with H = W; C is 1 (grey) or 3 (RGB).

    Raises:
        OSError, ValueError: one of ``UNREADABLE``: the file cannot be read, or its white is not known.
    """
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
