"""Miniatures of data sorted by users, in their public layouts."""

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

SIZES = {"f0001_41": 3, "f0002_02": 5, "f0003_10": 2, "f0004_07": 4}


def images(name: str) -> tuple[np.ndarray, np.ndarray]:
    """One writer's, as both public sets have them: paper is 1, ink 0."""
    generator = np.random.default_rng(sum(map(ord, name)))
    x = np.ones((SIZES[name], 28, 28), dtype=np.float32)
    x[:, 8:20, 10:18] = generator.integers(0, 256, (SIZES[name], 12, 8)) / 255
    return x, generator.integers(0, 62, SIZES[name])


def leaf_content(names: list[str]) -> dict[str, Any]:
    data = {n: {"x": x.reshape(-1, 784).tolist(), "y": y.tolist()} for n in names for x, y in [images(n)]}
    return {"users": names, "num_samples": [SIZES[n] for n in names], "user_data": data}


def write_leaf(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for k, names in enumerate((list(SIZES)[:2], list(SIZES)[2:])):
        (folder / f"all_data_{k}_niid_0_keep_0.json").write_text(json.dumps(leaf_content(names)))


def write_emnist(folder: Path, file: str = "fed_emnist_train.h5") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / file, "w") as out:
        for name in SIZES:
            x, y = images(name)
            out.create_dataset(f"examples/{name}/pixels", data=x)
            out.create_dataset(f"examples/{name}/label", data=y.astype(np.int32))
