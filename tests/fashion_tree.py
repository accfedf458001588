"""A miniature Fashion-MNIST in its published format."""

import gzip
import struct
from pathlib import Path

import numpy as np

FASHION = {"train-images-idx3-ubyte": 40, "train-labels-idx1-ubyte": 40} | {
    "t10k-images-idx3-ubyte": 20,
    "t10k-labels-idx1-ubyte": 20,
}


def write_fashion(root: Path, compressed: bool = False) -> Path:
    """A tree of the published format: big-endian idx files; image i is filled with i, its label is i modulo 10."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, n in FASHION.items():
        values = np.arange(n, dtype=np.uint8)
        if "images" in name:
            content = struct.pack(">IIII", 0x803, n, 28, 28) + values.repeat(28 * 28).tobytes()
        else:
            content = struct.pack(">II", 0x801, n) + (values % 10).tobytes()
        path = folder / (f"{name}.gz" if compressed else name)
        path.write_bytes(gzip.compress(content) if compressed else content)
    return folder
