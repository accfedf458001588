"""Tiny-ImageNet from its published folder as a federation."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.folder import ImageFiles
from lit_epgan.datamodules.partition import PartitionKind, named, partition
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

FOLDER = "tiny-imagenet-200"
SOURCE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


class TinyImageNetDataModule(FederatedDataModule):
    """Tiny-ImageNet (Le and Yang 2015): 200 classes, 500 training and 50 validation images of each, 3 x 64 x 64.

    The published test images have no labels; the validation images are for evaluation.

    Args:
        data_dir: the folder that holds ``tiny-imagenet-200``, as unpacked: ``train/WNID/images/*.JPEG``, ``val/images``
            and ``val/val_annotations.txt``.
        image_size: side in pixels that images are resized to.
        partition: ``iid``, ``one_class`` or ``dirichlet``.
        clients: number of clients.
        beta: concentration of ``dirichlet``.
        split_seed: decides the partition.
        cache: keep what was read: 12 kB an image at 64 x 64.
        download: of no effect, since the archive is placed by hand; taken so that one command line fits every
            configuration.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        shape: (3, image_size, image_size).
        label_names: the WordNet id of label 0, 1, ..., known once the data are loaded.
    """

    def __init__(
        self,
        data_dir: str = "data",
        image_size: int = 64,
        partition: PartitionKind = "dirichlet",
        clients: int = 10,
        beta: float = 0.5,
        split_seed: int = 7,
        cache: bool = True,
        download: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        at_least(1, "data", image_size=image_size)
        self.folder = Path(data_dir).expanduser() / FOLDER
        self.shape = (3, image_size, image_size)
        self.partition, self.clients_wanted, self.beta = partition, clients, beta
        self.split_seed, self.cache = split_seed, cache
        self.label_names: list[str] = []

    def load(self) -> ClientData:
        """Find the images and deal them out; they are read when they are used. UserError: something of the published
        folder is missing, or the partition cannot be made."""
        paths, labels = self._train()
        generator = generator_for(self.split_seed, "partition")
        rows = named(partition(labels, self.partition, self.clients_wanted, generator, self.beta))
        evaluation = self._files(*self._val())
        train = {name: self._files([paths[i] for i in part], labels[part]) for name, part in rows.items()}
        return ClientData(train, evaluation, evaluation, {name: labels[part] for name, part in rows.items()})

    def _files(self, paths: list[str], labels: Tensor) -> ImageFiles:
        return ImageFiles(paths, labels, self.shape, self.cache)

    def _train(self) -> tuple[list[str], Tensor]:
        classes = sorted(path.parent for path in self.folder.glob("train/*/images"))
        if not classes:
            raise UserError(
                f"Tiny-ImageNet is not in {self.folder}: unpack {SOURCE} in {self.folder.parent}, so that "
                f"{FOLDER}/train/n01443537/images is there, or set --data.data_dir."
            )
        self.label_names = [path.name for path in classes]
        files = [(str(file), label) for label, path in enumerate(classes) for file in _jpegs(path / "images")]
        return [file for file, _ in files], torch.tensor([label for _, label in files])

    def _val(self) -> tuple[list[str], Tensor]:
        """The images that ``val_annotations.txt`` names: file name, WordNet id, and a box that is not needed."""
        annotations = self.folder / "val" / "val_annotations.txt"
        if not annotations.is_file():
            raise UserError(f"{annotations} is missing: unpack {SOURCE} anew in {self.folder.parent}.")
        number = {name: label for label, name in enumerate(self.label_names)}
        paths, labels = [], []
        for line in annotations.read_text().splitlines():
            name, wnid = line.split("\t")[:2]
            if wnid not in number:
                raise UserError(
                    f"{annotations} names the class {wnid!r}, which has no folder in {self.folder / 'train'}."
                )
            if Path(name).name != name:
                raise UserError(f"{annotations} names the image {name!r}, which is not in its folder.")
            paths.append(str(annotations.parent / "images" / name))
            labels.append(number[wnid])
        return paths, torch.tensor(labels)


def _jpegs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
