"""Every YAML in configs/ runs two rounds with two clients through the real command line, on a miniature of its data.

An experiment runs by itself, an algorithm on top of the first experiment that its comment says it suits. Where there is
a GPU: pytest tests/test_configs.py --accelerator gpu
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from lit_epgan.callbacks.generative_metrics import GenerativeMetrics
from lit_epgan.cli.main import main
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import Run, cli_command
from lit_epgan.datamodules.image_files import read_split
from lit_epgan.datamodules.images import SHAPES
from lit_epgan.metrics import feature_extractor
from lit_epgan.metrics.feature_extractors import FeatureExtractor
from lit_epgan.metrics.image_classifiers import TypefacesClassifier
from lit_epgan.runs.config_files import config_folders, with_bases
from tests.cifar_tree import write_cifar
from tests.emoji_tree import write_emoji
from tests.fonts_tree import write_fonts
from tests.parsed import Parsed
from tests.photographs import write_images
from tests.sealed import seal
from tests.speech import words_of_miniature
from tests.tiny_imagenet_tree import write_tiny_imagenet
from tests.users_tree import write_emnist, write_leaf

pytestmark = pytest.mark.slow
FOLDER = config_folders()[-1]  # the package's own
INSPECTIONS = sorted(FOLDER.glob("inspect_*.yaml"))  # these do not train: test_inspect_command.py runs them
CONFIGS = sorted(set(FOLDER.glob("*.yaml")) - set(INSPECTIONS))
ALGORITHMS = sorted((FOLDER / "algorithms").glob("*.yaml"))
STUDIES = sorted((FOLDER / "studies").glob("*.yaml"))
SMALL = ["--data.clients", "2", "--data.batch_size", "4", "--data.warmup_steps", "2", "--data.local_steps", "2"]
SMALL_SPEECH = ["--data.batch_size", "8", "--data.local_steps", "2"]
FEW_FEATURES = ["--federation.algorithm.frequencies", "64", "--federation.algorithm.herding_steps", "5"]
ON_SERVER = ["--federation.algorithm.server_steps", "3"]
NARROW_DCGAN = [
    *("--model.generator.width", "4", "--model.generator.members", "2"),
    *("--model.discriminator.width", "4", "--model.discriminator.heads", "2"),
]
NARROW_CONDITIONAL = ["--model.generator.width", "4", "--model.discriminator.width", "4"]
NARROW_RESNET = ["--model.backbone.width", "2", "--model.head.in_features", "16"]
NARROW_SPEECH = [*("--model.network.hidden", "16"), *("--model.network.layers", "1")]
NARROW_SPEECH_GAN = [
    *NARROW_SPEECH,
    *("--model.generator.hidden", "[8]", "--model.generator.members", "2"),
    *("--model.discriminator.hidden", "8", "--model.discriminator.layers", "1"),
]


def is_speech_gan(config):
    return any("lit_epgan.modules.SpeechGAN" in path.read_text() for path in with_bases(config))


NARROW = {
    **{path.name: NARROW_SPEECH for path in CONFIGS if path.name.startswith("speech")},
    **{path.name: NARROW_SPEECH_GAN for path in CONFIGS if is_speech_gan(path)},
    **{path.name: NARROW_DCGAN for path in CONFIGS if path.name.startswith("cifar")},
    **{path.name: NARROW_RESNET for path in CONFIGS if path.name.startswith(("cifar100", "fashion_", "tiny_imagenet"))},
    "fashion.yaml": NARROW_DCGAN,
    "fashion_conditional.yaml": NARROW_CONDITIONAL,
    "typefaces.yaml": [
        "--model.generator.hidden",
        "[8]",
        "--model.discriminator.hidden",
        "[8]",
        "--data.clients_per_round",
        "2",
    ],
    **dict.fromkeys(("emoji.yaml", "emoji_generator_sites.yaml"), NARROW_CONDITIONAL),
    "digits_fedcvae.yaml": ON_SERVER,
    "emoji_fedcvae.yaml": [
        *(*ON_SERVER, "--federation.algorithm.pool", "40"),
        *("--model.generator.width", "4", "--model.encoder.width", "4"),
    ],
    "docstrings_words.yaml": ["--model.network.symbols", "11"],
    "folder.yaml": NARROW_DCGAN,
    "graffl_breast_cancer.yaml": ["--federation.algorithm.from_round", "1", "--model.particles", "80"],
    "graffl_toy.yaml": ["--data.points", "50", "--model.particles", "110"],
    "writers_classifier.yaml": ["--data.clients_per_round", "2"],
    "writers_fedavg_gan.yaml": ["--data.clients_per_round", "2"],
    "writers_release.yaml": FEW_FEATURES + ON_SERVER,
    "femnist_classifier.yaml": ["--data.clients_per_round", "2", "--data.held_out", "0.5"],
    "femnist_fedavg_gan.yaml": [
        *("--data.clients_per_round", "2", "--data.held_out", "0.5"),
        *("--model.generator.hidden", "8", "--model.generator.widths", "[4, 4, 2]"),
        *("--model.discriminator.hidden", "8", "--model.discriminator.widths", "[2, 4]"),
    ],
}
CHEAPER = {
    "correlated_noise.yaml": ["--federation.sampler.groups", "2"],
    "embedding_sites.yaml": FEW_FEATURES,
    "private_release.yaml": FEW_FEATURES + ON_SERVER,
    "user_release.yaml": FEW_FEATURES + ON_SERVER,
    "distilled_sites.yaml": ON_SERVER,
    "dp_mepf.yaml": [*ON_SERVER, "--federation.algorithm.herding_steps", "2", "--federation.algorithm.points", "10"],
}


def suits(algorithm: Path) -> list[str]:
    (line,) = [line for line in algorithm.read_text().splitlines() if line.startswith("# Suits: ")]
    return line.removeprefix("# Suits: ").split(", ")


class StandIn(FeatureExtractor):
    """Takes the place of networks whose weights a test must not fetch; one colour's mean and others' are features."""

    name = "stand_in"

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(12))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = torch.nn.functional.adaptive_avg_pool2d(images, 2).flatten(1) @ self.weight[: images.shape[1] * 4]
        return features, features

    def metric(self, name: str) -> str:
        return name


def by_class(name, data_dir):
    """The digits' own classifier; those of clothes, emoji and typefaces would train on all of them."""
    return StandIn() if name in ("fashion", "emoji", "typefaces") else feature_extractor(name)


