"""A LightningModule that is not ours, unmodified: Lightning's own Transformer demo, federated in a few lines."""

import copy
import re
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.errors import UserError
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, FedAvg, GeneratorSites
from lit_epgan.federated.function_space.generator_sites import SiteTensors
from lit_epgan.randomness import derive_seed, seed_streams
from tests.federations import fit
from tests.test_federation import plain_batches

ROOT = Path(__file__).parent.parent

VOCABULARY, LENGTH = 17, 6


class Counting(Dataset[Any]):
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
    return LightningTransformer(vocab_size=VOCABULARY)


@pytest.mark.slow
def test_the_example_in_docs_runs_and_the_loss_falls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before, after = runpy.run_path(str(ROOT / "docs" / "foreign_module.py"))["main"]()
    assert after < before - 0.5
    assert not any(path.suffix == ".txt" for path in tmp_path.rglob("*"))


def test_it_is_the_plain_weighted_mean_of_its_clients(tmp_path, monkeypatch):
    """Two rounds of FedAvg by hand around the module's own training_step and optimizer, dropout included."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("there already, so that prepare_data downloads nothing")
    monkeypatch.chdir(tmp_path)
    module = transformer()
    server = copy.deepcopy(module).double()
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
                with DoublePrecision().forward_context():
                    loss = local.training_step(batch, 0)
                loss.backward()
                optimizer.step()
            states.append(local.state_dict())
        weights = [len(d) / sum(map(len, institutions())) for d in institutions()]
        merged = {n: sum(w * s[n] for w, s in zip(weights, states, strict=True)) for n in states[0]}
        server.load_state_dict(merged)
    data = FederatedDataModule.from_datasets(institutions(), batch_size=8)
    fit(module, data, rounds=2)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, server.state_dict()[name], rtol=1e-9, atol=1e-9)


class Index(Dataset[Any]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        return (i,)


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel], ids=["automatic", "manual"])
@pytest.mark.parametrize("algorithm", [FedAvg(), ExpectationPropagation()], ids=["fedavg", "ep"])
def test_lightnings_own_test_modules(kind, algorithm):
    """They define every hook there is, train, validate and test."""
    torch.manual_seed(1)
    module = kind()
    sets = [RandomDataset(32, n) for n in (20, 7, 12)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4, val_dataset=sets[1], test_dataset=sets[2])
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = fit(module, data, rounds=2, algorithm=algorithm, precision="32-true", num_sanity_val_steps=2)
    assert all(not torch.equal(p, before[n]) for n, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)


@pytest.mark.slow
def test_the_pages_own_module_runs_from_the_command_line(tmp_path, monkeypatch):
    """docs/federating.md's two files, as they stand there."""
    section = (ROOT / "docs" / "federating.md").read_text(encoding="utf-8").split("## From the command line")[1]
    for name, language in (("wards.py", "python"), ("wards.yaml", "yaml")):
        (tmp_path / name).write_text(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["fit", "--config", "wards.yaml"]) == 0
    assert main(["fit", "--config", "wards.yaml", "--config", "algorithms/scaffold.yaml"]) == 0
    for run in ("wards", "wards_scaffold"):
        last = pd.read_csv(Path("runs") / run / "metrics.csv").iloc[-1]
        clients = [last[f"val_loss/client/ward-{ward}"] for ward in "abc"]
        assert last["val_loss/worst_client"] == max(clients) < 0.01


ALGORITHMS = {
    "generator": lambda: GeneratorSites(generator="generator", own_rows=2, pool=50),
    "embedding": lambda: EmbeddingSites(points=20, herding_steps=3, frequencies=16, own_rows=2),
}


class Foreign(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8)))
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.generator(torch.randn(n, 4, generator=generator))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        self.step(real, torch.full((len(real),), 1 / len(real)))

    def step(self, real: Tensor, weight: Tensor) -> None:
        critic, players = self.discriminator, self.optimizers()
        fake = self.sample(len(real))
        for player, loss in zip(
            players,
            (-critic(fake).mean(), critic(fake.detach()).mean() - (weight * critic(real)[:, 0]).sum()),
            strict=True,
        ):
            player.zero_grad()
            self.manual_backward(loss)
            player.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)]


class Weighing(Foreign):
    takes_weights = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        weights.append(batch[2] if len(batch) > 2 else None)
        self.step(real, torch.full((len(real),), 1 / len(real)) if weights[-1] is None else weights[-1])


class Unasked(Weighing):
    def sample(self, n: int) -> Tensor:
        return self.generator(torch.randn(n, 4))


weights: list[Tensor | None] = []


def fit_gan(module: LightningModule, algorithm: Algorithm, folder: Path) -> None:
    weights.clear()
    sets = {name: TensorDataset(torch.rand(20, 1, 8, 8) * 2 - 1) for name in ("a", "b")}
    data = FederatedDataModule.from_datasets(sets, batch_size=5)
    Trainer(
        default_root_dir=folder, max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FederationCallback(algorithm)],
    ).fit(module, datamodule=data)  # fmt: skip


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_it_lacks_is_said_before_it_trains(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(Foreign, "step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(UserError, match=r"\(x, labels, weight\).* weigh Foreign's loss .* takes_weights = True"):
        fit_gan(Foreign(), ALGORITHMS[kind](), tmp_path)
    with pytest.raises(UserError, match=r"Unasked has no sample\(n, generator\), by which \w+ draws from it"):
        fit_gan(Unasked(), ALGORITHMS[kind](), tmp_path)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_it_trains_with_batch_norm_in_its_generator(kind, tmp_path):
    """In the second round each client's weights are those of own rows and of the others' samples."""
    module = Weighing()
    fit_gan(module, ALGORITHMS[kind](), tmp_path)
    assert weights[:8] == [None] * 8
    assert len(weights) == 16
    for weight in weights[8:]:
        torch.testing.assert_close(weight, torch.tensor([1 / 4] * 2 + [1 / 6] * 3))  # two own rows of n_k / n = 1/2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_sites_are_drawn_in_evaluation_mode():
    """A sample of a site does not hang on the others that are drawn with it, nor does drawing change the module."""
    torch.manual_seed(0)
    module = Weighing()
    tensors = SiteTensors(module, "generator")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    one, many = (tensors.draw(tensors.read(), n, "a stream")[0] for n in (1, 3))
    assert torch.allclose(one[0], many[0], atol=1e-6)
    assert module.generator.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
