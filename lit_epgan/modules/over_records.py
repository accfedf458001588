"""A GAN's discriminator loss, cut into what looks at records, each by itself, and what looks at none."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from lit_epgan.modules.manual_optimization import Rows, rows_of
from lit_epgan.objectives import Objective, mixtures, scores_and_slopes, slope_penalty, weighted_mean
from lit_epgan.precision import at_least_single


class OverRecords(Protocol):
    """Takes the mean of a loss over records in a way of its own, such as one that hides each of them."""

    def __call__(self, network: nn.Module, loss: Callable[[Any], Tensor], batch: Any) -> Tensor:
        """The mean ().

        Args:
            network: whose gradient is asked for.
            loss: of a batch, or of one record as a batch; a scalar.
            batch: the records, maybe with rows of others and their weights.
        """
        ...


def discriminator_loss(
    over_records: OverRecords,
    discriminator: nn.Module,
    objective: Objective,
    real: Rows,
    fake: Tensor,
    r1: float = 0.0,
    gp: float = 0.0,
) -> Tensor:
    """L_D as ``Objective.discriminator_loss`` has it, its real half and its penalties by ``over_records``.

    The penalties are of single rows: R1 at a real row, wgan-gp's between a real row and a generated one.

    Args:
        over_records: takes the mean over ``real``.
        discriminator: is trained, and has no BatchNorm.
        objective: gives the losses of scores.
        real: the rows (batch, *data_shape), maybe with weights.
        fake: generated rows (any batch, *data_shape).
        r1, gp: the penalties' coefficients; 0 is none.
    """

    def of_records(batch: Any) -> Tensor:
        rows = rows_of(batch)
        if r1:
            scores, slopes = scores_and_slopes(discriminator, rows.x)
            loss = r1 / 2 * weighted_mean(slopes, rows.weight)
        else:
            scores, loss = discriminator(rows.x), rows.x.new_zeros(())
        if gp:
            _, slopes = scores_and_slopes(discriminator, mixtures(rows.x, fake))
            loss = loss + gp * slope_penalty(slopes, rows.weight)
        return loss + weighted_mean(objective.real(at_least_single(scores)), rows.weight)

    own = over_records(discriminator, of_records, real)
    return own + objective.fake(at_least_single(discriminator(fake))).mean()
