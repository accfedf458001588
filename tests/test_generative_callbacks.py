"""What the callbacks log and draw, in plain fits and in a federation."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.metric_kid import kid_features_to_metric
from torch_fidelity.metric_prc import prc_features_to_metric

from callbacks.density_map import DensityMap
from callbacks.federation import FederationCallback
from callbacks.generative_metrics import GenerativeMetrics, real_images
from callbacks.pictures import tile
from callbacks.sample_grid import SampleGrid
from callbacks.sample_writer import SampleWriter
from callbacks.toy_metrics import ToyMetrics
from datamodules.toy import ToyDataModule
from lit_epgan.errors import UserError
from lit_epgan.federated import GeneratorSites
from lit_epgan.gan import GAN
from lit_epgan.metrics import feature_extractor
from lit_epgan.metrics.features import FeatureExtractor
from lit_epgan.metrics.generative import class_coverage, confident_counts, feature_statistics, frechet_distance
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.randomness import generator_for


class Pixels(FeatureExtractor):
    """Eight pixels are the features, and ten others the logits."""

    name = "digits"
    counts_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.seen: list[int] = []

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.append(len(images))
        return images.flatten(1)[:, :8] * self.scale, images.flatten(1)[:, 10:20] * 9


class Images(LightningDataModule):
    """Forty images for training; validation and test each on wish."""

    def __init__(self, validates: bool = True, tests: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(60, 1, 8, 8, generator=generator) * 2 - 1
        self.validates, self.tests = validates, tests

    def _loader(self, rows: slice, batch_size: int = 20) -> DataLoader:
        return DataLoader(TensorDataset(self.images[rows], torch.zeros(60)[rows]), batch_size=batch_size)

    def train_dataloader(self) -> DataLoader:
        return self._loader(slice(0, 40))

    def val_dataloader(self) -> Any:
        return self._loader(slice(40, 60)) if self.validates else []

    def test_dataloader(self) -> Any:
        return self._loader(slice(40, 60), 7) if self.tests else []

    predict_dataloader = test_dataloader


class Union(Callback):
    """Offers a further sample set, as a federation does."""

    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        return {"union": torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(n)) * 2 - 1}


class Log(Callback):
    """Keeps each round's metrics."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rounds.append({name: float(value) for name, value in trainer.callback_metrics.items()})


@pytest.fixture(autouse=True)
def pixels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pixels:
    extractor = Pixels()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("callbacks.generative_metrics.feature_extractor", lambda name: extractor)
    return extractor


def trainer(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    return Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **{"logger": False, "max_epochs": 2, **options},
    )


def gan() -> GAN:
    torch.manual_seed(0)
    return GAN(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,)))


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize("validates", [True, False])
def test_metrics_are_those_of_the_modules_samples(validates: bool, tmp_path: Path, pixels: Pixels) -> None:
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


def test_against_several_splits_and_for_every_generator(tmp_path: Path, pixels: Pixels) -> None:
    torch.manual_seed(0)
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


def test_what_is_seen_of_real_images_is_kept(tmp_path: Path, pixels: Pixels) -> None:
    for _ in range(2):
        run = trainer(tmp_path, GenerativeMetrics(samples=50), max_epochs=1)
        run.fit(gan(), Images())
    assert pixels.seen.count(6) == 1
    pixels.scale.data += 1  # another network
    trainer(tmp_path, GenerativeMetrics(samples=50), max_epochs=1).fit(gan(), Images())
    assert pixels.seen.count(6) == 2


