"""A DCGAN of one's own on 32 x 32 colour pictures, from the command line: FedAvg and the sites of function space."""

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import LightningModule
from PIL import Image
from torch import nn
from torch.nn.functional import binary_cross_entropy

from lit_epgan.cli.main import main

CONFIG = """
model: {class_path: tests.test_own_gan.SiteDCGAN}
data:
  class_path: lit_epgan.datamodules.FolderDataModule
  init_args: {path: pictures, color: rgb, image_size: 32, batch_size: 8, local_steps: 2}
federation: {class_path: lit_epgan.callbacks.FederationCallback}
trainer:
  max_epochs: 2
  accelerator: cpu
  enable_progress_bar: false
  callbacks:
    - class_path: lit_epgan.callbacks.RoundCheckpoint
    - class_path: lit_epgan.callbacks.SampleGrid
"""


class DCGAN(LightningModule):
    """Lightning's own, with fewer channels, its two optimizers by hand as Lightning 2 wants it."""

    def __init__(self, latent_dim: int = 8, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        sizes = ((latent_dim, 4 * width, 1, 0), (4 * width, 2 * width, 2, 1), (2 * width, width, 2, 1))
        up = [[nn.ConvTranspose2d(i, o, 4, s, p), nn.BatchNorm2d(o), nn.ReLU()] for i, o, s, p in sizes]
        last = nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh()
        self.generator = nn.Sequential(*(layer for block in up for layer in block), *last)
        down = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 4, 2, 1)]
        norm = nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2)
        self.discriminator = nn.Sequential(*down, *norm, nn.Conv2d(2 * width, 1, 8), nn.Sigmoid(), nn.Flatten(0))

    def forward(self, noise):
        return self.generator(noise[:, :, None, None])

    def real_loss(self, p, weight):
        return binary_cross_entropy(p, torch.ones_like(p))

    def training_step(self, batch, batch_idx):
        real, weight = batch[0], batch[2] if len(batch) > 2 else None
        fake = self(torch.randn(len(real), self.hparams.latent_dim, device=self.device))
        for player, optimizer in enumerate(self.optimizers()):
            p = self.discriminator(fake.detach() if player else fake)
            loss = binary_cross_entropy(p, torch.full_like(p, 1 - player))
            optimizer.zero_grad()
            self.manual_backward(loss + self.real_loss(self.discriminator(real), weight) if player else loss)
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(net.parameters(), 2e-4, (0.5, 0.999)) for net in (self.generator, self.discriminator)]


class SiteDCGAN(DCGAN):
    takes_weights = True

    def sample(self, n, generator=None):
        return self(torch.randn(n, self.hparams.latent_dim, generator=generator).to(self.device))

    def real_loss(self, p, weight):
        return super().real_loss(p, weight) if weight is None else -(weight * p.log().clamp(min=-100)).sum()


GENERATOR = ("algorithms/generator_sites.yaml", "--federation.algorithm.generator=generator")
HERDING = ("--federation.algorithm.points=20", "--federation.algorithm.herding_steps=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "pictures"),
    [
        ([], {"samples"}),
        (["--config", *GENERATOR], {"union"}),
        (["--config", "algorithms/embedding_sites.yaml", *HERDING], {"herded"}),
    ],
    ids=["FedAvg", "generator sites", "embedding sites"],
)
def test_it_trains_to_the_end(words, pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gan.yaml").write_text(CONFIG)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 32, 3), dtype=np.uint8)
    for number, each in enumerate(pixels):
        folder = tmp_path / "pictures" / "train" / f"clinic-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(each).save(folder / f"{number}.png")
    place = ["--trainer.default_root_dir", "run"]
    assert main(["fit", "--config", "gan.yaml", *words, *place]) == 0, capsys.readouterr().err
    assert len(pd.read_csv("run/metrics.csv")) == 2
    assert pictures <= {path.stem for path in (tmp_path / "run" / "pictures").glob("*.png")}
