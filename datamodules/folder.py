"""A user's own images as a federation, without code: a folder of images or a CSV manifest."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.datamodules.label_order import numbers_first
from lit_epgan.datamodules.manifest import read_records
from lit_epgan.datamodules.pixels import UNREADABLE, check_header, read_pixels
from lit_epgan.errors import UserError
from lit_epgan.listing import few

if TYPE_CHECKING:
    import pandas as pd


class ImageFiles(BatchDataset):
    """Images read from disk when they are asked for.

    Args:
        paths: one file per image.
        labels: int64 tensor (n,), or None.
        shape: (C, H, W) with H = W: the shorter side is resized to H and the middle cut out; C is 1 (grey) or 3 (RGB).
        cache: keep the bytes of every image once read: C H W bytes each.
    """

    def __init__(
        self, paths: Sequence[str], labels: Tensor | None, shape: tuple[int, int, int], cache: bool = True
    ) -> None:
        self.paths = list(paths)
        self.labels = labels
        self.shape = shape
        self.cache: dict[int, Tensor] | None = {} if cache else None

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One image, float tensor (C, H, W) in [-1, 1], and its label where there are labels."""
        image = self.pixels(index).float() / 127.5 - 1
        return (image,) if self.labels is None else (image, self.labels[index])

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: [images, float tensor (b, C, H, W) in [-1, 1]] and, where there are labels, int64 (b,)."""
        images = torch.stack([self.pixels(index) for index in indices]).float().div_(127.5).sub_(1)
        return [images] if self.labels is None else [images, self.labels[indices]]

    def pixels(self, index: int) -> Tensor:
        """One image, uint8 tensor (C, H, W).

        Raises:
            UserError: if the file cannot be read as an image.
        """
        if self.cache is not None and index in self.cache:
            return self.cache[index]
        try:
            pixels = read_pixels(self.paths[index], self.shape)
        except UNREADABLE as error:
            raise _unreadable(self.paths[index], error) from error
        if self.cache is not None:
            self.cache[index] = pixels
        return pixels


class FolderDataModule(FederatedDataModule):
    """A user's own images.

    Args:
        path: a folder ``[SPLIT/]CLIENT/[LABEL/]IMAGE``, where SPLIT is train, val or test, in any case, or training,
            valid, validation, dev or testing (without these folders all images are for training); or a CSV manifest
            with the columns path (relative to the manifest), client and, if wanted, label and split.
        image_size: side of the square that every image is resized and cut to, in pixels.
        color: ``rgb`` or ``grayscale``.
        classes: the labels in the order of their indices; by default those of the images, sorted.
        on_error: an image that cannot be read is refused, or skipped with a warning that names it. To be sure, ``skip``
            decodes every image once at the start; ``refuse`` looks at the files' headers, and at the rest in use.
        cache: keep what was read: image_size^2 bytes per image and channel.
        outside: whether a manifest may name files outside of its folder, by an absolute path, by ``..`` or by a link;
            for manifests that you trust.
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``warmup_steps``, ``clients_per_round``,
            ``num_workers``, ``seed`` and ``collate_fn`` of FederatedDataModule.

    Attributes:
        shape: (C, H, W) of an image.
        label_names: the name of label 0, 1, ..., known once the data are loaded.
    """

    def __init__(
        self,
        path: str,
        image_size: int = 32,
        color: Literal["rgb", "grayscale"] = "rgb",
        classes: Sequence[str] | None = None,
        on_error: Literal["refuse", "skip"] = "refuse",
        cache: bool = True,
        outside: bool = False,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        if image_size < 1:
            raise UserError(f"data.image_size is {image_size}; it must be at least 1")
        self.path = path
        self.classes = classes
        self.on_error = on_error
        self.cache = cache
        self.outside = outside
        self.shape = (3 if color == "rgb" else 1, image_size, image_size)
        self.label_names: list[str] = []

    def load(self) -> ClientData:
        """Find the images and their clients.

        Raises:
            UserError: names the first mistake in the folder or manifest, see ``read_records``, or an unreadable image.
        """
        records = self._readable(read_records(self.path, self.outside))
        self.label_names = self._classes(set(records["label"]) - {""})
        train = self._by_client(records[records["split"] == "train"])
        val = self._by_client(records[records["split"] == "val"])
        test = records[records["split"] == "test"]
        return ClientData(
            train=train,
            val=val or None,
            test=self._dataset(test) if len(test) else None,
            labels={name: d.labels for name, d in train.items() if d.labels is not None} or None,
        )

    def _classes(self, found: set[str]) -> list[str]:
        self.numbers_own_classes = bool(found) and self.classes is None
        if self.classes is None:
            return sorted(found, key=numbers_first)
        names = [str(name) for name in self.classes]
        if unknown := found - set(names):
            raise UserError(f"{self.path} has images of the class {few(sorted(unknown))}, which data.classes omits")
        return names if found else []

    def _by_client(self, records: "pd.DataFrame") -> dict[str, ImageFiles]:
        return {str(client): self._dataset(own) for client, own in records.groupby("client", sort=True)}

    def _dataset(self, records: "pd.DataFrame") -> ImageFiles:
        number = {name: index for index, name in enumerate(self.label_names)}
        labels = torch.tensor([number[name] for name in records["label"]]) if number else None
        return ImageFiles(records["path"].tolist(), labels, self.shape, self.cache)

    def _readable(self, records: "pd.DataFrame") -> "pd.DataFrame":
        skipped = []
        for path in records["path"]:
            try:
                read_pixels(path, self.shape) if self.on_error == "skip" else check_header(path)
            except UNREADABLE as error:
                if self.on_error == "refuse":
                    raise _unreadable(path, error) from error
                skipped.append(path)
        if skipped:
            rank_zero_warn(f"left out {len(skipped)} unreadable images: {few(skipped)}")
        kept = records[~records["path"].isin(skipped)]
        for client in records["client"][records["split"] == "train"].unique():
            if client not in set(kept["client"][kept["split"] == "train"]):
                raise UserError(f"Client {client} is empty: none of its training images can be read.")
        return kept


def _unreadable(path: str, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
    return UserError(
        f"{path} cannot be read as an image ({reason[0]}): mend or remove it, "
        "or set --data.on_error skip to leave such images out."
    )
