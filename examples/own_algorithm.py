"""Two algorithms of one's own, one whose reports sum and one whose do not.  python examples/own_algorithm.py"""

from functools import partial

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Message, merged
from lit_epgan.federated import FedAvg
from lit_epgan.modules import Classifier

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


class EqualVoices(Algorithm):
    """The mean of the clients' changes in which every client counts alike. It sums."""

    def train(self, client, sent):
        client.fit(sent["parameters"])
        return self.Report(change=client.change, weight=1)


class GeometricMedian(Algorithm):
    """The point with the least sum of distances to the clients' changes (Weiszfeld 1937). It needs each report."""

    class Report(Message):
        change: torch.Tensor = merged("stack")

    def merge(self, server, report):
        changes = torch.stack(list(report.change.values()))
        middle = changes.mean(0)
        for _ in range(50):
            near = 1 / (changes - middle).norm(dim=1, keepdim=True).clamp(min=1e-9)
            middle = (near * changes).sum(0) / near.sum()
        server.parameters += middle.to(server.parameters)


def patients(n: int, wrong: bool = False) -> TensorDataset:
    """Two measurements; whoever has a positive sum is ill. One hospital has its labels the wrong way round."""
    x = torch.randn(n, 2)
    return TensorDataset(x, ((x.sum(1) > 0) ^ wrong).long())


for algorithm in (FedAvg(), EqualVoices(), GeometricMedian()):
    seed_everything(0, verbose=False)
    wards = {name: patients(100) for name in "abcd"} | {"large and wrong": patients(600, wrong=True)}
    data = FederatedDataModule.from_datasets(wards, batch_size=20, local_steps=5, test_dataset=patients(1000))
    trainer = Trainer(max_epochs=20, callbacks=[FederationCallback(algorithm)], accelerator="cpu", **QUIET)
    trainer.fit(module := Classifier(nn.Identity(), nn.Linear(2, 2), partial(torch.optim.SGD, lr=0.1)), data)
    accuracy = trainer.test(module, datamodule=data, verbose=False)[0]["accuracy"]
    print(f"{type(algorithm).__name__:16} {100 * accuracy:5.1f} % right")
