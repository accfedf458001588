"""A generative adversarial network of labelled data: every label has samples of its own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Rows, rows_of
from lit_epgan.modules.priors import Prior


class ConditionalGAN(GAN):
    """Generator and discriminator of p(x | y), y one of ``labels`` classes.

    The label joins the noise as a one-hot vector (Mirza and Osindero 2014); the discriminator has one score for each
    label and is asked for that of a row's own (as in Liu et al. 2019, section 3). A step's samples have labels drawn
    from its batch, by the rows' weights; evaluated samples have labels in proportion to those seen since the optimizers
    were fresh: ``label_shares``, a buffer that a federation merges as all others, so that the server's samples have the
    labels of all records in proportion. What lies between a row and a sample (wgan-gp) is judged by the row's label.

    A batch is (x, y) with y (batch,) integers in [0, labels), or (x, y, weight).

    Args:
        generator: noise with the label beside (n, latent_dim), of which the last ``labels`` are the label ->
            samples (n, *data_shape).
        discriminator: samples (n, *data_shape) -> scores (n, labels).
        labels: number of classes.
        gan: what ``lit_epgan.modules.GAN`` takes beside; a prior of the parameters alone.

    Raises:
        UserError: fewer than two labels, no room for noise, or a prior that asks the discriminator; during training,
            data without labels or with others, or a discriminator that has not one score for each.
    """

    label_shares: Tensor

    def __init__(self, generator: nn.Module, discriminator: nn.Module, labels: int, **gan: Any) -> None:
        super().__init__(generator, discriminator, **gan)
        if not 2 <= labels < self.latent_dim:
            raise UserError(
                f"the model's labels are {labels}, but must be at least 2, and fewer than the generator's latent_dim, "
                f"{self.latent_dim}, which holds noise and label."
            )
        if type(self.prior).generator_loss is not Prior.generator_loss:
            raise UserError(
                f"{type(self.prior).__name__} asks the discriminator about samples without their labels: give the "
                "model a uniform or Gaussian prior, or no labels (lit_epgan.modules.GAN)."
            )
        self.labels = labels
        self.register_buffer("label_shares", torch.zeros(labels))

    def sample_labelled(self, n: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """As ``sample``, the samples (n, *data_shape) and their labels (n,)."""
        self.refresh_statistics()
        noise = self._noise_in_turn(n, generator)
        return self._in_turn(noise)[:n], noise[:n, -self.labels :].argmax(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """A step of the discriminator, one of the generator; the labels of the first batch are looked at."""
        if batch_idx == 0:
            self._check_labels(rows_of(batch))
        super().training_step(batch, batch_idx)

    def _discriminator_turn(self, optimizer: Any, real: Rows, steps: int) -> None:
        newest = 1 / (steps + 1)
        shares = self._weight(real).to(self.label_shares)
        self.label_shares.mul_(1 - newest).index_add_(0, real.labels, shares, alpha=newest)
        super()._discriminator_turn(optimizer, real, steps)

    def _generated(self, real: Rows) -> Rows:
        n = self._rows(len(real.x))
        labels = real.labels[torch.multinomial(self._weight(real), n, replacement=True)]
        noise = torch.randn(n, self.latent_dim - self.labels, device=real.x.device, dtype=real.x.dtype)
        return Rows(self._faster("generator")(self._with_label(noise, labels)), labels)

    def _scores(self, discriminator: nn.Module, *sets: Rows) -> Sequence[Tensor]:
        scores = super()._scores(discriminator, *sets)
        if scores[0].shape[1:] != (self.labels,):
            raise UserError(
                f"the discriminator gives scores of shape {tuple(scores[0].shape)}, but must give one for each of the "
                f"model's {self.labels} labels: set --model.discriminator.heads {self.labels}."
            )
        return [each.gather(1, rows.labels[:, None]) for each, rows in zip(scores, sets, strict=True)]

    def _evaluation_noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        noise = super()._evaluation_noise(n, generator)[:, : -self.labels]
        shares = self.label_shares.clamp_min(torch.finfo(torch.float32).tiny)  # before any step all are alike
        if generator is not None:
            shares = shares.to(generator.device)
        labels = torch.multinomial(shares, n, replacement=True, generator=generator).to(noise.device)
        return self._with_label(noise, labels)

    def _with_label(self, noise: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([noise, F.one_hot(labels, self.labels).to(noise)], 1)

    def _weight(self, rows: Rows) -> Tensor:
        return torch.full((len(rows.x),), 1 / len(rows.x), device=rows.x.device) if rows.weight is None else rows.weight

    def _check_labels(self, rows: Rows) -> None:
        y = rows.labels
        if not isinstance(y, Tensor) or y.shape != rows.x.shape[:1] or y.is_floating_point():
            raise UserError(
                "ConditionalGAN needs batches (x, labels) with one integer a row: take lit_epgan.modules.GAN."
            )
        if not 0 <= int(y.min()) <= int(y.max()) < self.labels:
            raise UserError(
                f"the labels of a batch lie between {int(y.min())} and {int(y.max())}, but the model's labels are "
                f"{self.labels}, from 0 to {self.labels - 1}: change --model.labels. (-100: an algorithm's rows have "
                "none, as embedding sites' points.)"
            )
