"""Somebody's own images from the command line: one switch for colour and size, samples, and what was not measured."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from lit_epgan.callbacks import SampleWriter
from lit_epgan.cli.main import main
from tests.generative import gan, trainer
from tests.test_cli import refusal

pytestmark = pytest.mark.usefixtures("folder")
OWN = ["--config", "folder.yaml", "--data.path", "images", "--trainer.max_epochs", "1", "--trainer.logger", "false"]
OWN += ["--data.warmup_steps", "1", "--data.local_steps", "1", "--data.batch_size", "4", "--model.lr_decay", "null"]
OWN += [
    "--trainer.callbacks",
    '[{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}]',
    "--trainer.accelerator",
    "cpu",
]


@pytest.fixture
def images(folder: Path) -> Path:
    for client in ("a", "b"):
        (folder / "images" / client).mkdir(parents=True)
        for k in range(5):
            Image.effect_noise((40, 40), 60).save(folder / "images" / client / f"{k}.png")
    return folder


def test_one_switch_for_colour_and_size_and_samples_without_test_data(images, capsys):
    """The data, both networks, and what predict draws."""
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


def test_what_is_drawn_hangs_on_the_seed_alone(tmp_path: Path) -> None:
    """Not on what drew before, which it does not disturb either."""
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


def test_networks_of_flat_rows_follow_too(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--data.color", "rgb", "--data.image_size", "5", "--model.channels_last", "false"]
    words += ["--model.generator", "lit_epgan.networks.MLPGenerator"]
    words += ["--model.discriminator", "lit_epgan.networks.MLPDiscriminator"]
    assert main(["fit", *OWN, *words]) == 0
    model = yaml.safe_load(Path("runs/folder/config.yaml").read_text())["model"]["init_args"]
    assert [model[name]["init_args"]["data_shape"] for name in ("generator", "discriminator")] == [[3, 5, 5]] * 2


def test_a_network_cannot_differ_from_the_data(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = refusal(capsys, "fit", *OWN, "--model.generator.image_size", "16")
    assert told == "model.generator.image_size follows the data: give --data.image_size and --data.color instead."


def test_what_measures_nothing_says_so(images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", *OWN]) == 0
    cases = (("test", "test"), ("validate", "validation"))
    for command, kind in cases:
        told = refusal(capsys, command, *OWN)
        assert told.startswith(f"Nothing was measured: the data module has no {kind} data.")
    for client, part in (("a", "train"), ("b", "val")):
        (images / "own" / part).mkdir(parents=True)
        (images / "images" / client).rename(images / "own" / part / "a")
    shutil.copytree(images / "own" / "val", images / "own" / "test")
    for command, kind in cases:
        told = refusal(capsys, command, *OWN, "--data.path", "own")
        assert told.startswith(f"Nothing was measured: neither GAN nor a callback logs a metric on {kind} data.")
