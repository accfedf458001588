"""Image federations: the facts of the digits, the formats of the others in miniature, and missing or damaged files."""

import hashlib
import pickle
import tarfile
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision.datasets.utils as torchvision_files
from PIL import Image
from sklearn.datasets import load_digits
from torchvision.datasets import CIFAR10

from lit_epgan.datamodules import image_files
from lit_epgan.datamodules.images import ImageDataModule, digits_splits, superclass_of
from lit_epgan.datamodules.tiny_imagenet import TinyImageNetDataModule
from lit_epgan.lib.errors import UserError
from tests.cifar_tree import write_cifar
from tests.fashion_tree import write_fashion
from tests.refusals import assert_refused
from tests.tiny_imagenet_tree import WNIDS, write_tiny_imagenet
from tests.traps import Trap


def loaded(**options) -> ImageDataModule:
    datamodule = ImageDataModule(**options)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


@pytest.fixture
def cifar(tmp_path, monkeypatch):
    return write_cifar(tmp_path, monkeypatch)


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__) -> None:
        raise URLError("Temporary failure in name resolution")

    monkeypatch.setattr(torchvision_files, "_get_redirect_url", refuse)
    monkeypatch.setattr(torchvision_files, "_urlretrieve", refuse)


def test_digits_are_scikit_learns_scaled_to_plus_minus_one():
    datamodule = loaded()
    images = torch.cat([dataset.fetch(list(range(len(dataset))))[0] for dataset in datamodule.data.train.values()])
    test = datamodule.data.test
    images = torch.cat([images, test.fetch(list(range(len(test))))[0]])
    assert images.shape == (1797, 1, 8, 8)
    assert datamodule.shape == (1, 8, 8)
    assert images.dtype == torch.float32
    expected = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    order = lambda x: x[np.lexsort(x.numpy().T)]  # noqa: E731
    assert torch.equal(order(images.flatten(1)), order(expected))


def test_the_digits_split_is_fixed_by_its_seed_and_takes_80_percent_of_each_class():
    (_, labels), (_, test_labels) = digits_splits(seed=7)
    train_counts, test_counts = torch.bincount(labels), torch.bincount(test_labels)
    assert torch.equal(train_counts, ((train_counts + test_counts) * 0.8).long())
    assert train_counts.tolist() == [142, 145, 141, 146, 144, 145, 144, 143, 139, 144]
    first, again, other = (digits_splits(seed)[1][0] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    a, b = (loaded(split="by_seed", seed=seed).data.test for seed in (0, 1))
    assert not torch.equal(a.pixels[a.rows], b.pixels[b.rows])
    with pytest.raises(UserError, match="one of digits and emoji: cifar10's authors have split"):
        ImageDataModule(dataset="cifar10", split="tuning")


def test_one_client_per_digit_and_labels_of_what_it_trains_on():
    data = loaded(val_fraction=0.1).data
    for k, (name, dataset) in enumerate(data.train.items()):
        images, labels = dataset.fetch(list(range(len(dataset))))
        assert labels.tolist() == [k] * len(images)
        assert torch.equal(data.labels[name], labels)
        assert len(data.val[name]) == int(0.1 * (len(dataset) + len(data.val[name])))
    assert list(data.train) == [f"client-{k}" for k in range(10)]


def rows_of(images: torch.Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in images]


def test_tuning_tests_on_a_fifth_of_the_training_images_and_drops_the_test_images():
    (train, _), _ = digits_splits(7)
    (kept, kept_labels), (held, held_labels) = digits_splits(7, "tuning")
    assert sorted(rows_of(kept) + rows_of(held)) == sorted(rows_of(train))
    for label in range(10):
        share = (held_labels == label).sum() / ((kept_labels == label).sum() + (held_labels == label).sum())
        assert share == pytest.approx(0.2, abs=0.01)


def test_each_seed_has_test_images_of_its_own_and_none_that_tuning_tested_on():
    everything = sorted(rows_of(torch.cat([part[0] for part in digits_splits(7)])))
    tuned = set(rows_of(digits_splits(7, "tuning")[1][0]))
    first, again, second = (digits_splits(7, "by_seed", seed) for seed in (0, 0, 1))
    assert torch.equal(first[1][0], again[1][0])
    assert set(rows_of(first[1][0])) != set(rows_of(second[1][0]))
    for (train, labels), (test, test_labels) in (first, second):
        assert not tuned & set(rows_of(test))
        assert sorted(rows_of(train) + rows_of(test)) == everything
        assert torch.equal(test_labels.bincount(), digits_splits(7)[1][1].bincount())
        assert len(labels) == len(train)


def test_a_fetched_batch_is_what_the_items_give_and_test_images_are_of_the_digits_held():
    dataset = loaded(partition="iid", clients=3).data.train["client-1"]
    images, labels = dataset.fetch([5, 0, 5])
    for row, index in enumerate([5, 0, 5]):
        image, label = dataset[index]
        assert torch.equal(images[row], image)
        assert labels[row] == label
    data = loaded(clients=2).data
    assert data.test.fetch(list(range(len(data.test))))[1].unique().tolist() == [0, 1]
    assert len(loaded(clients=2, partition="iid").data.test) == 364


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_clients_depend_on_the_split_seed_alone(kind):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = loaded(partition=kind, split_seed=3, seed=0).data.labels
    assert torch.equal(torch.get_rng_state(), before)
    again = loaded(partition=kind, split_seed=3, seed=9).data.labels
    assert all(torch.equal(first[name], own) for name, own in again.items())
    other = loaded(partition=kind, split_seed=4).data.labels
    assert any(not torch.equal(first[name], own) for name, own in other.items())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 4000}, ["400 of 4000 clients", "of label 0", "--data.clients"]),
        ({"partition": "natural"}, ["needs a group"]),
        ({"dataset": "mnist"}, ["mnist", "digits"]),
        ({"val_fraction": 1.5}, ["1.5", "--data.val_fraction"]),
        ({"partition": "dirichlet", "clients": 900, "beta": 0.01}, ["900 clients", "--data.beta"]),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, words):
    with pytest.raises(UserError) as error:
        loaded(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("compressed", [False, True])
def test_fashion_mnist_is_read_plain_or_as_published(tmp_path, compressed):
    write_fashion(tmp_path, compressed)
    datamodule = loaded(dataset="fashion_mnist", data_dir=str(tmp_path))
    images, labels = datamodule.data.train["client-3"].fetch([0, 1])
    assert images.shape == (2, *datamodule.shape) == (2, 1, 28, 28)
    assert labels.tolist() == [3, 3]
    assert torch.equal(images[:, 0, 0, 0], torch.tensor([3, 13]) / 127.5 - 1)
    assert len(datamodule.data.test) == 20


def test_missing_fashion_files_are_named_with_their_folder_and_the_option(tmp_path):
    folder = write_fashion(tmp_path)
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError) as error:
        loaded(dataset="fashion_mnist", data_dir=str(tmp_path))
    message = str(error.value)
    assert "place t10k-labels-idx1-ubyte.gz " in message
    assert str(folder) in message
    assert "--data.download true" in message
    assert "train-images" not in message
    assert "\n" not in message