def test_callbacks_disturb_no_stream(tmp_path: Path) -> None:
    """The same fit with and without them ends at the same bits."""
    ends = []
    for callbacks in ([], [GenerativeMetrics(samples=50), SampleGrid(2, 4), Union()]):
        module = gan()
        torch.manual_seed(1)
        trainer(tmp_path, *callbacks).fit(module, Images())
        ends.append([p.detach() for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_metrics_look_every_nth_round_and_at_the_last(tmp_path: Path, pixels: Pixels) -> None:
    log = Log()
    trainer(tmp_path, GenerativeMetrics(samples=111, every_n_epochs=3), log, max_epochs=5).fit(gan(), Images())
    assert pixels.seen.count(111) == 2
    assert ["fid_digits" in r for r in log.rounds] == [False, False, True, True, True]


def test_the_test_command_logs_them_too(tmp_path: Path) -> None:
    (found,) = trainer(tmp_path, GenerativeMetrics(samples=50)).test(gan(), Images(), verbose=False)
    assert found["fid_digits"] > 0


def test_missing_real_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there are none: set real to train or val"):
        trainer(tmp_path, GenerativeMetrics(samples=50)).fit(gan(), Images(tests=False))


def test_real_images_of_a_federation_are_all_clients(tmp_path: Path) -> None:
    datamodule = ToyDataModule(points=30, test_points=20)
    assert sum(len(batch) for batch in real_images(datamodule, "train")) == 4 * 30
    assert sum(len(batch) for batch in real_images(datamodule, "test")) == 4 * 20


def test_nonsense_is_refused(tmp_path: Path) -> None:
    for build, words in (
        (lambda: GenerativeMetrics(samples=1), "at least 2"),
        (lambda: SampleGrid(every_n_epochs=0), "every_n_epochs is 0"),
        (lambda: SampleGrid(rows=0), "at least one row"),
    ):
        with pytest.raises(UserError, match=words):
            build()
    with pytest.raises(UserError, match="true density"):
        trainer(tmp_path, ToyMetrics(samples=50)).fit(gan(), Images())


# ---------------------------------------------------------------- pictures


def test_tile_enlarges_and_orders_images() -> None:
    """Three 8 x 8 images in two columns: tiles of 48 pixels, two grey pixels between, -1 black, 0 grey, 1 white."""
    images = torch.tensor([-1.0, 0.0, 1.0]).view(3, 1, 1, 1).expand(3, 1, 8, 8)
    sheet = tile(images, columns=2)
    assert sheet.shape == (2 * 50 + 2, 2 * 50 + 2, 3)
    assert sheet[2:50, 2:50].max() == 0
    assert (sheet[2:50, 52:100] == 128).all()
    assert sheet[52:100, 2:50].min() == 255
    assert (sheet[:2] == 128).all()
    colours = torch.rand(4, 3, 32, 32) * 2 - 1
    assert tile(colours, 4).shape == (68, 4 * 66 + 2, 3)  # 32 pixels are enlarged to 64
    assert not np.array_equal(tile(colours, 4)[..., 0], tile(colours, 4)[..., 1])


def test_grids_are_written_per_round_with_a_newest_copy(tmp_path: Path) -> None:
    module = gan()
    trainer(tmp_path, SampleGrid(2, 3), Union()).fit(module, Images())
    pictures = tmp_path / "pictures"
    assert sorted(p.name for p in pictures.iterdir()) == [
        "samples-round-0000.png",
        "samples-round-0001.png",
        "samples.png",
        "union-round-0000.png",
        "union-round-0001.png",
        "union.png",
    ]
    newest = np.asarray(Image.open(pictures / "samples.png"))
    assert np.array_equal(newest, tile(module.sample(6, generator_for("sample grid")), 3))
    assert np.array_equal(newest, np.asarray(Image.open(pictures / "samples-round-0001.png")))
    assert not np.array_equal(newest, np.asarray(Image.open(pictures / "samples-round-0000.png")))


def test_a_grid_by_class_has_a_row_for_each_and_leaves_cells_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extractor reads class 1 where an image's first pixel is positive, else class 0; nothing is class 2."""

    class Sign:
        def extract(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            first = images[:, 0, 0, 0]
            return images.flatten(1), torch.stack([-first, first, torch.full_like(first, -9.0)], 1)

    monkeypatch.setattr("callbacks.sample_grid.feature_extractor", lambda name: Sign())
    module = gan()
    trainer(tmp_path, SampleGrid(3, 4, by_class="digits")).fit(module, Images())
    drawn = module.sample(3 * 4 * 10, generator_for("sample grid"))
    first = drawn[:, 0, 0, 0]
    expected = torch.stack([drawn[first <= 0][:4], drawn[first > 0][:4], torch.full((4, *drawn.shape[1:]), torch.nan)])
    newest = np.asarray(Image.open(tmp_path / "pictures" / "samples.png"))
    assert np.array_equal(newest, tile(expected.flatten(0, 1), 4))
    assert (newest[-40:] == 128).all()


def test_several_generators_have_a_row_each(tmp_path: Path) -> None:
    class Two(GAN):
        def sample_each(self, n: int, generator: torch.Generator) -> Tensor:
            return torch.stack([torch.full((n, 1, 8, 8), value) for value in (-1.0, 1.0)])

    module = Two(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,)))
    trainer(tmp_path, SampleGrid(8, 3), max_epochs=1).fit(module, Images())
    sheet = np.asarray(Image.open(tmp_path / "pictures" / "samples.png"))
    assert sheet.shape[0] == 2 * 50 + 2
    assert sheet[2:50, 2:50].max() == 0
    assert sheet[52:100, 2:50].min() == 255


def test_loggers_get_the_pictures(tmp_path: Path) -> None:
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


def test_grids_are_for_images(tmp_path: Path) -> None:
    module = GAN(MLPGenerator((2,), 2, (8,), tanh=False), MLPDiscriminator((2,), (8,)))
    with pytest.raises(UserError, match="use DensityMap"):
        trainer(tmp_path, SampleGrid(), FederationCallback()).fit(module, ToyDataModule(points=64, local_steps=2))


# ---------------------------------------------------------------- toy, in a federation


def test_toy_federation_logs_and_draws_the_union_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator = MLPGenerator((2,), 2, (32, 32), tanh=False)
    module = GAN(generator, MLPDiscriminator((2,), (32, 32)), lr=2e-3, objective="lsgan")
    datamodule = ToyDataModule(batch_size=64, local_steps=2, warmup_steps=300)
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


# ---------------------------------------------------------------- predict


def test_predict_writes_images_and_an_array(tmp_path: Path) -> None:
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


def test_a_missing_extractor_may_be_done_without_but_a_wrong_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("callbacks.generative_metrics.feature_extractor", feature_extractor)  # the real one
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
    with pytest.raises(UserError, match="is not Inception's weights file"):
        metrics.setup(Trainer(logger=False), LightningModule(), "fit")
