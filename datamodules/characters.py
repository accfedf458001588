"""Digits and letters, a hand or a typeface for a client: EMNIST in LEAF's JSON and in TFF's HDF5, and fonts."""

import json
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.image_files import brief
from lit_epgan.datamodules.images import ImageRecords, check_inverted, inverted_users
from lit_epgan.datamodules.partition import check_dealing, deal
from lit_epgan.datamodules.tff_files import hdf5_examples
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.class_splits import Split
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.text import few
from lit_epgan.lib.typefaces import read_typefaces

SIDE, CLASSES = 28, 62  # of EMNIST: digits, capital and small letters
LEAF = "https://github.com/TalwalkarLab/leaf (data/femnist: ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample)"
TFF = "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2"


class Own(NamedTuple):
    """One user's images, uint8 (n, 1, 28, 28) with ink 255 on 0, and labels, int64 (n,)."""

    pixels: Tensor
    labels: Tensor


class ImagesByUser(FederatedDataModule):
    """Base of digits and letters: users are dealt into clients and those held out, images stay in memory as bytes.

    Args:
        data_dir: the folder of the files.
        clients: how many users take part, drawn at random; by default all.
        held_out: share of all users who take part in nothing, and whose images are the validation and test data.
        iid_clients: to how many clients the images of all who take part are dealt at random: as many as users for the
            control of a claim about users, 1 for all images in one place. By default a user is a client.
        inverted: share of the clients whose pixels are multiplied by -1; of those held out none are.
        split_seed: decides who is held out, who takes part, and whose pixels are inverted.
        split: who is held out. ``fixed``: the same for every seed. ``tuning``: others, as many. ``by_seed``: every
            ``seed`` draws its own, among all but those of ``tuning``.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        shape: (C, H, W) of an image.
    """

    shape = (1, SIDE, SIDE)

    def __init__(
        self,
        data_dir: str = "data",
        clients: int | None = None,
        held_out: float = 0.1,
        iid_clients: int | None = None,
        inverted: float = 0.0,
        split_seed: int = 7,
        split: Split = "fixed",
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        check_dealing(clients, held_out)
        check_inverted(inverted)
        at_least(1, self, iid_clients=iid_clients)
        self.data_dir = Path(data_dir).expanduser()
        self.clients_wanted, self.held_out, self.iid_clients = clients, held_out, iid_clients
        self.inverted, self.split_seed = inverted, split_seed
        self.split: Split = split

    @abstractmethod
    def read(self) -> Mapping[str, Own]:
        """Every user's images. UserError: files are missing or not what they should be."""

    def load(self) -> ClientData:
        """Deal the users: images, float tensors (n, 1, 28, 28) in [-1, 1], background -1, and labels (n,)."""
        users = {name: own for name, own in self.read().items() if len(own.labels)}
        names, others = deal(sorted(users), self.held_out, self.clients_wanted, self.split_seed, self.split, self.seed)
        taking_part = {name: users[name] for name in names}
        if self.iid_clients:
            taking_part = self._dealt_at_random(taking_part)
        inverted = inverted_users(list(taking_part), self.inverted, self.split_seed)
        held_out: Dataset | None = ConcatDataset([_records(users[name]) for name in others]) if others else None
        return ClientData(
            train={name: _records(own, name in inverted) for name, own in taking_part.items()},
            val=held_out,
            test=held_out,
            labels={name: own.labels for name, own in taking_part.items()},
        )

    def _dealt_at_random(self, users: Mapping[str, Own]) -> dict[str, Own]:
        """UserError: there are fewer images than clients."""
        pixels, labels = map(torch.cat, zip(*users.values(), strict=True))
        clients = self.iid_clients or 1
        if clients > len(labels):
            raise UserError(f"{len(labels)} images cannot be dealt to {clients} clients: set --data.iid_clients lower.")
        parts = torch.randperm(len(labels), generator=generator_for(self.split_seed, "iid")).tensor_split(clients)
        return {f"iid-{k:0{len(str(clients - 1))}d}": Own(pixels[part], labels[part]) for k, part in enumerate(parts)}


def _records(own: Own, inverted: bool = False) -> ImageRecords:
    pixels = 255 - own.pixels if inverted else own.pixels
    return ImageRecords(pixels, own.labels, torch.arange(len(pixels)))


def _own_images(pixels: Any, labels: Any, whose: str) -> Own:
    """One user's images out of ink 0 on paper 1, numbers (n, 784) or (n, 28, 28), and labels (n,) in 0 .. 61, as the
    public files have them; a user may have none. UserError: they are anything else."""
    try:
        x, y = np.asarray(pixels, dtype=np.float32), np.asarray(labels)
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose}: the images are not numbers of one shape; place the published file anew") from error
    if y.shape == (0,) and not x.size:
        return Own(torch.empty(0, 1, SIDE, SIDE, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    if y.ndim != 1 or x.shape not in ((len(y), SIDE * SIDE), (len(y), SIDE, SIDE)):
        raise UserError(
            f"{whose}: images of the shape {x.shape} and labels of the shape {y.shape}, where (n, {SIDE * SIDE}) or "
            f"(n, {SIDE}, {SIDE}) and (n,) should be; place the published file anew"
        )
    if not (x.min() >= 0 and x.max() <= 1):  # nor where one is NaN
        raise UserError(f"{whose}: a pixel is no number from 0 to 1; place the published file anew")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= CLASSES:
        raise UserError(f"{whose}: a label is no class from 0 to {CLASSES - 1}; place the published file anew")
    ink = np.rint(255 * (1 - x)).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
    return Own(torch.from_numpy(ink), torch.from_numpy(y.astype(np.int64)))


class LeafDataModule(ImagesByUser):
    """FEMNIST in LEAF's files, a writer for a client: 28 x 28 grey images of 62 classes.

    Reads every ``all_data_*.json`` in ``data_dir``. A file is an object of ``users``, a list of names, and
    ``user_data``, by name an object of ``x``, images as lists of 784 numbers in [0, 1] with ink 0 on paper 1, and of
    ``y``, their labels from 0 to 61. Files are read one after another and kept as a byte a pixel: 0.6 GB for all 3,550
    writers.

    Args:
        data_dir: the folder of the files.
        options: settings of ``ImagesByUser`` and of ``FederatedDataModule``.
    """

    def __init__(self, data_dir: str = "data/femnist", **options: Any) -> None:
        super().__init__(data_dir, **options)

    def read(self) -> Mapping[str, Own]:
        """Every writer's images. UserError: there is no file, or one is not as LEAF writes it."""
        paths = sorted(self.data_dir.glob("all_data_*.json"))
        if not paths:
            raise UserError(
                f"FEMNIST is not in {self.data_dir.absolute()}: place LEAF's all_data_*.json (made by {LEAF}) there, "
                "or say by --data.data_dir where they are"
            )
        users: dict[str, Own] = {}
        for path in paths:
            own = _read_leaf(path)
            if twice := sorted(set(own) & set(users)):
                raise UserError(
                    f"{path}: {few(twice)} stand in another file, too; leave only the files of one sampling"
                )
            users |= own
        return users


def _read_leaf(path: Path) -> dict[str, Own]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no whole JSON file ({brief(error)}); place it anew") from error
    names, data = (content.get(key) for key in ("users", "user_data")) if isinstance(content, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(data, dict):
        raise UserError(f"{path} is not LEAF's: it has no list 'users' and no object 'user_data'; place the right file")
    found = {
        str(name): _of_leaf(data.get(name) if isinstance(name, str) else None, f"{path}, user {name!r}")
        for name in names
    }
    if len(found) < len(names) or (others := sorted(set(data) - set(found))):
        who = few(others) if len(found) == len(names) else few([n for n in found if names.count(n) > 1])
        raise UserError(f"{path} contradicts itself: 'users' and 'user_data' do not agree on {who}; place it anew")
    counts = content.get("num_samples", [len(own.labels) for own in found.values()])
    wrong = [name for name, own, count in zip(found, found.values(), counts, strict=False) if count != len(own.labels)]
    if wrong or len(counts) != len(found):
        raise UserError(
            f"{path} contradicts itself: 'num_samples' is not how many samples users have ({few(wrong)}); place it anew"
        )
    return found


def _of_leaf(entry: Any, whose: str) -> Own:
    if not isinstance(entry, dict) or "x" not in entry or "y" not in entry:
        raise UserError(f"{whose}: 'user_data' has no 'x' and 'y' of this user; place LEAF's file anew")
    return _own_images(entry["x"], entry["y"], whose)


class FederatedEMNISTDataModule(ImagesByUser):
    """Federated EMNIST in TensorFlow Federated's files, a writer for a client: 28 x 28 grey images of 62 classes.

    Reads one file: a group ``examples`` with a group for each writer, and in it ``pixels``, (n, 28, 28) numbers in
    [0, 1] with ink 0 on paper 1, and ``label``, (n,) integers. Images are kept as a byte a pixel: 0.5 GB for all 3,400
    writers. Needs h5py: ``pip install lit_epgan[hdf5]``.

    Args:
        data_dir: the folder of the file.
        file: its name; ``fed_emnist_digitsonly_train.h5`` has the ten digits alone.
        options: settings of ``ImagesByUser`` and of ``FederatedDataModule``.
    """

    def __init__(self, data_dir: str = "data/fed_emnist", file: str = "fed_emnist_train.h5", **options: Any) -> None:
        super().__init__(data_dir, **options)
        self.file = file

    def read(self) -> Mapping[str, Own]:
        """Every writer's images. UserError: h5py or the file is missing, or the file is not as TensorFlow Federated
        writes it."""
        path = self.data_dir / self.file
        if not path.exists():
            raise UserError(
                f"Federated EMNIST is not in {self.data_dir.absolute()}: place {self.file} (out of {TFF}) there, or "
                "say by --data.data_dir where it is"
            )
        with hdf5_examples(path) as examples:
            return {name: _of_tff(examples[name], f"{path}, user {name!r}") for name in examples}


def _of_tff(entry: Any, whose: str) -> Own:
    own: list[Any] = [entry.get(key) if hasattr(entry, "get") else None for key in ("pixels", "label")]
    if not all(hasattr(each, "shape") for each in own):
        raise UserError(f"{whose}: there are no 'pixels' and 'label'; place the published file anew")
    pixels, labels = (each[()] for each in own)
    return _own_images(pixels, labels, whose)


class TypefacesDataModule(ImagesByUser):
    """Typefaces, a family for a client: digits and letters in all its upright fonts, as grey 28 x 28 images of EMNIST's
    62 classes.

    Every sixth family is set aside for the classifier that judges samples (the extractor ``typefaces``).

    Args:
        data_dir: holds a folder for each family, and in it, at any depth, files .ttf, .otf or .woff.
        options: settings of ``ImagesByUser`` and of ``FederatedDataModule``.
    """

    dataset = "typefaces"

    def __init__(self, data_dir: str = "data/typefaces/node_modules/@fontsource", **options: Any) -> None:
        super().__init__(data_dir, **options)

    def read(self) -> Mapping[str, Own]:
        """Every family's images. MissingFileError: there is no font. UserError: a font is damaged."""
        return {name: Own(*own) for name, own in read_typefaces(self.data_dir).items()}