def miniature(name: str, data_dir: str, train: bool, download: bool) -> tuple[Tensor, Tensor]:
    labels = torch.arange(10).repeat(8 if train else 4)
    generator = torch.Generator().manual_seed(int(train))
    return torch.randint(0, 256, (len(labels), *SHAPES[name]), generator=generator).byte(), labels


def few_samples(metrics, trainer, module):
    """Generating thousands of images with a DCGAN would take most of the test's time."""
    metrics.samples = min(metrics.samples, 100)
    evaluate(metrics, trainer, module)


evaluate = GenerativeMetrics.evaluate


@pytest.fixture(autouse=True)
def no_network(tmp_path, classifier_cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setattr("lit_epgan.datamodules.images.read_split", miniature)
    monkeypatch.setattr("lit_epgan.callbacks.generative_metrics.feature_extractor", lambda name, data_dir="": StandIn())
    monkeypatch.setattr("lit_epgan.callbacks.sample_grid.feature_extractor", by_class)
    monkeypatch.setattr(GenerativeMetrics, "evaluate", few_samples)
    monkeypatch.setattr(TypefacesClassifier, "epochs", 1)
    monkeypatch.setattr("lit_epgan.callbacks.toy_metrics.draw", lambda *_: np.zeros((8, 8, 3), np.uint8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(classifier_cache))
    seal(monkeypatch)  # a client's work that reads the server raises, in every configuration


def test_every_experiment_that_an_algorithm_suits_is_there():
    assert {name for algorithm in ALGORITHMS for name in suits(algorithm)} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_two_rounds_with_two_clients(config, tmp_path, request):
    assert two_rounds(config.name, [], tmp_path / "runs" / config.stem, request) == 2


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda path: path.name)
def test_two_rounds_with_an_algorithm_on_top(algorithm, tmp_path, request):
    config = suits(algorithm)[0]
    words = ["--config", f"algorithms/{algorithm.name}", *CHEAPER.get(algorithm.name, [])]
    assert two_rounds(config, words, tmp_path / "runs" / f"{Path(config).stem}_{algorithm.stem}", request) == 2


def write_library(folder):
    folder.mkdir()
    for k in range(4):
        (folder / f"user{k}.py").write_text(f'"""Return the {k}th number of a list."""\n')
    return folder


def two_rounds(config, on_top, run, request):
    small = SMALL
    if config.startswith("speech"):
        small = SMALL_SPEECH + words_of_miniature(request.getfixturevalue("speech_cache"))
    if config.startswith("docstrings"):
        small = [*SMALL, "--data.library", str(write_library(Path("library"))), "--data.held_out_users", "2"]
        small += ["--data.clients_per_round", "2", "--data.vocabulary", "8"]
    if config == "graffl_breast_cancer.yaml":
        small = ["--data.sites", "2", "--data.ratio", "5", *SMALL[2:]]
    if config == "folder.yaml":
        small = ["--data.path", str(write_images(Path("own"))), *SMALL[2:]]
    if config.startswith("emoji"):
        write_emoji(Path("data"))
    if config == "typefaces.yaml":
        write_fonts(Path("data/typefaces/node_modules/@fontsource"))
    if config == "tiny_imagenet.yaml":
        write_tiny_imagenet(Path("data"))
    if config == "femnist_classifier.yaml":
        write_leaf(Path("data/femnist"))
    if config == "femnist_fedavg_gan.yaml":
        write_emnist(Path("data/fed_emnist"))
    if config.startswith("table"):
        rows = [f"{name},{k % 7},{k % 3 - 1},{k % 2}" for name in "abc" for k in range(12)]
        Path("table.csv").write_text("\n".join(["user,age,dose,label", *rows]))
        small = ["--data.client", "user", *SMALL[2:]]
    if "algorithms/krum.yaml" in on_top:
        small = ["--data.clients", "5", *SMALL[2:]]  # the fewest of whom one may be wrong
    words = ["fit", "--config", config, *on_top, *small, *NARROW.get(config, [])]
    words += ["--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "2"]  # looked at once, in the end
    assert main([*words, "--trainer.accelerator", request.config.getoption("accelerator")]) == 0
    table = pd.read_csv(run / "metrics.csv")
    evaluated = [name for name in table if name.startswith(("fid", "coverage", "mse", "accuracy", "wer", "error"))]
    assert evaluated
    assert table[evaluated[0]].notna().any()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert config.startswith(("docstrings", "table_regression")) or list((run / "pictures").glob("*.png"))
    return 1 + table["epoch"].max()


@pytest.mark.parametrize("config", [*CONFIGS, *ALGORITHMS, *STUDIES, *INSPECTIONS], ids=lambda path: path.name)
def test_the_first_lines_say_what_it_needs_and_how_long_it_takes(config):
    lines = config.read_text().splitlines()
    comment = " ".join(line for line in lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))])
    assert "Needs" in comment
    assert "Takes" in comment


