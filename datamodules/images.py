"""Digits, Fashion-MNIST, CIFAR-10, CIFAR-100 and emoji as federations, under a partition of choice."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.datamodules.image_files import read_split
from lit_epgan.datamodules.partition import PartitionKind, hold_out, named, partition, refuse_empty
from lit_epgan.lib.class_splits import Split, split_by_class
from lit_epgan.lib.emoji_package import VENDORS, Vendor, read_emoji, split_by_emoji
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

ImageSetName = Literal["digits", "fashion_mnist", "cifar10", "cifar100", "emoji"]
SHAPES = {"digits": (1, 8, 8), "fashion_mnist": (1, 28, 28)}
SHAPES |= dict.fromkeys(("cifar10", "cifar100", "emoji"), (3, 32, 32))
# The superclass of class 0 (apple), 1 (aquarium fish), ..., 99 (worm), both in alphabetical order; torchvision's reader
# leaves the superclasses out.
SUPERCLASS = (
    (4, 1, 14, 8, 0, 6, 7, 7, 18, 3),
    (3, 14, 9, 18, 7, 11, 3, 9, 7, 11),
    (6, 11, 5, 10, 7, 6, 13, 15, 3, 15),
    (0, 11, 1, 10, 12, 14, 16, 9, 11, 5),
    (5, 19, 8, 8, 15, 13, 14, 17, 18, 10),
    (16, 4, 17, 4, 2, 0, 17, 4, 18, 17),
    (10, 3, 2, 12, 12, 16, 12, 1, 9, 19),
    (2, 10, 0, 1, 16, 12, 9, 13, 15, 13),
    (16, 19, 2, 4, 6, 19, 5, 5, 8, 19),
    (18, 1, 2, 15, 6, 0, 17, 8, 14, 13),
)


class ImageRecords(BatchDataset):
    """Rows (n,) of an image set, uint8 (N, C, H, W) with labels (N,), that stays in memory as bytes, shared by all
    clients; a batch is scaled when read. ``levels`` is the value of white, which becomes 1 (and 0 becomes -1)."""

    def __init__(self, pixels: Tensor, labels: Tensor, rows: Tensor, levels: int = 255) -> None:
        self.pixels, self.labels, self.rows, self.levels = pixels, labels, rows, levels

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One image, float tensor (C, H, W) in [-1, 1], and its label."""
        row = self.rows[index]
        return self._scaled(self.pixels[row]), self.labels[row]

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: [images, float tensor (b, C, H, W) in [-1, 1]; labels, int64 tensor (b,)]."""
        rows = self.rows[indices]
        return [self._scaled(self.pixels[rows]), self.labels[rows]]

    def _scaled(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(self.levels / 2).sub_(1)


class ImageDataModule(FederatedDataModule):
    """A public image set as a federation.

    Args:
        dataset: ``digits`` (1 x 8 x 8, embedded in scikit-learn), ``fashion_mnist`` (1 x 28 x 28), ``cifar10``,
            ``cifar100`` (3 x 32 x 32) or ``emoji`` (3 x 32 x 32, in nine categories; npm packages).
        data_dir: the folder of the files (digits need none).
        download: fetch missing files.
        partition: ``iid``; ``one_class`` (one label per client; more clients than labels share a label's images; with
            fewer the images of the other labels belong to nobody, and the test images are restricted alike);
            ``dirichlet``; ``natural`` (cifar100's groups are its 20 superclasses, the emoji's each vendor's
            categories).
        clients: number of clients.
        beta: concentration of ``dirichlet``.
        split_seed: decides the fixed split of digits and emoji (80 / 20 in each class), the partition and the held-out
            data.
        split: which images train and which test; ``digits`` and ``emoji`` have the choice. ``fixed``: the same for
            every seed. ``tuning``: a fifth of the fixed split's training images take the place of the test images,
            which are not looked at. ``by_seed``: every ``seed`` draws its own test images, among those that tuning did
            not test on.
        partition_by_seed: let the partition depend on ``seed``, too, so that each seed has its own.
        val_fraction: share of each client's images that it holds out as its own validation data.
        vendor: who drew the emoji: ``google``, ``twitter`` or ``both``.
        skin_tones: whether emoji of people are there in six skin tones or in one.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        shape: (C, H, W) of an image.
    """

    def __init__(
        self,
        dataset: ImageSetName = "digits",
        data_dir: str = "data",
        download: bool = False,
        partition: PartitionKind = "one_class",
        clients: int = 10,
        beta: float = 0.5,
        split_seed: int = 7,
        split: Split = "fixed",
        partition_by_seed: bool = False,
        val_fraction: float = 0.0,
        vendor: Vendor = "both",
        skin_tones: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        if dataset not in SHAPES:
            raise UserError(f"There is no image set {dataset!r}: choose one of {', '.join(SHAPES)}.")
        if split != "fixed" and dataset not in ("digits", "emoji"):
            raise UserError(
                f"The split {split!r} is one of digits and emoji: {dataset}'s authors have split their images; use "
                "fixed."
            )
        self.dataset, self.data_dir, self.download = dataset, data_dir, download
        self.partition, self.clients_wanted, self.beta = partition, clients, beta
        self.partition_by_seed, self.split_seed, self.val_fraction = partition_by_seed, split_seed, val_fraction
        self.split: Split = split
        self.vendor: Vendor = vendor
        self.skin_tones = skin_tones
        self.shape: tuple[int, int, int] = SHAPES[dataset]

    def prepare_data(self) -> None:
        """Fetch or unpack the files, on one process only; ``load`` then finds them in place."""
        if self.dataset not in ("digits", "emoji"):
            read_split(self.dataset, self.data_dir, train=False, download=self.download)

    def _source(self) -> str:
        return self.dataset

    def load(self) -> ClientData:
        """Read, split and deal out the images. UserError: if files are missing or damaged, or the partition cannot be
        made."""
        (pixels, labels), (test_pixels, test_labels), levels, groups = self._splits()
        own = [self.seed] if self.partition_by_seed else []
        generator = generator_for(self.split_seed, *own, "partition")
        parts = named(partition(labels, self.partition, self.clients_wanted, generator, self.beta, groups))
        split = {
            name: hold_out(part, self.val_fraction, generator_for(self.split_seed, name, "validation"))
            for name, part in parts.items()
        }
        train = {name: kept for name, (kept, _) in split.items()}
        refuse_empty(train, self.partition)
        known = torch.isin(test_labels, labels[torch.cat(list(parts.values()))])
        test = ImageRecords(test_pixels, test_labels, torch.nonzero(known).flatten(), levels)
        held_by_clients = {
            name: ImageRecords(pixels, labels, out, levels) for name, (_, out) in split.items() if len(out)
        }
        return ClientData(
            train={name: ImageRecords(pixels, labels, rows, levels) for name, rows in train.items()},
            val=held_by_clients or test,  # generative metrics are taken each round; nothing is chosen by them
            test=test,
            labels={name: labels[rows] for name, rows in train.items()},
        )

    def _splits(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], int, Tensor | None]:
        """(pixels, labels) of the training and of the test split, the value of white, the training images' groups."""
        if self.dataset == "digits":
            return *digits_splits(self.split_seed, self.split, self.seed), 16, None
        if self.dataset == "emoji":
            emoji = read_emoji(self.data_dir, self.vendor, self.skin_tones)
            first, last = split_by_emoji(emoji, self.split_seed, self.split, self.seed)
            groups = first.categories * len(VENDORS) + first.vendors
            return (first.pixels, first.categories), (last.pixels, last.categories), 255, groups
        train = read_split(self.dataset, self.data_dir, train=True, download=self.download)
        test = read_split(self.dataset, self.data_dir, train=False, download=self.download)
        return train, test, 255, superclass_of(train[1]) if self.dataset == "cifar100" else None


