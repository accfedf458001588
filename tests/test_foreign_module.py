"""A LightningModule that is not ours, unmodified: Lightning's own Transformer demo, federated in a few lines."""

import re
import runpy
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel, RandomDataset
from lightning.pytorch.plugins import DoublePrecision
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lit_epgan.callbacks import GenerativeMetrics, SampleGrid
from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, FedAvg, GeneratorSites
from lit_epgan.federated.function_space.generator_sites import SiteTensors
from lit_epgan.lib.errors import UserError
from tests.federations import fit
from tests.plain_loop import PlainLoop, assert_plain
from tests.test_federation import plain_batches

ROOT = Path(__file__).parent.parent
VOCABULARY, LENGTH = 17, 6


class Counting(Dataset):
    def __init__(self, step: int, n: int) -> None:
        self.words = (torch.arange(n + LENGTH) * step) % VOCABULARY
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int):
        return self.words[i : i + LENGTH], self.words[i + 1 : i + LENGTH + 1]


def institutions() -> list[Counting]:
    return [Counting(step, n) for step, n in ((1, 12), (2, 5), (5, 9))]


def transformer() -> LightningTransformer:
    torch.manual_seed(0)
    return LightningTransformer(vocab_size=VOCABULARY)


@pytest.mark.slow
def test_the_example_in_docs_runs_and_the_loss_falls(folder, tmp_path):
    example = runpy.run_path(str(ROOT / "docs" / "foreign_module.py"))
    example["folder_with_text"].__wrapped__.__defaults__ = (2500,)  # words
    before, after = example["main"]()
    assert after < before - 0.5
    assert not any(path.suffix == ".txt" for path in tmp_path.rglob("*"))


