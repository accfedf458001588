"""Federates a LightningModule that is not ours, unmodified: Lightning's Transformer demo, on three institutions' text.

    python docs/foreign_module.py

The text is what Python's own help shows, cut into three unequal parts; it takes some seconds.
"""

import os
import pydoc_data.topics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.demos import LightningTransformer, WikiText2
from torch.nn.functional import nll_loss
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvg


@contextmanager
def folder_with_text(words: int = 8_000) -> Iterator[None]:
    """A working directory in which the demo finds its ``data/wikitext-2.txt`` and so downloads nothing."""
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("data").mkdir()
        text = " ".join(" ".join(pydoc_data.topics.topics.values()).split()[:words])
        Path("data/wikitext-2.txt").write_text(text, encoding="utf8")
        try:
            yield
        finally:
            os.chdir(home)


def institutions() -> tuple[dict[str, Subset], int]:
    """Three unequal parts of the text, and the size of the vocabulary."""
    text = WikiText2(download=False)
    parts = torch.arange(len(text)).tensor_split([len(text) // 2, len(text) * 4 // 5])
    names = ("library", "university", "archive")
    return {n: Subset(text, part.tolist()) for n, part in zip(names, parts, strict=True)}, text.vocab_size


@torch.no_grad()
def mean_loss(module: LightningTransformer, clients: dict[str, Subset]) -> float:
    """Over the text of all institutions, in evaluation mode."""
    module.eval()
    batches = DataLoader(ConcatDataset(clients.values()), batch_size=32)
    return float(torch.stack([nll_loss(module(x, y), y.view(-1)) for x, y in batches]).mean())


def main() -> tuple[float, float]:
    """The loss before and after three rounds."""
    seed_everything(0, verbose=False)
    with folder_with_text():
        clients, vocabulary = institutions()
        module = LightningTransformer(vocab_size=vocabulary)
        before = mean_loss(module, clients)

        data = FederatedDataModule.from_datasets(clients, batch_size=8)
        federation = FederationCallback(algorithm=FedAvg())
        trainer = Trainer(max_epochs=3, callbacks=[federation], accelerator="cpu", logger=False)
        trainer.fit(module, datamodule=data)

        after = mean_loss(module, clients)
    print(f"mean loss of the server's model: {before:.3f} before, {after:.3f} after three rounds")
    return before, after


if __name__ == "__main__":
    main()
