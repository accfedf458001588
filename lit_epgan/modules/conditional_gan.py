"""A generative adversarial network of labelled data: every label has samples of its own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.labelled_sampling import LabelledSampling, weights
from lit_epgan.modules.manual_optimization import Rows, rows_of, steps_taken


class ConditionalGAN(LabelledSampling, GAN):
    """Generator and discriminator of p(x | y), y one of ``labels`` classes.

    The label joins the noise as a one-hot vector (Mirza and Osindero 2014); the discriminator has one score for each
    label and is asked for that of a row's own (as in Liu et al. 2019, section 3). A step's samples have labels drawn
    from its batch, by the rows' weights; evaluated samples have labels in proportion to those seen (``label_shares``).
    What lies between a row and a sample (wgan-gp) is judged by the row's label.

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

    def __init__(self, generator: nn.Module, discriminator: nn.Module, labels: int, **gan: Any) -> None:
        super().__init__(generator, discriminator, **gan)
        self.make_room_for_labels(labels)
        if self.prior.has_loss:
            raise UserError(
                f"{type(self.prior).__name__} asks the discriminator about samples without their labels: give the "
                "model a uniform or Gaussian prior, or no labels (lit_epgan.modules.GAN)."
            )

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """A step of each network; labels are looked at where the optimizers are fresh, so at each client."""
        _, of_discriminator = self.optimizers()  # type: ignore[attr-defined]
        if batch_idx == 0 or steps_taken(of_discriminator) == 0:
            self.check_labels(rows_of(batch))
        super().training_step(batch, batch_idx)

    def _discriminator_turn(self, optimizer: Any, real: Rows, steps: int) -> None:
        self.see_labels(real, steps)
        super()._discriminator_turn(optimizer, real, steps)

    def _generated(self, real: Rows) -> Rows:
        n = self._rows(len(real.x))
        labels = real.labels[torch.multinomial(weights(real), n, replacement=True)]
        noise = torch.randn(n, self.latent_dim - self.labels, device=real.x.device, dtype=real.x.dtype)
        return Rows(self._faster("generator")(self.with_label(noise, labels)), labels)

    def _scores(self, discriminator: nn.Module, *sets: Rows) -> Sequence[Tensor]:
        scores = super()._scores(discriminator, *sets)
        if scores[0].shape[1:] != (self.labels,):
            raise UserError(
                f"the discriminator gives scores of shape {tuple(scores[0].shape)}, but must give one for each of the "
                f"model's {self.labels} labels: set --model.discriminator.heads {self.labels}."
            )
        return [each.gather(1, rows.labels[:, None]) for each, rows in zip(scores, sets, strict=True)]
