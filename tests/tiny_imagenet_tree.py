"""A miniature of Tiny-ImageNet's published folder."""

from pathlib import Path

import numpy as np
from PIL import Image

WNIDS = ("n02124075", "n01443537", "n04067472")  # as in the published files, not in the order of the folders


def write_tiny_imagenet(root: Path, images: int = 4, val: int = 3) -> None:
    folder = root / "tiny-imagenet-200"
    for number, wnid in enumerate(WNIDS):
        (folder / "train" / wnid / "images").mkdir(parents=True)
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t63\t63\n")
        for i in range(images):
            _write(folder / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", 60 * number + 10 * i, grey=i == 1)
    (folder / "val" / "images").mkdir(parents=True)
    lines = []
    for i in range(val):
        _write(folder / "val" / "images" / f"val_{i}.JPEG", 40 * i)
        lines.append(f"val_{i}.JPEG\t{WNIDS[i % len(WNIDS)]}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    (folder / "test" / "images").mkdir(parents=True)


def _write(path: Path, value: int, grey: bool = False) -> None:
    pixels = np.full((64, 64) if grey else (64, 64, 3), value, dtype=np.uint8)
    Image.fromarray(pixels).save(path, format="jpeg")
