"""A LightningModule that is not ours, unmodified: Lightning's own Transformer demo, federated in a few lines."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from torch.nn.functional import nll_loss
from torch.utils.data import Dataset

from callbacks import FederationCallback
from datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.randomness import derive_seed, seed_streams
from tests.federations import fit
from tests.test_federation import plain_batches

VOCABULARY, LENGTH = 17, 6


class Counting(Dataset[Any]):
    """An institution that counts in steps of its own: records (sequence, the same one later), each of LENGTH words."""

    def __init__(self, step: int, n: int) -> None:
        self.words = (torch.arange(n + LENGTH) * step) % VOCABULARY
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.words[i : i + LENGTH], self.words[i + 1 : i + LENGTH + 1]


def institutions() -> list[Counting]:
    return [Counting(step, n) for step, n in ((1, 40), (2, 17), (5, 24))]


def transformer() -> LightningTransformer:
    torch.manual_seed(0)
    module = LightningTransformer(vocab_size=VOCABULARY)
    module.float()
    return module


@torch.no_grad()
def loss_of(module: LightningTransformer) -> float:
    """The mean loss over all institutions, in evaluation mode."""
    module.eval()
    losses = []
    for dataset in institutions():
        x, y = (torch.stack(parts) for parts in zip(*(dataset[i] for i in range(len(dataset))), strict=True))
        losses.append(float(nll_loss(module(x, y), y.view(-1))))
    return sum(losses) / len(losses)


def test_the_example_of_the_readme() -> None:
    module = transformer()
    before = loss_of(module)
    data = FederatedDataModule.from_datasets(institutions(), batch_size=8)
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    trainer = Trainer(max_epochs=3, callbacks=[FederationCallback(algorithm=FedAvg())], accelerator="cpu", **options)
    trainer.fit(module, datamodule=data)
    assert loss_of(module) < before - 0.3


def test_it_is_the_plain_weighted_mean_of_its_clients() -> None:
    """Two rounds of FedAvg by hand around the module's own training_step and optimizer, dropout included."""
    module = transformer()
    server = copy.deepcopy(module)
    for round_ in range(2):
        states = []
        for client, dataset in enumerate(institutions()):
            local = copy.deepcopy(server).train()
            optimizer = local.configure_optimizers()
            seed_streams(derive_seed(0, round_, client, "steps"))
            index = [b[0] for b in plain_batches(Index(len(dataset)), None, round_, client)]
            for rows in index:
                batch = [torch.stack(parts) for parts in zip(*(dataset[int(i)] for i in rows), strict=True)]
                optimizer.zero_grad()
                local.training_step(batch, 0).backward()
                optimizer.step()
            states.append(local.state_dict())
        weights = [len(d) / sum(map(len, institutions())) for d in institutions()]
        merged = {n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) for n in states[0]}
        server.load_state_dict(merged)
    data = FederatedDataModule.from_datasets(institutions(), batch_size=8)
    fit(module, data, rounds=2, precision="32-true")
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, server.state_dict()[name], rtol=1e-4, atol=1e-5)


class Index(Dataset[Any]):
    """Row numbers, to learn the order in which a client is read."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return (i,)


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel], ids=["automatic", "manual"])
@pytest.mark.parametrize("algorithm", [FedAvg(), ExpectationPropagation()], ids=["fedavg", "ep"])
def test_lightnings_own_test_modules(kind: Any, algorithm: Any) -> None:
    """They define every hook there is, train, validate and test."""
    torch.manual_seed(1)
    module = kind()
    sets = [RandomDataset(32, n) for n in (20, 7, 12)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4, val_dataset=sets[1], test_dataset=sets[2])
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = fit(module, data, rounds=2, algorithm=algorithm, precision="32-true", num_sanity_val_steps=2)
    assert all(not torch.equal(p, before[n]) for n, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)
