"""A miniature CIFAR-10 and CIFAR-100 in their published format."""

import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import CIFAR10, CIFAR100


def cifar_batch(labels: list[int], key: str) -> bytes:
    """A pickled batch of the published format: rows of 3,072 bytes, red, green and blue plane of a 32 x 32 image."""
    planes = np.repeat(np.array([10, 20, 30], np.uint8), 1024)
    return pickle.dumps({"data": np.tile(planes, (len(labels), 1)), key: labels}, protocol=2)


def write_cifar(root: Path, patch: pytest.MonkeyPatch) -> Path:
    """One image of every class in every batch; the files' sums stand in for the published ones."""

    def write(kind: type[CIFAR10], name: str, content: bytes) -> list[str]:
        path = root / kind.base_folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return [name, hashlib.md5(content).hexdigest()]

    for kind, classes, key in ((CIFAR10, 10, "labels"), (CIFAR100, 100, "fine_labels")):
        labels = list(range(classes))
        train = [write(kind, name, cifar_batch(labels, key)) for name, _ in kind.train_list]
        test = [write(kind, name, cifar_batch(labels, key)) for name, _ in kind.test_list]
        names = pickle.dumps({kind.meta["key"]: [f"class {c}" for c in labels]}, protocol=2)
        meta = dict(zip(("filename", "md5"), write(kind, kind.meta["filename"], names), strict=True))
        patch.setattr(kind, "train_list", train)
        patch.setattr(kind, "test_list", test)
        patch.setattr(kind, "meta", kind.meta | meta)
    return root
