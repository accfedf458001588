"""Simulated writers: digits by hands that differ, a client each, for methods that protect or look at whole users."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.images import check_inverted, digits_splits, inverted_users
from lit_epgan.lib.bounds import at_least, within
from lit_epgan.lib.randomness import generator_for

HAND = (0.25, 0.15, 0.08, 0.08)  # standard deviations of slant, weight, and shifts in halves of the image


class WritersDataModule(FederatedDataModule):
    """Scikit-learn's 8 x 8 digits, as if many people had written them.

    Every writer is a client. A writer's images are drawn from the digits' training split (80 %), and go through the
    writer's own hand: a slant, a weight of the pen and a shift. Held out are further writers, who take part in nothing
    and whose images come from the test split. ``inverted`` is the fault of Augenstein et al. 2020, section 5: all
    images of some writers have their pixels multiplied by -1.

    Args:
        clients: number of writers.
        images: of each writer.
        held_out_writers: whose images are the validation and test data.
        inverted: share of the clients whose pixels are inverted; of those held out none are.
        val_fraction: share of the training split that the held-out writers draw their validation images from; with 0
            the test images are the validation images, too.
        split_seed: decides who writes what, by which hand, and whose pixels are inverted.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        shape: (C, H, W) of an image.

    Raises:
        UserError: a number is below 1, ``inverted`` is no share, or ``val_fraction`` leaves nobody an image.
    """

    shape = (1, 8, 8)

    def __init__(
        self,
        clients: int = 340,
        images: int = 20,
        held_out_writers: int = 60,
        inverted: float = 0.0,
        val_fraction: float = 0.0,
        split_seed: int = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        at_least(1, "data", clients=clients, images=images, held_out_writers=held_out_writers)
        within("[0, 1)", "data", val_fraction=val_fraction)
        check_inverted(inverted)
        self.clients_wanted, self.images, self.held_out_writers = clients, images, held_out_writers
        self.inverted, self.val_fraction, self.split_seed = inverted, val_fraction, split_seed

    def load(self) -> ClientData:
        """Let everybody write: images, float tensors (n, 1, 8, 8) in [-1, 1], and labels, int64 tensors (n,)."""
        train, test = digits_splits(self.split_seed)
        train, tuning = self._set_aside(*train)
        digits = len(str(self.clients_wanted - 1))
        names = [f"writer-{k:0{digits}d}" for k in range(self.clients_wanted)]
        inverted = inverted_users(names, self.inverted, self.split_seed)
        written = {name: self._written(name, *train) for name in names}
        written = {name: (-x if name in inverted else x, y) for name, (x, y) in written.items()}
        held_out = self._by_others(*test)
        return ClientData(
            train={name: TensorDataset(*own) for name, own in written.items()},
            val=self._by_others(*tuning) if self.val_fraction else held_out,
            test=held_out,
            labels={name: y for name, (_, y) in written.items()},
        )

    def _set_aside(self, pixels: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The images that clients draw from, and those for validation."""
        order = torch.randperm(len(pixels), generator=generator_for(self.split_seed, "validation"))
        n = math.ceil(self.val_fraction * len(pixels))
        clients, aside = (order[n:], order[:n]) if n else (torch.arange(len(pixels)), order[:0])
        return (pixels[clients], labels[clients]), (pixels[aside], labels[aside])

    def _by_others(self, pixels: Tensor, labels: Tensor) -> TensorDataset:
        """Held-out writers' images of what they draw from."""
        others = [self._written(f"held out {k}", pixels, labels) for k in range(self.held_out_writers)]
        return TensorDataset(*map(torch.cat, zip(*others, strict=True)))

    def _written(self, name: str, pixels: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        generator = generator_for(self.split_seed, name)
        rows = torch.randint(len(pixels), (self.images,), generator=generator)
        hand = torch.randn(4, generator=generator) * torch.tensor(HAND)
        return by_hand(pixels[rows].float() / 16, *hand.tolist()), labels[rows]


def by_hand(ink: Tensor, slant: float, weight: float, right: float, down: float) -> Tensor:
    """Digits (n, 1, H, W) in [-1, 1], background -1, as one hand writes ``ink`` (n, 1, H, W) in [0, 1]: ``slant`` is
    the shear, in widths of half an image, ``right`` and ``down`` shift, in halves of it, and ink becomes ink^(1 +
    weight), bolder below 0."""
    affine = torch.tensor([[1.0, slant, right], [0.0, 1.0, down]]).repeat(len(ink), 1, 1)
    grid = F.affine_grid(affine, list(ink.shape), align_corners=False)
    moved = F.grid_sample(ink, grid, align_corners=False, padding_mode="zeros")
    return 2 * moved.clamp(0, 1) ** (1 + weight) - 1
