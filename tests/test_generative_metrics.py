"""What is logged of generated samples, in plain fits and in a federation; IS and FID as torch-fidelity's command."""

import json
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from torch import Tensor
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from lit_epgan.callbacks.generative_metrics import GenerativeMetrics, real_images
from lit_epgan.callbacks.sample_grid import SampleGrid
from lit_epgan.callbacks.toy_metrics import ToyMetrics
from lit_epgan.datamodules import ImageDataModule
from lit_epgan.datamodules.toy import ToyDataModule
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics import feature_extractor, fitting_extractor
from lit_epgan.metrics.image_scores import ImageScores, class_coverage, confident_counts, frechet_distance, reference
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.generative import Images, Log, Union, feature_statistics, gan, trainer, use_pixels
from tests.inception_weights import stand_in
from tests.processes import run_words
from tests.refusals import assert_refused


@pytest.fixture(autouse=True)
def pixels(monkeypatch, tmp_path):
    return use_pixels(monkeypatch, tmp_path)


@pytest.mark.parametrize("validates", [True, False])
def test_metrics_are_those_of_the_modules_samples(validates, tmp_path, pixels):
    """Whether validation ends the round or nothing is validated, the last round's values can be computed by hand."""
    module, log = gan(), Log()
    run = trainer(tmp_path, GenerativeMetrics(samples=300), Union(), log)
    run.fit(module, Images(validates))
    samples = module.sample(300, generator_for("generative metrics"))
    kept = pixels.extract(Images().images[40:])[0]
    real = feature_statistics(kept)
    for prefix, images in (("", samples), ("union/", Union().extra_samples(300)["union"])):
        features, logits = pixels.extract(images)
        classes, weakest = class_coverage(confident_counts(logits) / 300)
        kid = kid_features_to_metric(features, kept, kid_subset_size=20, verbose=False)
        near = prc_features_to_metric(features.float(), kept.float(), verbose=False)
        expected = {
            "fid_digits": frechet_distance(feature_statistics(features), real),
            "kid_digits": kid["kernel_inception_distance_mean"],
            "precision_digits": near["precision"],
            "recall_digits": near["recall"],
            "is_digits": isc_features_to_metric(logits, 1)["inception_score_mean"],
            "classes_digits": float(classes),
            "weakest_class_digits": weakest,
        }
        for name, value in expected.items():
            assert float(run.callback_metrics[prefix + name]) == pytest.approx(value, rel=1e-5, abs=1e-7)
    assert not {"fid", "is", "kid"} & set(run.callback_metrics)
    assert log.rounds[0].keys() <= log.rounds[1].keys()
    assert pixels.seen.count(7) == 2  # the real images' features once, in their loader's batches of 7, 7 and 6


def test_against_several_splits_and_for_every_generator(tmp_path, pixels):
    module = GAN(MLPGenerator(hidden=(16,), members=2), MLPDiscriminator(hidden=(16,)))
    metrics = GenerativeMetrics(samples=60, real=["test", "train"], each_generator=True)
    run = trainer(tmp_path, metrics)
    run.fit(module, Images())
    each = module.sample_each(60, generator_for("generative metrics", "each"))
    for i in (0, 1):
        features = pixels.extract(each[i])[0]
        for suffix, rows in (("", slice(40, 60)), ("_train", slice(0, 40))):
            real = feature_statistics(pixels.extract(Images().images[rows])[0])
            found = float(run.callback_metrics[f"generator_{i}/fid_digits{suffix}"])
            assert found == pytest.approx(frechet_distance(feature_statistics(features), real), rel=1e-5)
    assert "is_digits" in run.callback_metrics
    assert "is_digits_train" not in run.callback_metrics


def test_what_is_seen_of_real_images_is_kept(tmp_path, pixels):
    for _ in range(2):
        run = trainer(tmp_path, GenerativeMetrics(samples=50), max_epochs=1)
        run.fit(gan(), Images())
    assert pixels.seen.count(6) == 1
    pixels.scale.data += 1  # another network
    trainer(tmp_path, GenerativeMetrics(samples=50), max_epochs=1).fit(gan(), Images())
    assert pixels.seen.count(6) == 2


def test_callbacks_disturb_no_stream(tmp_path):
    ends = []
    for callbacks in ([], [GenerativeMetrics(samples=50), SampleGrid(2, 4), Union()]):
        module = gan()
        torch.manual_seed(1)
        trainer(tmp_path, *callbacks).fit(module, Images())
        ends.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_metrics_look_every_nth_round_at_the_last_and_in_a_test(tmp_path, pixels):
    log = Log()
    trainer(tmp_path, GenerativeMetrics(samples=111, every_n_epochs=3), log, max_epochs=5).fit(gan(), Images())
    assert pixels.seen.count(111) == 2
    assert ["fid_digits" in r for r in log.rounds] == [False, False, True, True, True]
    (found,) = trainer(tmp_path, GenerativeMetrics(samples=50)).test(gan(), Images(), verbose=False)
    assert found["fid_digits"] > 0


