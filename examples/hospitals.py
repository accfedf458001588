"""A tabular classifier over three hospitals: who is served worst, and what helps.  python examples/hospitals.py"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset
from torchmetrics.classification import BinaryAUROC

from lit_epgan.callbacks import ClientReport, FederationCallback
from lit_epgan.datamodules import FederatedDataModule

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
HOSPITALS = {"city": slice(0, 300), "coast": slice(300, 450), "islands": slice(450, 569)}


def tumours() -> tuple[dict[str, Subset], dict[str, Subset]]:
    """Training and test data of each hospital; the islands write them in other units."""
    table = load_breast_cancer()
    order = torch.randperm(569, generator=torch.Generator().manual_seed(1))
    x, y = torch.tensor(table.data).float()[order], 1 - torch.tensor(table.target)[order]  # 1 is malignant
    x = (x - x.mean(0)) / x.std(0)
    x[HOSPITALS["islands"]] = 10 * x[HOSPITALS["islands"]] + 20
    records = {name: TensorDataset(x[rows], y[rows]) for name, rows in HOSPITALS.items()}
    train = {name: Subset(own, range(0, len(own), 2)) for name, own in records.items()}
    test = {name: Subset(own, range(1, len(own), 2)) for name, own in records.items()}
    return train, test


class Diagnosis(LightningModule):
    """A normalisation and a logistic regression; it knows nothing of hospitals."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head, self.auroc = nn.BatchNorm1d(30, affine=False), nn.Linear(30, 1), BinaryAUROC()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self(batch[0]), batch[1].float())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.auroc(self(batch[0]), batch[1])
        self.log("auroc", self.auroc)  # the object, so that each hospital's is exact

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


for title, personal in {"Everything shared": [], "Each hospital normalises for itself": ["norm.*"]}.items():
    seed_everything(0, verbose=False)
    train, test = tumours()
    data = FederatedDataModule.from_datasets(train, batch_size=25, local_steps=5, test_dataset=test)
    callbacks = [FederationCallback(local=personal), ClientReport()]
    trainer = Trainer(max_epochs=30, callbacks=callbacks, default_root_dir="runs/hospitals", **QUIET)
    trainer.fit(module := Diagnosis(), datamodule=data)
    print(f"\n{title}")
    trainer.test(module, datamodule=data, verbose=False)
