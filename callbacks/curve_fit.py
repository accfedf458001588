"""Curves fitted to points on a line, each round: every client's own, and the server's."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib.figure import Figure
from torch import Tensor

from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import mathtext

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
INK = "#333333"
MARGIN = 0.08  # of the range of x, on either side


class CurveFit(RoundEvaluation):
    """Writes ``curves.png``: the clients' points, their models when their local steps end, and the server's.

    FedNP's figure 4. For a module that maps x (rows, 1) to y (rows, 1), and data sets (x, y) of as many colours as
    clients.

    Args:
        every_n_epochs: rounds from one picture to the next.
        points: of a line.

    Raises:
        UserError: the data are no points (x, y) on a line.
    """

    def __init__(self, every_n_epochs: int = 1, points: int = 200) -> None:
        super().__init__(every_n_epochs)
        at_least(2, self, points=points)
        self.points = points
        self._local: dict[str, Tensor] = {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._local = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Keep the curve of the client at work, until its next step."""
        federations = [c for c in trainer.callbacks if isinstance(c, FederationCallback)]  # type: ignore[attr-defined]
        if federations and self._due(trainer):
            progress = federations[0].progress
            if progress.steps is None or progress.step == progress.steps:
                self._local[progress.client] = curve(pl_module, self._line(trainer))

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        line = self._line(trainer)
        title = f"round {trainer.current_epoch}" if trainer.state.fn == "fit" else ""
        publish(trainer, "curves", draw(points_of(trainer), line, self._local, curve(pl_module, line), title))

    def _line(self, trainer: Trainer) -> Tensor:
        """The places (points, 1) where curves are evaluated."""
        x = torch.cat([x for x, _ in points_of(trainer).values()])
        margin = MARGIN * float(x.max() - x.min())
        return torch.linspace(float(x.min()) - margin, float(x.max()) + margin, self.points)[:, None]


def points_of(trainer: Trainer) -> dict[str, tuple[Tensor, Tensor]]:
    """Every client's x and y (n, 1), by name. UserError: the data are something else."""
    points = {}
    for name, dataset in trainer.datamodule.data.train.items():  # type: ignore[attr-defined]
        tensors: tuple[Tensor, ...] = getattr(dataset, "tensors", ())
        if len(tensors) != 2 or any(t.dim() != 2 or t.shape[1] != 1 for t in tensors):
            raise UserError("CurveFit draws points (x, y) on a line: use it with PolynomialDataModule.")
        points[name] = (tensors[0], tensors[1])
    return points


@torch.no_grad()
def curve(module: LightningModule, line: Tensor) -> Tensor:
    """The module's values (points,) at ``line`` (points, 1), on the CPU."""
    values: Tensor = module(line.to(next(module.parameters())))
    return values.float().cpu().flatten()


def draw(
    points: dict[str, tuple[Tensor, Tensor]], line: Tensor, local: dict[str, Tensor], server: Tensor, title: str
) -> Any:
    """The picture as a uint8 array (height, width, 3): every client's x and y, the clients' curves and the server's on
    ``line``."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=110)
    axes = figure.subplots()
    x = line.flatten().numpy()
    y = torch.cat([y for _, y in points.values()])
    legend = []
    for index, (name, (own_x, own_y)) in enumerate(points.items()):
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(own_x.flatten().numpy(), own_y.flatten().numpy(), "x", color=colour, markersize=4)
        if name in local:
            legend += axes.plot(x, local[name].numpy(), color=colour, linewidth=1.2, label=mathtext(name))
    legend += axes.plot(x, server.numpy(), color=INK, linewidth=2.2, label="server")
    margin = 0.25 * float(y.max() - y.min())
    axes.set_ylim(float(y.min()) - margin, float(y.max()) + margin)
    axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
    axes.legend(handles=legend, fontsize=8, frameon=False)
    axes.set_title(title, fontsize=10, color=INK)
    return pixels_of(figure)