def test_real_images_that_are_missing_or_not_finite_are_named_before_training(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GAN, "sample", lambda self, n, generator: torch.full((n, 1, 8, 8), torch.nan))
        scored = trainer(tmp_path, GenerativeMetrics(samples=50))
        sentence = "cannot score the samples: pixels are no finite numbers: the training has"
        assert_refused(sentence, scored.fit, gan(), Images())
    monkeypatch.setattr(GAN, "training_step", lambda *_: pytest.fail("a step was made"))
    with pytest.raises(UserError, match="there are none: set real to train or val"):
        trainer(tmp_path, GenerativeMetrics(samples=50)).fit(gan(), Images(tests=False))
    data = Images()
    data.images[50, 0, 3, 3] = torch.nan
    with pytest.raises(UserError, match=r"the test data, and image 10 of them \(from 0\) has a pixel that is no fin"):
        trainer(tmp_path, GenerativeMetrics(samples=50)).fit(gan(), data)


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_real_images_are_said_before_anything_is_trained(count, tmp_path, monkeypatch):
    """Precision and recall look at three neighbours; four images have them."""
    monkeypatch.setattr(GAN, "training_step", lambda *_: pytest.fail("a step was made"))
    data = Images()
    data.test_dataloader = lambda: data._loader(slice(40, 40 + count), 2)
    with pytest.raises(UserError, match=rf"the test data, which are {count} images; it takes at least 4"):
        trainer(tmp_path, GenerativeMetrics(samples=50)).fit(gan(), data)


def test_four_images_of_either_are_enough_and_a_federations_are_all_clients(tmp_path):
    data = Images()
    data.test_dataloader = lambda: data._loader(slice(40, 44), 2)
    run = trainer(tmp_path, GenerativeMetrics(samples=4), max_epochs=1)
    run.fit(gan(), data)
    assert all(value.isfinite() for value in run.callback_metrics.values())
    datamodule = ToyDataModule(points=30, test_points=20)
    assert sum(len(batch) for batch in real_images(datamodule, "train")) == 4 * 30
    assert sum(len(batch) for batch in real_images(datamodule, "test")) == 4 * 20


def test_nonsense_is_refused(tmp_path):
    for build, words in (
        (lambda: GenerativeMetrics(samples=3), "at least 4"),
        (lambda: SampleGrid(every_n_epochs=0), "every_n_epochs is 0"),
        (lambda: SampleGrid(rows=0), "at least one row"),
    ):
        assert_refused(words, build)
    assert_refused("true density", trainer(tmp_path, ToyMetrics(samples=50)).fit, gan(), Images())


def test_a_missing_extractor_may_be_done_without_but_a_wrong_one_never(tmp_path, monkeypatch):
    monkeypatch.setattr("lit_epgan.callbacks.generative_metrics.feature_extractor", feature_extractor)  # the real one
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    metrics = GenerativeMetrics(extractor="inception", required=False)
    with pytest.warns(UserWarning, match="place the file .* Until then this run has no inception metrics"):
        metrics.setup(Trainer(logger=False), LightningModule(), "fit")
    metrics.evaluate(Trainer(logger=False), LightningModule())  # nothing to log with, and nothing is logged
    with pytest.raises(UserError, match="place the file"):
        GenerativeMetrics(extractor="inception").setup(Trainer(logger=False), LightningModule(), "fit")
    weights = tmp_path / "checkpoints" / "weights-inception-2015-12-05-6726825d.pth"
    weights.parent.mkdir()
    weights.write_bytes(b"other weights")
    assert_refused("is not Inception's weights file", metrics.setup, Trainer(logger=False), LightningModule(), "fit")


@pytest.mark.parametrize("installed", [True, False])
def test_the_extractor_fits_the_data_by_default(installed, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: installed or None)
    named = {"digits": "digits", "fashion_mnist": "fashion", "emoji": "emoji"}
    for dataset in (*named, "cifar10", None):
        assert fitting_extractor(dataset) == named.get(dataset, "lite0" if installed else "pixels")
    metrics = GenerativeMetrics()
    run = Trainer(logger=False)
    run.datamodule = ImageDataModule("digits")
    metrics.setup(run, LightningModule(), "fit")
    assert metrics.name == "digits"


LAYERS = ["2048", "logits_unbiased"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A file of Inception's layout; the published one has to be fetched, and what is compared holds for any weights."""

    class Untrained(FeatureExtractorInceptionV3):
        def load_state_dict(self, *args, **kwargs):
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


def folder_of(images: Tensor, folder):
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


def command(weights, first, second) -> dict[str, float]:
    words = [sys.executable, "-m", "torch_fidelity.fidelity", "--cpu", "--json", "--isc", "--fid"]
    words += ["--input1", str(first), "--input2", str(second), "--feature-extractor-weights-path", str(weights)]
    words += ["--no-cache", "--save-cpu-ram", "--silent"]
    return json.loads(run_words(words))


@pytest.mark.slow
def test_is_and_fid_are_the_commands(weights, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    generated, real = drawn(1, 60.0, 20), drawn(2, 20.0, 6)
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
