"""Public image sets that are sorted by the people who made the images, a client each."""

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
from lit_epgan.datamodules.dealing import check_dealing, deal
from lit_epgan.datamodules.images import ImageRecords
from lit_epgan.datamodules.inversion import check_inverted, inverted_users
from lit_epgan.errors import UserError

SIDE, CLASSES = 28, 62  # of EMNIST: digits, capital and small letters


class Own(NamedTuple):
    """One user's images, uint8 (n, 1, 28, 28) with ink 255 on 0, and labels, int64 (n,)."""

    pixels: Tensor
    labels: Tensor


class ImagesByUser(FederatedDataModule):
    """Base of EMNIST by writer: users are dealt into clients and those held out, images stay in memory as bytes.

    Args:
        data_dir: the folder of the files.
        clients: how many users take part, drawn at random; by default all.
        held_out: share of all users who take part in nothing, and whose images are the validation and test data.
        inverted: share of the clients whose pixels are multiplied by -1; of those held out none are.
        split_seed: decides who is held out, who takes part, and whose pixels are inverted.
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``max_local_steps``, ``clients_per_round``,
            ``num_workers``, ``seed`` and ``collate_fn`` of FederatedDataModule.

    Attributes:
        shape: (C, H, W) of an image.

    Raises:
        UserError: a number is out of its range.
    """

    shape = (1, SIDE, SIDE)

    def __init__(
        self,
        data_dir: str = "data",
        clients: int | None = None,
        held_out: float = 0.1,
        inverted: float = 0.0,
        split_seed: int = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        check_dealing(clients, held_out)
        check_inverted(inverted)
        self.data_dir = Path(data_dir).expanduser()
        self.clients_wanted, self.held_out, self.inverted, self.split_seed = clients, held_out, inverted, split_seed

    @abstractmethod
    def read(self) -> Mapping[str, Own]:
        """Every user's images.

        Raises:
            UserError: files are missing or not what they should be.
        """

    def load(self) -> ClientData:
        """Deal the users: images, float tensors (n, 1, 28, 28) in [-1, 1], background -1, and labels (n,)."""
        users = self.read()
        names, others = deal(sorted(users), self.held_out, self.clients_wanted, self.split_seed)
        inverted = inverted_users(names, self.inverted, self.split_seed)
        held_out: Dataset | None = ConcatDataset([_records(users[name]) for name in others]) if others else None
        return ClientData(
            train={name: _records(users[name], name in inverted) for name in names},
            val=held_out,
            test=held_out,
            labels={name: users[name].labels for name in names},
        )


def own_images(pixels: Any, labels: Any, whose: str) -> Own:
    """One user's images out of ink 0 on paper 1, as the public files have it.

    Args:
        pixels: numbers (n, 784) or (n, 28, 28) in [0, 1].
        labels: integers (n,) in 0 .. 61.
        whose: the user and the file, for messages.

    Raises:
        UserError: they are anything else.
    """
    try:
        x, y = np.asarray(pixels, dtype=np.float32), np.asarray(labels)
    except (TypeError, ValueError) as error:
        raise UserError(f"{whose}: the images are not numbers of one shape; place the published file anew") from error
    if y.ndim != 1 or not len(y) or x.shape not in ((len(y), SIDE * SIDE), (len(y), SIDE, SIDE)):
        raise UserError(
            f"{whose}: images of the shape {x.shape} and labels of the shape {y.shape}, where (n, {SIDE * SIDE}) or "
            f"(n, {SIDE}, {SIDE}) and (n,) should be, n at least 1; place the published file anew"
        )
    if not (x.min() >= 0 and x.max() <= 1):  # nor where one is NaN
        raise UserError(f"{whose}: a pixel is no number from 0 to 1; place the published file anew")
    if y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= CLASSES:
        raise UserError(f"{whose}: a label is no class from 0 to {CLASSES - 1}; place the published file anew")
    ink = np.rint(255 * (1 - x)).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
    return Own(torch.from_numpy(ink), torch.from_numpy(y.astype(np.int64)))


def _records(own: Own, inverted: bool = False) -> ImageRecords:
    pixels = 255 - own.pixels if inverted else own.pixels
    return ImageRecords(pixels, own.labels, torch.arange(len(pixels)))
