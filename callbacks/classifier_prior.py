"""What FedNP predicts of the classifier, each round: a distribution for every class, beside the classifier itself."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from torch import Tensor, nn

from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.federated import FedNP
from lit_epgan.lib.errors import UserError

INK = "#333333"
LETTERS = 20  # classes up to which each bears its number


class ClassifierPrior(RoundEvaluation):
    """Writes ``classifier_prior.png``: the predicted distribution of each class's weights, and the server's weights.

    FedNP's figure 5. A class's weights are a vector; all are projected on the two directions in which those of the
    server's classifier differ most (the paper's t-SNE would not keep ellipses). Ellipses: one, two and three standard
    deviations of what the natural-parameter network makes of q(z); crosses: the server's classifier.

    Args:
        every_n_epochs: rounds from one picture to the next.

    Raises:
        UserError: the algorithm is not FedNP, or its classifier is no linear layer with three classes or more.
    """

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw and publish the picture; outside of a fit there is no federation, and nothing to predict."""
        if trainer.state.fn != "fit":
            return
        federation = next((c for c in trainer.callbacks if isinstance(c, FederationCallback)), None)  # type: ignore[attr-defined]
        if federation is None or not isinstance(federation.algorithm, FedNP):
            raise UserError("ClassifierPrior shows what FedNP predicts: use it with --federation.algorithm FedNP")
        head = pl_module.get_submodule(federation.algorithm.classifier)
        if not isinstance(head, nn.Linear) or head.out_features < 3:
            raise UserError("ClassifierPrior needs a classifier that is one linear layer with three classes or more")
        moments = (
            part[: head.weight.numel()].view_as(head.weight)
            for part in federation.algorithm.predicted(federation.server)
        )
        weights, mean, variance = (t.detach().double().cpu() for t in (head.weight, *moments))
        publish(
            trainer, "classifier_prior", draw(*projected(weights, mean, variance), f"round {trainer.current_epoch}")
        )


def projected(weights: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights and means (classes, 2) and covariances (classes, 2, 2) in the plane of the weights' two largest axes; all
    are (classes, features), the variances those of independent entries."""
    centre = weights.mean(0)
    axes = torch.linalg.svd(weights - centre, full_matrices=False).Vh[:2]
    return (weights - centre) @ axes.T, (mean - centre) @ axes.T, torch.einsum("ai,ci,bi->cab", axes, variance, axes)


def draw(weights: Tensor, means: Tensor, covariances: Tensor, title: str) -> Any:
    """The picture as a uint8 array (height, width, 3) of what ``projected`` gives."""
    figure = Figure(figsize=(5.6, 5.2), layout="constrained", dpi=110)
    axes = figure.subplots()
    colours = colormaps["turbo"](np.linspace(0.05, 0.95, len(weights)))
    for label, colour in enumerate(colours):
        values, vectors = np.linalg.eigh(covariances[label].numpy())
        angle = np.degrees(np.arctan2(vectors[1, 1], vectors[0, 1]))
        for deviations in (1, 2, 3):
            height, width = 2 * deviations * np.sqrt(values)
            centre = (float(means[label, 0]), float(means[label, 1]))
            axes.add_patch(Ellipse(centre, width, height, angle=angle, color=colour, alpha=0.12, linewidth=0))
        axes.plot(*weights[label].tolist(), "x", color=colour, markersize=6)
        if len(weights) <= LETTERS:
            axes.annotate(str(label), (float(weights[label, 0]), float(weights[label, 1])), color=INK, fontsize=8)
    axes.autoscale_view()
    axes.set_aspect("equal")
    axes.tick_params(labelsize=8, color=INK, labelcolor=INK)
    axes.set_title(title, fontsize=10, color=INK)
    return pixels_of(figure)
