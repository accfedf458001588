"""Flow matching: a generator that is a regression, and no game; with labels and without."""

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lit_epgan.lib.bounds import within
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.conditional import LabelledSampling, weights
from lit_epgan.modules.manual_optimization import Batch, adam, linear_decay, rows_of, steps_taken
from lit_epgan.modules.sampling import Sampling, check_shape
from lit_epgan.networks.average import ParameterAverage, frozen_copy
from lit_epgan.networks.velocities import FlowGenerator


class Flow(Sampling):
    """A velocity u that carries noise to data along straight lines.

    A step goes down the weighted mean over rows x1 of

        ||u(x_t, t) - (x1 - x0)||^2 / d,   x_t = (1 - t) x0 + t x1,   x0 ~ N(0, I),   t ~ U(0, 1),

    d the numbers of a row: conditional flow matching with optimal-transport paths (Lipman et al. 2023, equation 23,
    with sigma_min = 0). It is a mean over records, so clients' losses add up to the pooled one. Samples follow u by a
    solver (``FlowGenerator``).

    A batch is x (batch, *data_shape), or a sequence that begins with it; a third entry is the rows' weights (batch,).

    Args:
        generator: its velocity is trained.
        lr: Adam's learning rate.
        average: decay of an exponential moving average of the generator's parameters, which is then the generator
            that is evaluated; it starts anew with a fresh optimizer. None: the generator itself is evaluated.
        lr_decay: factor of the learning rate in the last epoch; it falls linearly from epoch to epoch. None: constant.

    Raises:
        UserError: a number that cannot be; during training, data of another shape than the generator's.
    """

    takes_weights = True
    members = 1

    def __init__(
        self,
        generator: FlowGenerator,
        lr: float = 1e-3,
        average: float | None = 0.99,
        lr_decay: float | None = None,
    ) -> None:
        super().__init__()
        within("(0, inf)", "model", lr=lr)
        if average is not None:
            within("[0, 1)", "model", average=average)
        if lr_decay is not None:
            within("[0, 1]", "model", lr_decay=lr_decay)
        self.generator, self.latent_dim = generator, generator.latent_dim
        self.lr, self.lr_decay = lr, lr_decay
        self._check_labels_of(generator)
        self.average = None if average is None else frozen_copy(generator)
        if average is not None and self.average is not None:
            self._averaging = ParameterAverage(generator, self.average, weight=1 - average)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The weighted mean loss ()."""
        rows, steps = rows_of(batch), steps_taken(self.optimizers())
        if batch_idx == 0 or steps == 0:
            check_shape(rows.x.shape[1:], self.generator.data_shape)  # type: ignore[arg-type]
        if self.average is not None and steps == 0:
            self._averaging.start()
        loss = self.row_losses(rows)
        return weights(rows).to(loss) @ loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the parameters after the step into their average."""
        if self.average is not None:
            self._averaging.update()

    def row_losses(self, rows: Batch) -> Tensor:
        """The loss of each row (n,), with one x0 and one t for each."""
        start, time = torch.randn_like(rows.x), torch.rand(len(rows.x), device=rows.x.device, dtype=rows.x.dtype)
        at = time.view(-1, *[1] * (rows.x.ndim - 1))
        between = (1 - at) * start + at * rows.x
        found = self.generator.velocity(between, time, self._told(rows))  # type: ignore[operator]
        return (found - (rows.x - start)).square().flatten(1).mean(1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Adam, with ``lr_decay`` under a linear schedule that is stepped every epoch."""
        optimizer = adam(self.generator.parameters(), self.lr, (0.9, 0.99))
        if self.lr_decay is None:
            return optimizer
        return [optimizer], [linear_decay(optimizer, self.lr_decay, self.trainer.max_epochs)]

    def _told(self, rows: Batch) -> Tensor:
        """What the velocity is told of each row's label (n, labels)."""
        return rows.x.new_zeros(len(rows.x), 0)

    def _check_labels_of(self, generator: FlowGenerator) -> None:
        if generator.labels:
            raise UserError(
                f"the velocity takes {generator.labels} labels, and lit_epgan.modules.Flow tells none: take "
                "lit_epgan.modules.ConditionalFlow, or leave the velocity's labels out."
            )


class ConditionalFlow(LabelledSampling, Flow):
    """A flow that is told which label to draw, and sometimes is not: what ``FlowGenerator``'s guidance needs.

    As ``Flow``, of p(x | y). A batch is (x, y) with y (batch,) integers in [0, labels), or (x, y, weight). The labels
    are those of the generator's velocity. Evaluated samples have labels in proportion to those seen.

    Args:
        generator: its velocity is trained.
        untold: share of the rows whose label is hidden from the velocity (Ho and Salimans 2022, algorithm 1).
        flow: what ``Flow`` takes beside.

    Raises:
        UserError: a velocity with fewer than two labels, or a share outside of [0, 1]; during training, data without
            labels or with others.
    """

    def __init__(self, generator: FlowGenerator, untold: float = 0.1, **flow: Any) -> None:
        super().__init__(generator, **flow)
        within("[0, 1]", "model", untold=untold)
        self.untold = untold

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The weighted mean loss (); labels are looked at where the optimizer is fresh, so at each client."""
        rows, steps = rows_of(batch), steps_taken(self.optimizers())
        if batch_idx == 0 or steps == 0:
            self.check_labels(rows)
        self.see_labels(rows, steps)
        return super().training_step(batch, batch_idx)

    def _told(self, rows: Batch) -> Tensor:
        hidden = torch.rand(len(rows.x), 1, device=rows.x.device) < self.untold
        return self.with_label(rows.x.new_zeros(len(rows.x), 0), rows.labels).masked_fill(hidden, 0)

    def _check_labels_of(self, generator: FlowGenerator) -> None:
        self.make_room_for_labels(generator.labels)
