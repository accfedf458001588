"""A data module's rounds without a Trainer."""

from typing import Any

import torch
from lightning.pytorch import LightningModule

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, PlainFederation


def federated(
    module: LightningModule, data: FederatedDataModule, algorithm: Algorithm, **options: Any
) -> PlainFederation:
    """The rounds that a Trainer would make of it, on the same batches; the module optimizes automatically."""
    data.setup()
    federation = PlainFederation(
        algorithm,
        module,
        lambda trained, batch: trained.training_step(batch, 0),
        lambda _: module.configure_optimizers(),  # type: ignore[arg-type, return-value]
        lambda k, round_: data.clients[k].batches(data.steps_of_round(round_), data.local_epochs, data.seed, round_, k),
        [float(client.records or 0) for client in data.clients],
        data.seed,
        data.sampler,
        **options,
    )
    federation.model.data = lambda k, round_: data.clients[k].batches(None, 1, data.seed, round_, k, "records")
    return federation


def descending(
    algorithm: Algorithm,
    module: torch.nn.Module,
    loss: Any,
    batches: Any,
    records: Any,
    lr: float = 0.1,
    **options: Any,
) -> PlainFederation:
    """One whose clients take steps of gradient descent."""
    return PlainFederation(algorithm, module, loss, lambda p: torch.optim.SGD(p, lr=lr), batches, records, **options)
