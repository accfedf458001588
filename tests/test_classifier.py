"""The classifier, its backbone of fully connected layers, and the rounds that it takes to be good enough."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.callbacks.rounds_to_target import RoundsToTarget
from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.errors import UserError
from lit_epgan.federated import MOON, FedAvg, FedNP
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.mlp import MLPBackbone
from tests.federations import fit


def classifier(lr: float = 0.1) -> Classifier:
    torch.manual_seed(0)
    return Classifier(MLPBackbone(hidden=[16]), nn.Linear(16, 10), lambda p: torch.optim.SGD(p, lr=lr))


def digits(**options: Any) -> ImageDataModule:
    return ImageDataModule(**({"dataset": "digits", "partition": "iid", "clients": 3, "batch_size": 64} | options))


def test_loss_and_accuracy_by_hand() -> None:
    module = classifier()
    images, labels = torch.randn(7, 1, 8, 8), torch.tensor([0, 1, 2, 3, 4, 5, 6])
    logits = module(images)
    rows = [float(logits[i, label] - logits[i].exp().sum().log()) for i, label in enumerate(labels)]
    assert float(module.training_step((images, labels), 0)) == pytest.approx(-float(np.mean(rows)), rel=1e-5)
    scores = module.scores(logits, labels)
    assert float(scores["accuracy"]) == pytest.approx(sum(logits.argmax(1) == labels) / 7)
    assert float(scores["cross_entropy"]) == pytest.approx(-float(np.mean(rows)), rel=1e-5)


def test_validation_weighs_rows_not_batches() -> None:
    """364 test images in batches of 64: the last one is smaller."""
    module, data = classifier(), digits()
    trainer = fit(module, data, 1, algorithm=FedAvg())
    test = data.data.val
    images, labels = test.fetch(list(range(len(test))))
    accuracy = float((module(images.double()).argmax(1) == labels).double().mean())
    assert float(trainer.callback_metrics["accuracy"]) == pytest.approx(accuracy, rel=1e-9)
    assert accuracy > 0.15  # more than by chance


@pytest.mark.parametrize("algorithm", [MOON("backbone"), FedNP("backbone", "head", latent=4, hidden=5)])
def test_the_names_of_the_submodules_are_what_moon_and_fednp_ask_for(algorithm: Algorithm) -> None:
    module = classifier()
    fit(module, digits(), 2, algorithm=algorithm)
    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_the_backbone_by_hand() -> None:
    backbone = MLPBackbone((1, 2, 2), (3, 5))
    (w, b), (v, c) = ((m.weight, m.bias) for m in backbone.modules() if isinstance(m, nn.Linear))
    x = torch.randn(4, 1, 2, 2)
    expected = F.relu(F.relu(x.flatten(1) @ w.T + b) @ v.T + c)
    torch.testing.assert_close(backbone(x), expected)
    assert backbone.out_features == expected.shape[1] == 5
    with pytest.raises(UserError, match="hidden is empty"):
        MLPBackbone(hidden=[])


def test_a_partition_of_its_own_for_every_seed() -> None:
    def labels(**options: Any) -> Tensor:
        return digits(partition="dirichlet", **options).data.labels["client-1"]

    assert torch.equal(labels(seed=1), labels(seed=2))
    assert not torch.equal(labels(seed=1, partition_by_seed=True), labels(seed=2, partition_by_seed=True))
    ours, theirs = (digits(seed=s, partition_by_seed=True).data.test.fetch([0, 1, 2]) for s in (1, 2))
    assert torch.equal(ours[0], theirs[0])  # the test images stay


# ---------------------------------------------------------------- rounds to a target


class Scripted(Classifier):
    """Has the accuracy that a list says."""

    script = (0.2, 0.8, 0.95, 0.5, 0.99)

    def scores(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"accuracy": torch.tensor(self.script[self.trainer.current_epoch])}


def rounds_to(target: float, rounds: int = 5, **options: Any) -> float:
    plain = classifier()
    module = Scripted(plain.backbone, plain.head)
    callbacks = [RoundsToTarget("accuracy", target), *options.pop("callbacks", [])]
    options |= {"enable_checkpointing": "folder" in options}
    trainer = fit(module, digits(local_steps=1), rounds, callbacks=callbacks, **options)
    return float(trainer.callback_metrics["rounds_to_target"])


@pytest.mark.parametrize(("target", "rounds"), [(0.1, 1), (0.7, 2), (0.9, 3), (0.97, 5), (1.0, 6)])
def test_the_first_round_that_is_good_enough_or_one_more_than_all(target: float, rounds: int) -> None:
    assert rounds_to(target) == rounds


def test_a_resumed_run_remembers_when_it_was_good_enough(tmp_path: Path) -> None:
    rounds_to(0.9, 3, folder=tmp_path, callbacks=[RoundCheckpoint()])
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert rounds_to(0.9, 4, folder=tmp_path, callbacks=[RoundCheckpoint()], ckpt_path=last) == 3


def test_a_metric_that_is_not_logged_is_named() -> None:
    with pytest.raises(UserError, match="'precision', which Classifier does not log in validation: it logs accuracy"):
        fit(classifier(), digits(), 1, callbacks=[RoundsToTarget("precision")])
