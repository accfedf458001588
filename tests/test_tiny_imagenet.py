"""Tiny-ImageNet from a miniature of its published folder."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lit_epgan.datamodules.tiny_imagenet import TinyImageNetDataModule
from lit_epgan.errors import UserError
from tests.tiny_imagenet_tree import WNIDS, write_tiny_imagenet


def loaded(root: Path, **options: Any) -> TinyImageNetDataModule:
    data = TinyImageNetDataModule(**({"data_dir": str(root), "clients": 3, "partition": "iid"} | options))
    data.setup()
    return data


def test_every_training_image_belongs_to_one_client_with_the_label_of_its_folder(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, images=6)
    data = loaded(tmp_path)
    files = [
        (path, int(label)) for d in data.data.train.values() for path, label in zip(d.paths, d.labels, strict=True)
    ]
    assert len(files) == len({path for path, _ in files}) == 6 * len(WNIDS)
    assert data.label_names == sorted(WNIDS)
    for path, label in files:
        assert Path(path).parent.parent.name == data.label_names[label]


def test_images_are_what_the_files_show(tmp_path: Path) -> None:
    """The tree's grey values say class and number; one is a greyscale JPEG, as some of the published ones."""
    write_tiny_imagenet(tmp_path, images=4)
    client = next(iter(loaded(tmp_path, clients=1).data.train.values()))
    images, labels = client.fetch(list(range(len(client))))
    assert images.shape == (4 * len(WNIDS), 3, 64, 64)
    for path, image, label in zip(client.paths, images, labels, strict=True):
        grey = float(np.asarray(Image.open(path).convert("L")).mean()) / 127.5 - 1
        assert float(image.mean()) == pytest.approx(grey, abs=0.02)
        assert sorted(WNIDS)[int(label)] in path


def test_the_labels_of_the_validation_images_are_those_of_the_annotations(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path, val=5)
    val = loaded(tmp_path).data.val
    lines = (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").read_text().splitlines()
    expected = {line.split("\t")[0]: sorted(WNIDS).index(line.split("\t")[1]) for line in lines}
    assert {Path(path).name: int(label) for path, label in zip(val.paths, val.labels, strict=True)} == expected
    assert len(expected) == 5


def test_another_size_and_another_partition(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    data = loaded(tmp_path, image_size=32, partition="one_class", clients=len(WNIDS))
    assert data.shape == (3, 32, 32)
    for label, d in enumerate(data.data.train.values()):
        assert d[0][0].shape == (3, 32, 32)
        assert d.labels.unique().tolist() == [label]
    first = loaded(tmp_path, split_seed=1).data.labels["client-0"]
    assert torch.equal(first, loaded(tmp_path, split_seed=1, seed=4).data.labels["client-0"])


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"not in .*tiny-imagenet-200: unpack http"):
        loaded(tmp_path)
    write_tiny_imagenet(tmp_path)
    annotations = tmp_path / "tiny-imagenet-200/val/val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn99999999\t0\t0\t63\t63\n")
    with pytest.raises(UserError, match="'n99999999', which has no folder"):
        loaded(tmp_path).data  # noqa: B018
    annotations.unlink()
    with pytest.raises(UserError, match=r"val_annotations.txt is missing"):
        loaded(tmp_path).data  # noqa: B018
    with pytest.raises(UserError, match="image_size is 0"):
        TinyImageNetDataModule(image_size=0)


def test_an_annotation_names_images_of_its_folder(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    annotations = tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("val_1.JPEG", "../../elsewhere.JPEG"))
    with pytest.raises(UserError, match=r"names the image '\.\./\.\./elsewhere\.JPEG', which is not in its folder"):
        TinyImageNetDataModule(str(tmp_path)).load()
