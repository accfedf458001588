"""A GAN of somebody's own under generator and embedding sites: told at the start what it lacks, or trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.errors import UserError
from lit_epgan.federated import EmbeddingSites, GeneratorSites
from lit_epgan.federated.function_space.generator_sites import SiteTensors

ALGORITHMS = {
    "generator": lambda: GeneratorSites(generator="generator", own_rows=2, pool=50),
    "embedding": lambda: EmbeddingSites(points=20, herding_steps=3, frequencies=16, own_rows=2),
}


class Foreign(LightningModule):
    """A GAN as tutorials have it: BatchNorm in its generator, and a batch is one tensor in a list."""

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
    """Made ready: it weighs the rows, and says so."""

    takes_weights = True

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        weights.append(batch[2] if len(batch) > 2 else None)
        self.step(real, torch.full((len(real),), 1 / len(real)) if weights[-1] is None else weights[-1])


class Unasked(Weighing):
    """Takes no generator of randomness."""

    def sample(self, n: int) -> Tensor:  # type: ignore[override]
        return self.generator(torch.randn(n, 4))


weights: list[Tensor | None] = []


def fit(module: LightningModule, algorithm: Algorithm, folder: Path) -> None:
    weights.clear()
    sets = {name: TensorDataset(torch.rand(20, 1, 8, 8) * 2 - 1) for name in ("a", "b")}
    data = FederatedDataModule.from_datasets(sets, batch_size=5)
    Trainer(
        default_root_dir=folder, max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FederationCallback(algorithm)],
    ).fit(module, datamodule=data)  # fmt: skip


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_what_it_lacks_is_said_before_it_trains(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Foreign, "step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(UserError, match=r"\(x, labels, weight\).* weigh Foreign's loss .* takes_weights = True"):
        fit(Foreign(), ALGORITHMS[kind](), tmp_path)
    with pytest.raises(UserError, match=r"Unasked has no sample\(n, generator\), by which \w+ draws from it"):
        fit(Unasked(), ALGORITHMS[kind](), tmp_path)


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_it_trains_with_batch_norm_in_its_generator(kind: str, tmp_path: Path) -> None:
    """In the second round each client's weights are those of own rows and of the others' samples."""
    module = Weighing()
    fit(module, ALGORITHMS[kind](), tmp_path)
    assert weights[:8] == [None] * 8
    assert len(weights) == 16
    for weight in weights[8:]:
        torch.testing.assert_close(weight, torch.tensor([1 / 4] * 2 + [1 / 6] * 3))  # two own rows of n_k / n = 1/2
    assert all(parameter.isfinite().all() for parameter in module.parameters())


def test_sites_are_drawn_in_evaluation_mode() -> None:
    """A sample of a site does not hang on the others that are drawn with it, nor does drawing change the module."""
    torch.manual_seed(0)
    module = Weighing()
    tensors = SiteTensors(module, "generator")
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    one, many = (tensors.draw(tensors.read(), n, "a stream")[0] for n in (1, 3))
    assert torch.allclose(one[0], many[0], atol=1e-6)
    assert module.generator.training
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