def test_it_is_the_plain_weighted_mean_of_its_clients(folder, tmp_path):
    """Two rounds of FedAvg by hand around the module's own training_step and optimizer, dropout included."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "wikitext-2.txt").write_text("there already, so that prepare_data downloads nothing")

    def work(local, batches, client, round_):
        optimizer = local.configure_optimizers()
        for (rows,) in batches:
            pairs = [institutions()[client][int(i)] for i in rows]
            optimizer.zero_grad()
            with DoublePrecision().forward_context():
                local.training_step([torch.stack(parts) for parts in zip(*pairs, strict=True)], 0).backward()
            optimizer.step()

    def batches(client, round_):
        return plain_batches(Index(len(institutions()[client])), None, round_, client)

    loop = PlainLoop(work, lambda round_: [0, 1, 2], batches, weights=[len(own) for own in institutions()])
    data = FederatedDataModule.from_datasets(institutions(), batch_size=8)
    assert_plain(transformer(), loop, 2, data, tolerance=1e-9)


class Index(Dataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i):
        return (i,)


@pytest.mark.parametrize("kind", [BoringModel, ManualOptimBoringModel], ids=["automatic", "manual"])
@pytest.mark.parametrize("algorithm", [FedAvg(), ExpectationPropagation()], ids=["fedavg", "ep"])
def test_lightnings_own_test_modules(kind, algorithm):
    torch.manual_seed(1)
    module = kind()
    sets = [RandomDataset(32, n) for n in (20, 7, 12)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4, val_dataset=sets[1], test_dataset=sets[2])
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    trainer = fit(module, data, rounds=2, algorithm=algorithm, precision="32-true", num_sanity_val_steps=2)
    assert all(not torch.equal(p, before[n]) for n, p in module.named_parameters())
    trainer.test(module, datamodule=data, verbose=False)


@pytest.mark.slow
def test_the_pages_own_module_runs_from_the_command_line(folder, tmp_path, monkeypatch):
    section = (ROOT / "docs" / "federating.md").read_text(encoding="utf-8").split("## From the command line")[1]
    for name, language in (("wards.py", "python"), ("wards.yaml", "yaml")):
        (tmp_path / name).write_text(re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)[0])
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

    def training_step(self, batch, batch_idx: int) -> None:
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

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)]


class Weighing(Foreign):
    takes_weights = True

    def training_step(self, batch, batch_idx: int) -> None:
        real = batch[0]
        weights.append(batch[2] if len(batch) > 2 else None)
        self.step(real, torch.full((len(real),), 1 / len(real)) if weights[-1] is None else weights[-1])


class Unasked(Weighing):
    def sample(self, n: int) -> Tensor:
        return self.generator(torch.randn(n, 4))


class Claiming(Foreign):
    takes_weights = True

    def training_step(self, batch, batch_idx: int) -> None:
        self.step(batch[0], torch.full((len(batch[0]),), 1 / len(batch[0])))


weights: list[Tensor | None] = []


def fit_gan(module: LightningModule, algorithm: Algorithm, folder: Path) -> None:
    weights.clear()
    sets = {name: TensorDataset(torch.rand(20, 1, 8, 8) * 2 - 1) for name in ("a", "b")}
    data = FederatedDataModule.from_datasets(sets, batch_size=5)
    fit(module, data, 2, folder, algorithm=algorithm, precision="32-true")


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_it_lacks_is_said_before_it_trains(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(Foreign, "step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(UserError, match=r"\(x, labels, weight\).* weigh Foreign's loss .* takes_weights = True"):
        fit_gan(Foreign(), ALGORITHMS[kind](), tmp_path)
    with pytest.raises(UserError, match=r"Unasked has no sample\(n, generator\), by which \w+ draws from it"):
        fit_gan(Unasked(), ALGORITHMS[kind](), tmp_path)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_that_it_takes_weights_is_checked(kind, tmp_path):
    with pytest.raises(UserError, match=r"Claiming says takes_weights = True, but its training_step has not read"):
        fit_gan(Claiming(), ALGORITHMS[kind](), tmp_path)


def entropy(p: Tensor, weight: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy(p.sigmoid(), torch.ones_like(p), weight, reduction="sum")


@pytest.mark.parametrize("loss", [entropy, lambda p, weight: (weight * p).sum()])
def test_weights_beside_a_column_are_refused(loss, tmp_path, monkeypatch):
    right = []

    def step(module: Weighing, real: Tensor, weight: Tensor) -> None:
        if weights[-1] is not None:
            right.append(loss(module.discriminator(real), weight[:, None]))
            loss(module.discriminator(real), weight)

    monkeypatch.setattr(Weighing, "step", step)
    with pytest.raises(UserError, match=r"weights \(b,\) .* beside a column \(b, 1\).*: take weight\[:, None\]"):
        fit_gan(Weighing(), ALGORITHMS["generator"](), tmp_path)
    assert len(right) == 1


TAKEN_APART = {
    "x, y = batch": "not enough values",
    "x, y = batch[0], batch[1]": "list index out of range",
    "x, y = batch['x'], batch['y']": None,  # the module's own error
    "x, y = (1, 2, 3)[: len(batch) + 2]": "too many values",
}


@pytest.mark.parametrize("code", TAKEN_APART)
def test_a_batch_that_is_taken_apart_wrongly_is_told(code, tmp_path):
    scope: dict[str, Any] = {}
    exec(f"def training_step(self, batch, batch_idx):\n    {code}", scope)
    unpacking = type("Unpacking", (Foreign,), {"training_step": scope["training_step"]})()
    words = TAKEN_APART[code]
    with pytest.raises(UserError if words else TypeError) as caught:
        fit_gan(unpacking, FedAvg(), tmp_path)
    if words:
        assert "a batch of FederatedDataModule is a list of 1: float32 (5, 1, 8, 8)." in str(caught.value)
        assert words in str(caught.value)


@pytest.mark.parametrize("callback", [GenerativeMetrics("pixels", 4, "train"), SampleGrid()])
def test_a_callback_that_samples_refuses_who_cannot_be_sampled(callback, tmp_path, monkeypatch):
    monkeypatch.setattr(Foreign, "step", lambda *_: pytest.fail("a step was made"))
    monkeypatch.delattr(Foreign, "sample")
    data = FederatedDataModule.from_datasets({"a": TensorDataset(torch.rand(20, 1, 8, 8))}, batch_size=5)
    with pytest.raises(UserError, match=rf"Foreign has no sample.*{type(callback).__name__} draws.*def sample"):
        fit(Foreign(), data, 1, tmp_path, callbacks=[callback], precision="32-true")


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
    module = Weighing()
    tensors = SiteTensors(module, "generator")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    one, many = (tensors.draw(tensors.read(), n, "a stream")[0] for n in (1, 3))
    assert torch.allclose(one[0], many[0], atol=1e-6)
    assert module.generator.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
