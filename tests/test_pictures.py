"""What is drawn and written of generated samples: in plain fits, in a federation, and of somebody's own images."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
import yaml
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from torch import Tensor

from lit_epgan.callbacks import SampleWriter
from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.callbacks.pictures import tile
from lit_epgan.callbacks.sample_grid import SampleGrid
from lit_epgan.callbacks.toy_metrics import DensityMap, ToyMetrics
from lit_epgan.cli.main import main
from lit_epgan.datamodules.toy import ToyDataModule
from lit_epgan.federated import GeneratorSites
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.generative import Images, Log, Union, gan, trainer, use_pixels
from tests.test_cli import refusal


@pytest.fixture(autouse=True)
def pixels(monkeypatch, tmp_path):
    return use_pixels(monkeypatch, tmp_path)


def test_tile_enlarges_and_orders_images():
    """Three 8 x 8 images in two columns: tiles of 48 pixels, two grey pixels between, -1 black, 0 grey, 1 white."""
    images = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    sheet = tile(images, columns=2)
    assert (sheet.shape, sheet[2:50, 2:50].max()) == ((2 * 50 + 2, 2 * 50 + 2, 3), 0)
    assert (sheet[2:50, 52:100] == 128).all()
    assert sheet[52:100, 2:50].min() == 255
    assert (sheet[:2] == 128).all()
    colours = torch.rand(4, 3, 32, 32) * 2 - 1
    assert tile(colours, 4).shape == (68, 4 * 66 + 2, 3)  # 32 pixels are enlarged to 64
    assert not np.array_equal(tile(colours, 4)[..., 0], tile(colours, 4)[..., 1])


def test_grids_are_written_per_round_with_a_newest_copy(tmp_path):
    module = gan()
    trainer(tmp_path, SampleGrid(2, 3), Union()).fit(module, Images())
    pictures = tmp_path / "pictures"
    names = [f"{what}{when}.png" for what in ("samples", "union") for when in ("-round-0000", "-round-0001", "")]
    assert sorted(p.name for p in pictures.iterdir()) == names
    newest = np.asarray(Image.open(pictures / "samples.png"))
    assert np.array_equal(newest, tile(module.sample(6, generator_for("sample grid")), 3))
    assert np.array_equal(newest, np.asarray(Image.open(pictures / "samples-round-0001.png")))
    assert not np.array_equal(newest, np.asarray(Image.open(pictures / "samples-round-0000.png")))


def test_a_grid_by_class_has_a_row_for_each_and_leaves_cells_empty(tmp_path, monkeypatch):
    """The extractor reads class 1 where an image's first pixel is positive, else class 0; nothing is class 2."""

    class Sign:
        def extract(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = images[:, 0, 0, 0]
            return images.flatten(1), torch.stack([-first, first, torch.full_like(first, -9.0)], 1)

    monkeypatch.setattr("lit_epgan.callbacks.sample_grid.feature_extractor", lambda name, data_dir="": Sign())
    module = gan()
    trainer(tmp_path, SampleGrid(3, 4, by_class="digits")).fit(module, Images())
    drawn = module.sample(3 * 4 * 10, generator_for("sample grid"))
    first = drawn[:, 0, 0, 0]
    expected = torch.stack([drawn[first <= 0][:4], drawn[first > 0][:4], torch.full((4, *drawn.shape[1:]), torch.nan)])
    newest = np.asarray(Image.open(tmp_path / "pictures" / "samples.png"))
    assert np.array_equal(newest, tile(expected.flatten(0, 1), 4))
    assert (newest[-40:] == 128).all()


def test_several_generators_have_a_row_each(tmp_path):
    class Two(GAN):
        def sample_each(self, n: int, generator: torch.Generator) -> Tensor:
            return torch.stack([torch.full((n, 1, 8, 8), value) for value in (-1.0, 1.0)])

    module = Two(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,)))
    trainer(tmp_path, SampleGrid(8, 3), max_epochs=1).fit(module, Images())
    sheet = np.asarray(Image.open(tmp_path / "pictures" / "samples.png"))
    assert (sheet.shape[0], sheet[2:50, 2:50].max()) == (2 * 50 + 2, 0)
    assert sheet[52:100, 2:50].min() == 255