@pytest.mark.parametrize("keep", [0, 3, 500])
def test_a_truncated_fashion_file_is_refused(tmp_path, keep):
    path = write_fashion(tmp_path) / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused("damaged", loaded, dataset="fashion_mnist", data_dir=str(tmp_path))


def test_archives_that_are_truncated_are_refused_and_leave_nothing_behind(tmp_path):
    path = write_fashion(tmp_path, compressed=True) / "train-labels-idx1-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"train-labels-idx1-ubyte\.gz cannot be unpacked"):
        loaded(dataset="fashion_mnist", data_dir=str(tmp_path))
    assert not list(path.parent.glob("train-labels-idx1-ubyte*part"))
    assert not path.with_suffix("").exists()
    (tmp_path / CIFAR10.filename).write_bytes(b"half")
    assert_refused(r"cifar-10-python\.tar\.gz is incomplete", loaded, dataset="cifar10", data_dir=str(tmp_path))


def test_cifar_channels_come_first_and_natural_clients_are_superclasses(cifar):
    datamodule = loaded(dataset="cifar10", data_dir=str(cifar))
    images, labels = datamodule.data.train["client-7"].fetch([0, 4])
    assert images.shape == (2, *datamodule.shape) == (2, 3, 32, 32)
    assert torch.equal(images[0, :, 5, 6], torch.tensor([10, 20, 30]) / 127.5 - 1)
    assert labels.tolist() == [7, 7]
    assert datamodule.data.train["client-7"].pixels.dtype == torch.uint8
    data = loaded(dataset="cifar100", data_dir=str(cifar), partition="natural", clients=20).data
    assert data.labels["client-00"].unique().tolist() == [4, 30, 55, 72, 95]  # beaver, dolphin, otter, seal, whale
    assert torch.equal(torch.bincount(superclass_of(torch.arange(100))), torch.full((20,), 5))


def test_an_archive_in_the_data_folder_is_unpacked(cifar, tmp_path_factory, monkeypatch, offline):
    root = tmp_path_factory.mktemp("archive")
    with tarfile.open(root / CIFAR10.filename, "w:gz") as archive:
        archive.add(cifar / CIFAR10.base_folder, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "tgz_md5", hashlib.md5((root / CIFAR10.filename).read_bytes()).hexdigest())
    assert len(loaded(dataset="cifar10", data_dir=str(root)).data.test) == 10


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_missing_cifar_says_which_file_to_put_where(tmp_path, name):
    with pytest.raises(UserError) as error:
        ImageDataModule(dataset=name, data_dir=str(tmp_path)).prepare_data()
    message = str(error.value)
    for words in (f"place {name[:5]}-{name[5:]}-python.tar.gz ", f"in {tmp_path}", "--data.download true"):
        assert words in message
    assert "\n" not in message


