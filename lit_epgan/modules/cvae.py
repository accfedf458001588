"""A conditional variational autoencoder, whose decoder is sampled as a generator is."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.modules.gan_settings import agreed_latent_dim, check_shape
from lit_epgan.modules.labelled_sampling import LabelledSampling, weights
from lit_epgan.modules.manual_optimization import Rows, rows_of, steps_taken
from lit_epgan.modules.optimizers import adam
from lit_epgan.randomness import generator_for


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
        for name, value in (("variance", variance), ("lr", lr)):
            if not 0 < value < math.inf:
                raise UserError(f"the model's {name} is {value}, but must be positive.")
        if getattr(generator, "members", 1) != 1:
            raise UserError(f"a CVAE has one decoder, and its generator has members={generator.members}: give one.")
        self.latent_dim = agreed_latent_dim(latent_dim, generator)
        self.make_room_for_labels(labels)
        self.encoder, self.generator = encoder, generator
        self.of_label = nn.Embedding(labels, 2 * (self.latent_dim - labels))
        nn.init.zeros_(self.of_label.weight)
        self.variance, self.lr = variance, lr

    def on_fit_start(self) -> None:
        """Refuse data of another shape than the decoder's, where the data module says its ``shape``."""
        # without new BatchNorm statistics: a resumed run's would be those of another moment
        drawn = self._draw(1, generator_for("shape"))
        check_shape(getattr(self.trainer.datamodule, "shape", None), drawn.shape[1:])  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The weighted mean bound (); labels are looked at where the optimizer is fresh, so at each client."""
        rows, steps = rows_of(batch), steps_taken(self.optimizers())
        if batch_idx == 0 or steps == 0:
            self.check_labels(rows)
        self.see_labels(rows, steps)
        bound = self.bound(rows)
        return weights(rows).to(bound) @ bound

    def bound(self, rows: Rows) -> Tensor:
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
        """Adam for encoder and decoder."""
        return adam(self.parameters(), self.lr, (0.9, 0.999))

    def _code(self, rows: Rows) -> tuple[Tensor, Tensor]:
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