def test_loggers_get_the_pictures(tmp_path):
    wandb.finish()  # what another test of this process has left open or set would be taken over
    wandb.teardown()
    logger = WandbLogger(save_dir=tmp_path, offline=True, project="test", id="abc")
    board = TensorBoardLogger(tmp_path)
    trainer(tmp_path, SampleGrid(2, 3), logger=[logger, board], max_epochs=1).fit(gan(), Images())
    wandb.finish()
    board.finalize("success")
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/pictures/*.png"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board.log_dir))
    events.Reload()
    assert events.Tags()["images"] == ["pictures/samples"]


def test_grids_are_for_images(tmp_path):
    module = GAN(MLPGenerator((2,), 2, (8,), tanh=False), MLPDiscriminator((2,), (8,)))
    with pytest.raises(UserError, match="use DensityMap"):
        trainer(tmp_path, SampleGrid(), FederationCallback()).fit(module, ToyDataModule(points=64, local_steps=2))


def test_toy_federation_logs_and_draws_the_union_too(tmp_path):
    torch.manual_seed(0)
    generator = MLPGenerator((2,), 2, (32, 32), tanh=False)
    module = GAN(generator, MLPDiscriminator((2,), (32, 32)), lr=2e-3, objective="lsgan")
    datamodule = ToyDataModule(batch_size=64, local_steps=2, warmup_steps=150)
    log = Log()
    algorithm = GeneratorSites(own_rows=16, pool=200)
    run = trainer(tmp_path, FederationCallback(algorithm), ToyMetrics(samples=2000), DensityMap(samples=1000), log)
    run.fit(module, datamodule)
    names = {"coverage", "weakest_mode", "modes", "d_g"}
    assert names | {f"union/{n}" for n in names} | {"d_mse"} <= set(log.rounds[-1])
    assert log.rounds[0]["union/coverage"] > log.rounds[0]["coverage"]
    assert log.rounds[0]["union/modes"] == 4
    assert log.rounds[0]["union/d_g"] < log.rounds[0]["d_g"]
    assert {p.name for p in (tmp_path / "pictures").iterdir()} >= {"density.png", "density-round-0001.png"}
    picture = np.asarray(Image.open(tmp_path / "pictures" / "density.png"))
    assert picture.std() > 10  # something is drawn


def test_predict_writes_images_and_an_array(tmp_path):
    module = gan()
    run = trainer(tmp_path, SampleWriter(images=5))
    torch.manual_seed(4)
    predictions: Any = run.predict(module, Images())
    folder = tmp_path / "samples"
    array = np.load(folder / "samples.npy")
    assert array.shape == (20, 1, 8, 8)
    np.testing.assert_array_equal(array, torch.cat(predictions).numpy())
    assert sorted(p.name for p in folder.glob("*.png")) == [f"{k:05d}.png" for k in range(5)]
    image = np.asarray(Image.open(folder / "00003.png"))
    assert image.shape == (8, 8, 3)
    assert abs(image[..., 0] / 127.5 - 1 - array[3, 0]).max() < 0.01
    trainer(tmp_path, SampleWriter(images=2)).predict(module, Images())
    assert len(list(folder.glob("*.png"))) == 2  # none of the earlier ones is left


OWN = ["--config", "folder.yaml", "--data.path", "images", "--trainer.max_epochs", "1", "--trainer.logger", "false"]
OWN += ["--data.warmup_steps", "1", "--data.local_steps", "1", "--data.batch_size", "4", "--model.lr_decay", "null"]
OWN += [
    "--trainer.callbacks",
    '[{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}]',
    "--trainer.accelerator",
    "cpu",
]


@pytest.fixture
def images(folder):
    for client in ("a", "b"):
        (folder / "images" / client).mkdir(parents=True)
        for k in range(5):
            Image.effect_noise((40, 40), 60).save(folder / "images" / client / f"{k}.png")
    return folder


def test_one_switch_for_colour_and_size_and_samples_without_test_data(images, capsys):
    colour = ["--data.color", "rgb", "--data.image_size", "16"]
    assert main(["fit", *OWN, *colour]) == 0
    assert "The networks take images of 3 x 16 x 16" in capsys.readouterr().err
    model = yaml.safe_load(Path("runs/folder/config.yaml").read_text())["model"]["init_args"]
    for network in (model["generator"], model["discriminator"]):
        assert (network["init_args"]["channels"], network["init_args"]["image_size"]) == (3, 16)
    assert main(["predict", *OWN, *colour]) == 0
    assert "Predictions are in runs/folder/samples." in capsys.readouterr().err
    samples = np.load("runs/folder/samples/samples.npy")
    assert samples.shape == (1000, 3, 16, 16)
    assert np.isfinite(samples).all()
    assert len(np.unique(samples[:, 0, 0, 0])) > 900
    assert len(list(Path("runs/folder/samples").glob("*.png"))) == 1000


def test_what_is_drawn_hangs_on_the_seed_alone(tmp_path):
    drawn = []
    for seed in (1, 2):
        writer = SampleWriter(samples=5, images=0)
        run, module = trainer(tmp_path, writer), gan()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        writer.draw(run, module)
        assert torch.equal(torch.get_rng_state(), before)
        drawn.append(np.load(tmp_path / "samples" / "samples.npy"))
    assert drawn[0].shape == (5, 1, 8, 8)
    assert np.array_equal(*drawn)


def test_networks_of_flat_rows_follow_too(images, capsys):
    words = ["--data.color", "rgb", "--data.image_size", "5", "--model.channels_last", "false"]
    words += ["--model.generator", "lit_epgan.networks.MLPGenerator"]
    words += ["--model.discriminator", "lit_epgan.networks.MLPDiscriminator"]
    assert main(["fit", *OWN, *words]) == 0
    model = yaml.safe_load(Path("runs/folder/config.yaml").read_text())["model"]["init_args"]
    assert [model[name]["init_args"]["data_shape"] for name in ("generator", "discriminator")] == [[3, 5, 5]] * 2


def test_a_network_cannot_differ_from_the_data(images, capsys):
    told = refusal(capsys, "fit", *OWN, "--model.generator.image_size", "16")
    assert told == "model.generator.image_size follows the data: give --data.image_size and --data.color instead."


def test_what_measures_nothing_says_so(images, capsys):
    assert main(["fit", *OWN]) == 0
    told = refusal(capsys, "test", *OWN)
    assert told.startswith("Nothing was measured: the data module has no test data.")
    for client, part in (("a", "train"), ("b", "val")):
        (images / "own" / part).mkdir(parents=True)
        (images / "images" / client).rename(images / "own" / part / "a")
    shutil.copytree(images / "own" / "val", images / "own" / "test")
    told = refusal(capsys, "validate", *OWN, "--data.path", "own")
    assert told.startswith("Nothing was measured: neither GAN nor a callback logs a metric on validation data.")