@pytest.mark.parametrize("victim", ["data_batch_3", "test_batch", "batches.meta"])
def test_no_file_is_unpickled_before_its_sum_is_right(cifar, victim):
    marker = cifar / "code-was-run"
    trap = pickle.dumps(Trap(marker))
    pickle.loads(trap)
    assert marker.exists(), "the trap must work, or this test shows nothing"
    marker.unlink()
    (cifar / CIFAR10.base_folder / victim).write_bytes(trap)
    for train in (True, False):
        with pytest.raises(UserError, match=f"{victim} in .* differs from the published file"):
            image_files.read_split("cifar10", cifar, train=train, download=False)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "file"), [("cifar10", "cifar-10-python.tar.gz"), ("fashion_mnist", "train-images-idx3-ubyte.gz")]
)
def test_a_download_without_network_says_what_to_place_by_hand(tmp_path, offline, name, file):
    with pytest.raises(UserError) as error:
        loaded(dataset=name, data_dir=str(tmp_path), download=True)
    message = str(error.value)
    assert "could not be downloaded" in message
    assert "name resolution" in message
    assert file in message
    assert str(tmp_path) in message
    assert "\n" not in message


def loaded_tiny(root: Path, **options) -> TinyImageNetDataModule:
    data = TinyImageNetDataModule(**({"data_dir": str(root), "clients": 3, "partition": "iid"} | options))
    data.setup()
    return data


def test_every_training_image_belongs_to_one_client_with_the_label_of_its_folder(tmp_path):
    write_tiny_imagenet(tmp_path, images=6)
    data = loaded_tiny(tmp_path)
    files = [
        (path, int(label)) for d in data.data.train.values() for path, label in zip(d.paths, d.labels, strict=True)
    ]
    assert len(files) == len({path for path, _ in files}) == 6 * len(WNIDS)
    assert data.label_names == sorted(WNIDS)
    for path, label in files:
        assert Path(path).parent.parent.name == data.label_names[label]


def test_images_are_what_the_files_show(tmp_path):
    """The tree's grey values say class and number; one is a greyscale JPEG, as some of the published ones."""
    write_tiny_imagenet(tmp_path, images=4)
    client = next(iter(loaded_tiny(tmp_path, clients=1).data.train.values()))
    images, labels = client.fetch(list(range(len(client))))
    assert images.shape == (4 * len(WNIDS), 3, 64, 64)
    for path, image, label in zip(client.paths, images, labels, strict=True):
        grey = float(np.asarray(Image.open(path).convert("L")).mean()) / 127.5 - 1
        assert float(image.mean()) == pytest.approx(grey, abs=0.02)
        assert sorted(WNIDS)[int(label)] in path


def test_the_labels_of_the_validation_images_are_those_of_the_annotations(tmp_path):
    write_tiny_imagenet(tmp_path, val=5)
    val = loaded_tiny(tmp_path).data.val
    lines = (tmp_path / "tiny-imagenet-200/val/val_annotations.txt").read_text().splitlines()
    expected = {line.split("\t")[0]: sorted(WNIDS).index(line.split("\t")[1]) for line in lines}
    assert {Path(path).name: int(label) for path, label in zip(val.paths, val.labels, strict=True)} == expected
    assert len(expected) == 5


def test_another_size_and_another_partition(tmp_path):
    write_tiny_imagenet(tmp_path)
    data = loaded_tiny(tmp_path, image_size=32, partition="one_class", clients=len(WNIDS))
    assert data.shape == (3, 32, 32)
    for label, d in enumerate(data.data.train.values()):
        assert d[0][0].shape == (3, 32, 32)
        assert d.labels.unique().tolist() == [label]
    first = loaded_tiny(tmp_path, split_seed=1).data.labels["client-0"]
    assert torch.equal(first, loaded_tiny(tmp_path, split_seed=1, seed=4).data.labels["client-0"])


def test_what_is_missing_is_named(tmp_path):
    assert_refused(r"not in .*tiny-imagenet-200: unpack http", loaded_tiny, tmp_path)
    write_tiny_imagenet(tmp_path)
    annotations = tmp_path / "tiny-imagenet-200/val/val_annotations.txt"
    annotations.write_text("val_0.JPEG\tn99999999\t0\t0\t63\t63\n")
    with pytest.raises(UserError, match="'n99999999', which has no folder"):
        loaded_tiny(tmp_path).data  # noqa: B018
    annotations.unlink()
    with pytest.raises(UserError, match=r"val_annotations.txt is missing"):
        loaded_tiny(tmp_path).data  # noqa: B018
    assert_refused("image_size is 0", TinyImageNetDataModule, image_size=0)


def test_an_annotation_names_images_of_its_folder(tmp_path):
    write_tiny_imagenet(tmp_path)
    annotations = tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt"
    annotations.write_text(annotations.read_text().replace("val_1.JPEG", "../../elsewhere.JPEG"))
    with pytest.raises(UserError, match=r"names the image '\.\./\.\./elsewhere\.JPEG', which is not in its folder"):
        TinyImageNetDataModule(str(tmp_path)).load()
