"""Samples with labels, of a module whose generator is told which label to draw."""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.modules.manual_optimization import Rows
from lit_epgan.modules.sampling import Sampling


class LabelledSampling(Sampling):
    """A module whose generator takes noise and, in the last ``labels`` of its entries, a one-hot label.

    Evaluated samples have labels in proportion to those seen since the optimizers were fresh.

    Attributes:
        labels: number of classes.
        label_shares: those proportions (labels,), a buffer that a federation merges as all others, so that the server's
            samples have the labels of all records in proportion.
    """

    labels: int
    label_shares: Tensor

    def make_room_for_labels(self, labels: int) -> None:
        """Check the number of labels, and keep their shares, before the first sample.

        Args:
            labels: number of classes.

        Raises:
            UserError: fewer than two labels, or no room for noise.
        """
        if not 2 <= labels < self.latent_dim:
            raise UserError(
                f"the model's labels are {labels}, but must be at least 2, and fewer than the generator's latent_dim, "
                f"{self.latent_dim}, which holds noise and label."
            )
        self.labels = labels
        self.register_buffer("label_shares", torch.zeros(labels))

    def sample_labelled(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """As ``sample``, the samples (n, *data_shape) and their labels (n,)."""
        self.refresh_statistics()
        noise = self._noise_in_turn(n, generator)
        return self._in_turn(noise)[:n], noise[:n, -self.labels :].argmax(1)

    def see_labels(self, rows: Rows, steps: int) -> None:
        """Take a batch into ``label_shares``, their mean over all batches since the optimizers were fresh.

        Args:
            rows: the batch.
            steps: optimizer steps taken before it; at 0 the shares begin anew.
        """
        newest = 1 / (steps + 1)
        shares = weights(rows).to(self.label_shares)
        self.label_shares.mul_(1 - newest).index_add_(0, rows.labels, shares, alpha=newest)

    def check_labels(self, rows: Rows) -> None:
        """Refuse a batch without a label for each row, or with other labels than the model's.

        Raises:
            UserError: says which labels are needed.
        """
        y, name = rows.labels, type(self).__name__
        if not isinstance(y, Tensor) or y.shape != rows.x.shape[:1] or y.is_floating_point():
            raise UserError(
                f"{name} needs batches (x, labels) with one integer a row: take lit_epgan.modules.GAN for data without."
            )
        if not 0 <= int(y.min()) <= int(y.max()) < self.labels:
            raise UserError(
                f"the labels of a batch lie between {int(y.min())} and {int(y.max())}, but the model's labels are "
                f"{self.labels}, from 0 to {self.labels - 1}: change --model.labels. (-100: an algorithm's rows have "
                "none, as embedding sites' points.)"
            )

    def with_label(self, noise: Tensor, labels: Tensor) -> Tensor:
        """What the generator takes (n, latent_dim): noise (n, latent_dim - labels) and labels (n,), one-hot."""
        return torch.cat([noise, F.one_hot(labels, self.labels).to(noise)], 1)

    def _evaluation_noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        noise = super()._evaluation_noise(n, generator)[:, : -self.labels]
        shares = self.label_shares.clamp_min(torch.finfo(torch.float32).tiny)  # before any step all are alike
        if generator is not None:
            shares = shares.to(generator.device)
        labels = torch.multinomial(shares, n, replacement=True, generator=generator).to(noise.device)
        return self.with_label(noise, labels)


def weights(rows: Rows) -> Tensor:
    """The rows' weights (n,), which sum to 1: equal ones where the batch has none."""
    return torch.full((len(rows.x),), 1 / len(rows.x), device=rows.x.device) if rows.weight is None else rows.weight