def digits_splits(
    seed: int, split: Split = "fixed", own_seed: int = 0
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """scikit-learn's 1,797 digits as ((pixels, labels) for training, the same for test), as ``split_by_class`` splits
    them. Pixels are uint8 tensors (n, 1, 8, 8) with values 0 .. 16."""
    from sklearn.datasets import load_digits  # other data sets do without it

    digits = load_digits()
    pixels = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    train, test = split_by_class(labels, seed, split, own_seed)
    return (pixels[train], labels[train]), (pixels[test], labels[test])


def superclass_of(labels: Tensor) -> Tensor:
    """The superclass, 0 .. 19, of every label 0 .. 99; int64 tensors (n,)."""
    return torch.tensor(SUPERCLASS).flatten()[labels]


def check_inverted(share: float) -> None:
    """Refuse what is no share of the users."""
    if not 0 <= share <= 1:
        raise UserError(f"data.inverted is {share}; it is a share of the users, from 0 to 1")


def inverted_users(names: Sequence[str], share: float, seed: int) -> set[str]:
    """The ``share`` of the users whose pixels are inverted, drawn at random from ``seed`` (Augenstein et al. 2020)."""
    order = torch.randperm(len(names), generator=generator_for(seed, "inverted")).tolist()
    return {names[k] for k in order[: round(share * len(names))]}