@pytest.fixture(scope="module")
def parsed():
    return Parsed()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name)
def test_the_settings_of_every_method_of_every_study_are_accepted(path, tmp_path, parsed):
    methods = [method for one in read_studies(path) for method in one.trained]
    known: set[tuple[object, ...]] = set()
    for method in sorted(methods, key=lambda method: -len(method.settings)):
        # variants ask for the same keys of the same classes again and again, with other values
        asked = {(tuple(method.configs), *each) for each in [(), *keys(method.settings)]}
        if not asked <= known:
            known |= asked
            config = parsed.fit(cli_command(Run(method, 0, tmp_path))[4:])
            assert config.model.class_path.startswith("lit_epgan.modules.")


def keys(settings):
    """Each key with what its value is, and the classes that it is a key of."""
    for key, value in settings.items():
        yield key, kind(value), *(kind(above) for name, above in settings.items() if key.startswith(f"{name}."))


def kind(value):
    """A class, the type of another value; those of a dict's or list's own."""
    if isinstance(value, dict):
        return str({key: kind(each) for key, each in value.items()})
    if isinstance(value, list):
        return str([kind(each) for each in value])
    return value if isinstance(value, str) and "." in value else type(value).__name__


@pytest.mark.parametrize("paper", [False, True], ids=["as it stands", "the paper's networks"])
def test_cifar_trains_from_its_files(paper, tmp_path, monkeypatch, capsys):
    """The user's own command with the data in place and no Inception weights, networks narrower and a step for each."""
    monkeypatch.setattr("lit_epgan.datamodules.images.read_split", read_split)
    monkeypatch.setattr("lit_epgan.callbacks.generative_metrics.feature_extractor", feature_extractor)
    write_cifar(tmp_path / "data", monkeypatch)
    networks = ["--model.generator.width", "8", "--model.discriminator.width", "8"]
    networks += ["--model.generator.upsamplings", "4", "--model.discriminator.norm_first", "true"] if paper else []
    short = [*SMALL[:2], "--trainer.max_epochs", "1", "--data.local_steps", "1", "--trainer.accelerator", "cpu"]
    with pytest.warns(UserWarning, match="inception"):
        assert main(["fit", "--config", "cifar.yaml", *short, *networks]) == 0
    run = tmp_path / "runs" / "cifar"
    assert pd.read_csv(run / "metrics.csv")["client/steps"].tolist() == [1.0]
    assert list((run / "pictures").glob("*.png"))


def test_the_data_of_cifar_missing_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr("lit_epgan.datamodules.images.read_split", read_split)
    assert main(["fit", "--config", "cifar.yaml", "--trainer.accelerator", "cpu"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(error) == 1
    assert "cifar-10" in error[0]
    assert "download" in error[0]
