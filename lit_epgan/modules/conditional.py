"""Generative models of labelled data: a GAN and a variational autoencoder that are told which label to draw."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.lib.bounds import within
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch, adam, rows_of, steps_taken
from lit_epgan.modules.sampling import Sampling, agreed_latent_dim, check_shape


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
        """Check the number of labels, and keep their shares, before the first sample."""
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

    def see_labels(self, rows: Batch, steps: int) -> None:
        """Take a batch into ``label_shares``, their mean over all batches since the optimizers were fresh.

        ``steps`` were taken before it; at 0 the shares begin anew.
        """
        newest = 1 / (steps + 1)
        shares = weights(rows).to(self.label_shares)
        self.label_shares.mul_(1 - newest).index_add_(0, rows.labels, shares, alpha=newest)

    def check_labels(self, rows: Batch) -> None:
        """Refuse a batch without a label for each row, or with other labels than the model's."""
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


def weights(rows: Batch) -> Tensor:
    """The rows' weights (n,), which sum to 1: equal ones where the batch has none."""
    return torch.full((len(rows.x),), 1 / len(rows.x), device=rows.x.device) if rows.weight is None else rows.weight


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

    def _discriminator_turn(self, optimizer: Any, real: Batch, steps: int) -> None:
        self.see_labels(real, steps)
        super()._discriminator_turn(optimizer, real, steps)

    def _generated(self, real: Batch) -> Batch:
        n = self._rows(len(real.x))
        labels = real.labels[torch.multinomial(weights(real), n, replacement=True)]
        noise = torch.randn(n, self.latent_dim - self.labels, device=real.x.device, dtype=real.x.dtype)
        return Batch(self._faster("generator")(self.with_label(noise, labels)), labels)

    def _scores(self, discriminator: nn.Module, *sets: Batch) -> Sequence[Tensor]:
        scores = super()._scores(discriminator, *sets)
        if scores[0].shape[1:] != (self.labels,):
            raise UserError(
                f"the discriminator gives scores of shape {tuple(scores[0].shape)}, but must give one for each of the "
                f"model's {self.labels} labels: set --model.discriminator.heads {self.labels}."
            )
        return [each.gather(1, rows.labels[:, None]) for each, rows in zip(scores, sets, strict=True)]


class CVAE(LabelledSampling):
    """Encoder q(z | x, y) = N(m, diag exp(r)) and decoder p(x | z, y) = N(f(z, y), variance I), prior N(0, I) of z.

    A step goes down the weighted mean of the rows' ``bound`` (Kingma and Welling 2014; given labels, Sohn et al. 2015),
    at one draw of z. The decoder takes the label as a one-hot vector beside z. The encoder's last layer gives (m, r),
    to which each label adds numbers of its own: what a one-hot label beside that layer's input would do. Samples are
    f(z, y), without the pixels' noise; their labels are drawn in proportion to those seen (``label_shares``).

    Under ``GeneratorSites(generator="generator")`` or ``DistilledSites`` a site is the decoder: FedCVAE (Heinbaugh et
    al. 2023).

    A batch is (x, y) with y (batch,) integers in [0, labels), or (x, y, weight).

    Args:
        encoder: x (n, *data_shape) -> (n, 2 d), with d = latent_dim - labels.
        generator: f, the decoder: z with the label beside (n, latent_dim), of which the last ``labels`` are the
            label -> (n, *data_shape). It has one member.
        labels: number of classes.
        variance: of a pixel, given z; the smaller, the more of x the code must hold.
        lr: Adam's learning rate.
        latent_dim: of z and label together, where the generator does not say it.

    Raises:
        UserError: a number that cannot be, or a generator of several members; during training, data without labels,
            with others or of another shape, or an encoder that does not give 2 d numbers.
    """

    takes_weights = True
    average = None
    members = 1

    def __init__(
        self,
        encoder: nn.Module,
        generator: nn.Module,
        labels: int,
        variance: float = 0.1,
        lr: float = 1e-3,
        latent_dim: int | None = None,
    ) -> None:
        super().__init__()
        within("(0, inf)", "model", variance=variance, lr=lr)
        if getattr(generator, "members", 1) != 1:
            raise UserError(f"a CVAE has one decoder, and its generator has members={generator.members}: give one.")
        self.latent_dim = agreed_latent_dim(latent_dim, generator)
        self.make_room_for_labels(labels)
        self.encoder, self.generator = encoder, generator
        self.of_label = nn.Embedding(labels, 2 * (self.latent_dim - labels))
        nn.init.zeros_(self.of_label.weight)
        self.variance, self.lr = variance, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The weighted mean bound (); labels are looked at where the optimizer is fresh, so at each client."""
        rows, steps = rows_of(batch), steps_taken(self.optimizers())
        if batch_idx == 0 or steps == 0:
            self.check_labels(rows)
        self.see_labels(rows, steps)
        bound = self.bound(rows)
        return weights(rows).to(bound) @ bound

    def bound(self, rows: Batch) -> Tensor:
        """At least -log p(x | y) of each row (n,), less the constant d / 2 log(2 pi variance), d the numbers of x.

        With one draw of z for each row it is

        ||x - f(z, y)||^2 / (2 variance) + KL[N(m, diag exp(r)) || N(0, I)],   z = m + exp(r / 2) e,   e ~ N(0, I)

        Kingma and Welling 2014, equation 10 and appendix B.
        """
        mean, log_variance = self._code(rows)
        z = mean + (log_variance / 2).exp() * torch.randn_like(mean)
        made = self.generator(self.with_label(z, rows.labels))
        check_shape(rows.x.shape[1:], made.shape[1:])  # other shapes could be broadcast
        error = (rows.x - made).square().flatten(1).sum(1)
        return error / (2 * self.variance) + divergence(mean, log_variance)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self.parameters(), self.lr, (0.9, 0.999))

    def _code(self, rows: Batch) -> tuple[Tensor, Tensor]:
        code, wanted = self.encoder(rows.x), self.of_label.embedding_dim
        if code.shape[1:] != (wanted,):
            raise UserError(
                f"the encoder gives numbers of shape {tuple(code.shape)}, but must give two for each of the code's "
                f"{wanted // 2} dimensions: set --model.encoder.heads {wanted}."
            )
        mean, log_variance = (code + self.of_label(rows.labels)).chunk(2, 1)
        return mean, log_variance


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """KL[N(m, diag exp(r)) || N(0, I)] = 1/2 sum_j (m_j^2 + exp(r_j) - 1 - r_j) of m and r (n, d): (n,)."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
