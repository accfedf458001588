"""How sure the federation is: what its posterior predicts, beside the plain model and the one with a temperature."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from matplotlib.figure import Figure
from torch import Tensor
from torchmetrics.classification import MulticlassCalibrationError

from lit_epgan.bayes.posterior import GaussianPosterior, predict
from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.callbacks.pictures import pixels_of, publish
from lit_epgan.datamodules.rounds import ValidationLoader
from lit_epgan.engine.parameters import matches
from lit_epgan.federated.bayesian.laplace import STATE, LaplacePosterior, gaussian_loss
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError

BINS = 15
NINE_OF_TEN = 1.6448536269514722  # standard deviations of a Gaussian's central 90 %
COLOURS = {"plain": "#999999", "scaled": "#d08b2c", "posterior": "#2c6fb0", "personal": "#3a8a4d"}


class PosteriorPredictive(Callback):
    """What the posterior of ``LaplacePosterior`` predicts: scores in ``test``, columns and flags in ``predict``.

    In ``test`` of a classifier it logs, for ``plain``, the model's own probabilities, for ``scaled``, those of logits
    divided by a temperature, for ``posterior``, the predictive's, and for ``personal``, where clients have posteriors
    of their own, those of the record's client: ``NAME/nll``, the negative log-likelihood in nats; ``NAME/brier``, the
    squared distance of the probabilities from the label's; ``NAME/accuracy``; ``NAME/ece``, the calibration error of
    the largest probability in 15 bins; ``NAME/risk_at_90``, the share of errors among the nine of ten records that it
    is surest of. All but the last two are means, and given for each client. It draws ``calibration.png``: how often a
    probability is right, and the errors among the records that are not refused.
    Of a regression it logs ``NAME/nll`` and ``NAME/coverage``, the share of targets within the central 90 %.

    In ``predict`` the columns of the table are followed by ``p_0``, ``p_1``, ..., the predictive probabilities;
    ``entropy``, of these, in nats; ``entropy_expected``, the part of it that no further data would take away;
    ``information``, the rest; and ``unlike``, 1 where the information is larger than that of 99 of 100 held-out
    records. Of a regression ``deviation_0``, ... follow, the predictive's standard deviations.

    Raises:
        UserError: the algorithm is not LaplacePosterior, or its posterior has not been made yet.
    """

    def __init__(self) -> None:
        self._posterior: GaussianPosterior | None = None
        self._own: tuple[str, GaussianPosterior] | None = None

    def _begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        federation = next((c for c in callbacks if isinstance(c, FederationCallback)), None)
        if federation is None or not isinstance(federation.algorithm, LaplacePosterior):
            raise UserError(
                "PosteriorPredictive needs the posterior of lit_epgan.federated.LaplacePosterior: let it be the "
                "federation's algorithm, around the one that trains (inner)"
            )
        state = {name: tensor.to(pl_module.device) for name, tensor in federation.kept(trainer).items()}
        self._algorithm = algorithm = federation.algorithm
        self._posterior = algorithm.posterior(state)
        numbers = (float(state[STATE + name]) for name in ("scale", "plain_scale", "alike"))
        self._scale, self._plain_scale, self._alike = numbers
        trained = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        federated = {name: p for name, p in trained.items() if not matches(name, federation.local)}
        self._uncertain = algorithm.uncertain(federated, type(pl_module).__name__)
        self._state, self._own = state, None
        self._clients = clients_of(trainer, federation) if algorithm.personal and trainer.testing else {}
        if self._clients and not isinstance(trainer.test_dataloaders, ValidationLoader):
            rank_zero_warn(
                "PosteriorPredictive: the test records are nobody's, so that clients' own posteriors are not judged: "
                "give test_dataset by client"
            )
        self._probabilities: dict[str, list[Tensor]] = {}
        self._labels: list[Tensor] = []

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the posterior at hand. UserError: there is none."""
        self._begin(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the posterior at hand. UserError: there is none."""
        self._begin(trainer, pl_module)

    def _outputs(self, module: LightningModule, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self._posterior is not None
        return self._posterior.outputs(module, self._uncertain, x)

    def _own_outputs(self, trainer: Trainer, module: LightningModule, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """By the posterior of the client whose batch it is; the federation's, where the client was not asked."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not self._clients or not datamodule.validation_marks:
            return None
        client = datamodule.client_names[datamodule.validation_marks[0].client]
        if client not in self._clients:
            return self._outputs(module, x)
        if self._own is None or self._own[0] != client:
            kept = {name: tensor.to(x.device) for name, tensor in self._clients[client].items()}
            self._own = client, self._algorithm.posterior(self._state, own=kept)
        found = self._own[1]
        parts = found.mean.split([p.numel() for p in self._uncertain.values()])
        named = {n: part.view_as(p).to(p) for (n, p), part in zip(self._uncertain.items(), parts, strict=True)}
        return found.outputs(module, named, x)

    # Scores -----------------------------------------------------------------------------------------------------------

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Log the batch's scores; before its step, so that they are taken apart by client as the module's own are."""
        x, targets = batch[0], batch[1]
        means, covariances = self._outputs(pl_module, x)
        own = self._own_outputs(trainer, pl_module, x)
        if self._algorithm.likelihood == "regression":
            each = {"posterior": (means, covariances)} | ({} if own is None else {"personal": own})
            scores = {f"{n}/{s}": v for n, p in each.items() for s, v in self._regression(*p, targets).items()}
        else:
            logits = means.double()
            found = {
                "plain": logits.softmax(1),
                "scaled": (logits / self._plain_scale).softmax(1),
                "posterior": predict(means / self._scale, covariances / self._scale**2).probabilities,
            }
            if own is not None:
                scale = float(self._state[STATE + "own_scale"])
                found["personal"] = predict(own[0] / scale, own[1] / scale**2).probabilities
            scores = {f"{n}/{score}": value for n, p in found.items() for score, value in scored(p, targets).items()}
            for name, probabilities in found.items():
                self._probabilities.setdefault(name, []).append(probabilities.cpu())
            self._labels.append(targets.cpu())
        pl_module.log_dict(scores, on_step=False, on_epoch=True, batch_size=len(x), sync_dist=True)

    def _regression(self, means: Tensor, covariances: Tensor, targets: Tensor) -> dict[str, Tensor]:
        assert self._posterior is not None
        variance = covariances.diagonal(dim1=1, dim2=2).double() + self._posterior.noise
        away = targets.double().reshape(means.shape) - means.double()
        nll = gaussian_loss(means, covariances, self._posterior.noise, targets) / len(means)
        covered = (away.abs() <= NINE_OF_TEN * variance.sqrt()).double().mean()
        return {"nll": nll, "coverage": covered}

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what is no mean over records, and draw the picture, of this rank's records."""
        if not self._labels:
            return
        labels = torch.cat(self._labels)
        found = {name: torch.cat(parts) for name, parts in self._probabilities.items()}
        for name, p in found.items():
            error = MulticlassCalibrationError(p.shape[1], BINS)
            risks = risk_by_coverage(p, labels)
            risk = risks[max(0, math.ceil(0.9 * len(risks)) - 1)]
            pl_module.log_dict({f"{name}/ece": error(p, labels), f"{name}/risk_at_90": risk}, sync_dist=True)
        publish(trainer, "calibration", draw(found, labels))

    # Predictions ------------------------------------------------------------------------------------------------------

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Add the columns to what ``predict_step`` returned, a dictionary."""
        if not isinstance(outputs, dict):
            return
        assert self._posterior is not None
        means, covariances = self._outputs(pl_module, batch[0])
        if self._algorithm.likelihood == "regression":
            deviation = (covariances.diagonal(dim1=1, dim2=2) + self._posterior.noise).sqrt()
            outputs |= {f"deviation_{k}": column for k, column in enumerate(deviation.unbind(1))}
            return
        found = predict(means / self._scale, covariances / self._scale**2)
        outputs |= {f"p_{k}": column for k, column in enumerate(found.probabilities.unbind(1))}
        outputs |= {"entropy": found.entropy, "entropy_expected": found.expected, "information": found.information}
        outputs["unlike"] = (found.information > self._alike).long()


def clients_of(trainer: Trainer, federation: FederationCallback) -> dict[str, Mapping[str, Tensor]]:
    """By a client's name what it keeps of its own posterior, from the checkpoint that is evaluated or the last fit.

    Raises:
        UserError: no client's stands there.
    """
    if trainer.ckpt_path:
        held = tensor_file.load(trainer.ckpt_path).get("callbacks", {}).get(federation.state_key) or {}
    else:
        held = federation.state_dict()
    states = {name: each["algorithm"] for name, each in held.get("clients", {}).items()}
    found = {name: state for name, state in states.items() if STATE + "mean" in state}
    if not found:
        raise UserError(
            "no client's own posterior stands in what is evaluated: train with LaplacePosterior's personal, and with "
            "private_states: memory"
        )
    return found


def scored(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Means over records of probabilities (n, C) and labels, int64 (n,): ``nll``, ``brier`` and ``accuracy``, ()."""
    own = probabilities.gather(1, labels.unsqueeze(1)).squeeze(1)
    brier = probabilities.square().sum(1) - 2 * own + 1
    right = (probabilities.argmax(1) == labels).double()
    return {"nll": -own.clamp_min(1e-30).log().mean(), "brier": brier.mean(), "accuracy": right.mean()}


def risk_by_coverage(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Shares of errors (n,) among the 1, 2, ..., n records whose largest probability is largest."""
    confidence, predicted = probabilities.max(1)
    wrong = (predicted != labels)[confidence.argsort(descending=True, stable=True)].double()
    return wrong.cumsum(0) / torch.arange(1, len(wrong) + 1)


def draw(found: Mapping[str, Tensor], labels: Tensor) -> Any:
    """Calibration on the left, risk against coverage on the right: uint8 (height, width, 3)."""
    figure = Figure(figsize=(9, 4), layout="constrained", dpi=110)
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color="#dddddd", linewidth=1)
    for name, p in found.items():
        confidence, predicted = p.max(1)
        correct = (predicted == labels).double()
        order = confidence.argsort()
        groups = [g for g in np.array_split(order.numpy(), min(BINS, len(order))) if len(g)]
        points = [(float(confidence[g].mean()), float(correct[g].mean())) for g in map(torch.from_numpy, groups)]
        left.plot(*zip(*points, strict=True), color=COLOURS[name], marker="o", markersize=3, label=name)
        risks = risk_by_coverage(p, labels)
        right.plot(torch.arange(1, len(risks) + 1) / len(risks), risks, color=COLOURS[name], label=name)
    left.set(xlabel="probability of the predicted class", ylabel="share that is right", title="Calibration")
    right.set(xlabel="share of records that are answered", ylabel="share of errors among them", title="Risk")
    left.legend(frameon=False)
    return pixels_of(figure)
