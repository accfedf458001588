"""IS and FID of the same images equal those of torch-fidelity's own command, which reads them from folders."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from lit_epgan.metrics.image_scores import ImageScores, reference
from tests.inception_weights import stand_in
from tests.processes import run_words

pytestmark = pytest.mark.slow

LAYERS = ["2048", "logits_unbiased"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of Inception's layout; the published one has to be fetched, and what is compared holds for any weights."""

    class Untrained(FeatureExtractorInceptionV3):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return None

    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save({}, path)
    torch.manual_seed(0)
    network = Untrained("untrained", LAYERS, feature_extractor_weights_path=str(path))
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:  # so that what the images differ in reaches the features and tells classes apart
            gain = 30 if name.startswith("fc.") else 2**0.5
            torch.nn.init.normal_(parameter, std=gain / parameter[0].numel() ** 0.5)
    torch.save(network.state_dict(), path)
    return path


def folder_of(images: Tensor, folder: Path) -> Path:
    """The images (n, 3, height, width) in uint8 as files."""
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i:03d}.png")
    return folder


def drawn(seed: int, strength: float, n: int) -> Tensor:
    """Coloured stripes in noise of some strength: n images of 32 x 32."""
    rng = np.random.default_rng(seed)
    stripes = np.sin(np.arange(32) * rng.uniform(0.1, 2, (n, 3, 1, 1)))
    noisy = 127 * stripes * np.ones((32, 1)) + rng.normal(0, strength, (n, 3, 32, 32)) + 128
    return torch.from_numpy(noisy.clip(0, 255).astype(np.uint8))


def command(weights: Path, first: Path, second: Path) -> dict[str, float]:
    words = [sys.executable, "-m", "torch_fidelity.fidelity", "--cpu", "--json", "--isc", "--fid"]
    words += ["--input1", str(first), "--input2", str(second), "--feature-extractor-weights-path", str(weights)]
    words += ["--no-cache", "--save-cpu-ram", "--silent"]
    return json.loads(run_words(words))


def test_is_and_fid_are_the_commands(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generated, real = drawn(1, 60.0, 20), drawn(2, 20.0, 8)
    expected = command(weights, folder_of(generated, tmp_path / "generated"), folder_of(real, tmp_path / "real"))
    assert expected["frechet_inception_distance"] > 1e-3, expected
    assert expected["inception_score_mean"] > 1.05, expected

    extractor = stand_in(weights)
    against = reference(extractor, lambda: iter((real.float() / 127.5 - 1).split(5)))
    scores = ImageScores(extractor, len(generated))
    for part in (generated.float() / 127.5 - 1).split(7):
        scores.add(part)
    found = scores.of_samples() | scores.against(against)
    assert found["is"] == pytest.approx(expected["inception_score_mean"], rel=1e-3)
    assert found["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-3)

    same = ImageScores(extractor, len(real))
    same.add(real.float() / 127.5 - 1)
    assert same.against(against)["fid"] == pytest.approx(0, abs=1e-6)
