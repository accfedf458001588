"""Configurations that start from another one, or go on top of one."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonargparse import Namespace, get_loader
from wandb.errors import AuthenticationError

from lit_epgan.cli.error_messages import explain
from lit_epgan.cli.main import PAGE, main, short_help
from lit_epgan.cli.parser import quoted
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import CLI, cli_command, runs_of
from lit_epgan.runs.config_files import config_folders, find_config, resolve_configs, with_bases
from lit_epgan.runs.run_folder import default_folder
from lit_epgan.runs.yaml_files import load_yaml
from tests.parsed import Parsed
from tests.refusals import assert_refused
from tests.test_cli import refusal


@pytest.fixture
def bases(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "top.yaml").write_text("base: middle.yaml\nmodel: {init_args: {lr: 3e-3}}\n")
    (tmp_path / "middle.yaml").write_text("base: toy.yaml\nmodel: {init_args: {lr: 2e-4, r1: 0.25}}\n")
    return tmp_path


def printed(capsys: pytest.CaptureFixture[str], *words: str):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words, "--print_config"])
    return yaml.safe_load(capsys.readouterr().out)


def test_bases_come_first_and_may_be_several(bases):
    assert [path.name for path in with_bases(Path("top.yaml"))] == ["toy.yaml", "middle.yaml", "top.yaml"]
    words = resolve_configs(["fit", "--config", "top.yaml", "--model.lr", "1", "-c=middle.yaml"])
    assert [Path(word).name for word in words] == [
        "fit", "--config", "toy.yaml", "--config", "middle.yaml", "--config", "top.yaml", "--model.lr", "1",
        "-c", "toy.yaml", "-c", "middle.yaml",
    ]  # fmt: skip
    (bases / "both.yaml").write_text("base: [middle.yaml, algorithms/scaffold.yaml]\n")
    names = [path.name for path in with_bases(Path("both.yaml"))]
    assert names == ["toy.yaml", "middle.yaml", "scaffold.yaml", "both.yaml"]


def test_the_later_file_wins_and_another_algorithm_takes_no_arguments(bases, capsys):
    config = printed(capsys, "--config", "top.yaml")
    model = config["model"]["init_args"]
    assert (model["lr"], model["r1"], model["objective"]) == (3e-3, 0.25, "lsgan")
    assert config["data"]["init_args"]["warmup_steps"] == 800
    assert printed(capsys, "--config", "top.yaml", "--model.lr", "5")["model"]["init_args"]["lr"] == 5
    config = printed(capsys, "--config", "cifar_f2a.yaml", "--config", "algorithms/fedprox.yaml")
    federation = config["federation"]["init_args"]
    assert federation["algorithm"] == {"class_path": "lit_epgan.federated.FedProx", "init_args": {"mu": 0.01}}
    assert (federation["optimizer_state"], federation["buffers"]) == ("keep", "merge")  # the experiment's


@pytest.mark.parametrize("order", [("scaffold", "median", "norm_clipping"), ("norm_clipping", "median", "scaffold")])
def test_what_is_done_to_reports_goes_with_any_algorithm(order, capsys):
    on_top = [word for name in order for word in ("--config", f"algorithms/{name}.yaml")]
    federation = printed(capsys, "--config", "digits.yaml", *on_top)["federation"]["init_args"]
    names = [federation[key]["class_path"].split(".")[-1] for key in ("algorithm", "aggregator", "mechanism")]
    assert names == ["SCAFFOLD", "Median", "NormClipping"]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        (["configs/toy.yaml", "configs/toy_probgan.yaml"], "toy_probgan"),
        (["configs/digits.yaml", "configs/algorithms/scaffold.yaml"], "digits_scaffold"),
        (["a/digits.yaml", "b/algorithms/scaffold.yaml", "b/algorithms/median.yaml"], "digits_scaffold_median"),
        (["cifar100.yaml", "algorithms/fednp.yaml", "tiny_imagenet.yaml"], "tiny_imagenet"),
        (["a.yaml", "algorithms/fednp.yaml", "tiny_imagenet.yaml", "algorithms/moon.yaml"], "tiny_imagenet_moon"),
        ([], "run"),
    ],
)
def test_the_run_has_the_name_of_what_was_asked_for(files, name):
    assert default_folder(files) == Path("runs") / name


def test_a_circle_and_a_missing_base_are_one_sentence(folder):
    Path("a.yaml").write_text("base: b.yaml\n")
    Path("b.yaml").write_text("base: a.yaml\n")
    Path("c.yaml").write_text("base: nowhere.yaml\n")
    assert_refused(r"starts from itself", with_bases, Path("a.yaml"))
    assert_refused(r"no config 'nowhere.yaml'", with_bases, Path("c.yaml"))


LOGGER = "base: toy.yaml\ntrainer:\n  logger:\n  - class_path: lit_epgan.runs.WandbHistory\n    "


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"trainer: {max_epochs: 1}\ntrainer: {}\n", "mine.yaml, line 2: the key 'trainer' is there already, in line"),
        (b"base: toy.yaml\nmodel: {a: 1, lr: 1, a: 2}\n", "mine.yaml, line 2: the key 'a' is there already"),
        (b"", "mine.yaml is empty"),
        (b"# nothing\n", "mine.yaml is empty"),
        (b"- toy.yaml\n", "mine.yaml has no keys"),
        (b"trainer:\n\tmax_epochs: 1\n", "mine.yaml, line 2: a tab stands where YAML takes blanks."),
        (b"# one\n# caf\xe9\n", "mine.yaml, line 2: it is not UTF-8"),
        (b"trainer: {max_epochs: 1\n", "mine.yaml, line 2: it is no YAML"),
        (b"base: toy.yaml\ntrainer: {max_epochs: soon}\n", "mine.yaml: trainer.max_epochs is 'soon'"),
        (b"base: toy.yaml\ndata: {batch_size: 0}\n", "mine.yaml: data.batch_size is 0"),
        (LOGGER.encode() + b"init_args: {mode: ofline}\n", "mine.yaml: trainer.logger.mode is 'ofline', but one of"),
        (LOGGER.encode() + b"init_args: {projekt: x}\n", "mine.yaml: There is no key trainer.logger.projekt"),
        (LOGGER.encode() + b"dict_kwargs: {grup: x}\n", "mine.yaml: trainer.logger.grup: Weights & Biases has no such"),
    ],
)
def test_a_mistake_in_a_file_has_the_files_name(folder, capsys, content, sentence):
    (folder / "mine.yaml").write_bytes(content)
    assert refusal(capsys, "fit", "--config", "mine.yaml").startswith(sentence)
    (folder / "on_top.yaml").write_text("base: mine.yaml\n")
    assert refusal(capsys, "fit", "--config", "on_top.yaml").startswith(sentence)


@pytest.mark.usefixtures("folder")
def test_what_the_command_line_or_the_environment_says_is_not_the_files_mistake(folder, capsys, monkeypatch):
    (folder / "mine.yaml").write_text("base: toy.yaml\ntrainer: {max_epochs: 1}\n")
    told = refusal(capsys, "fit", "--config", "mine.yaml", "--trainer.max_epochs", "soon")
    assert told.startswith("trainer.max_epochs is 'soon'")
    monkeypatch.setenv("WANDB_MODE", "foo")
    told = refusal(capsys, "fit", "--config", "digits.yaml")
    assert told.startswith("WANDB_MODE is 'foo' in the environment; it must be one of online, offline")
    sentence = explain(AuthenticationError("WANDB_API_KEY invalid: API key must have 40+ characters, has 3."))
    assert sentence.startswith("Weights & Biases cannot be used: WANDB_API_KEY invalid: API key must have")


@pytest.mark.usefixtures("folder")
def test_an_alias_within_a_mapping_is_no_second_key(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: [*a, *a, {x: 1}]\n")
    assert load_yaml(tmp_path / "a.yaml") == {"a": {"x": 1}, "b": [{"x": 1}] * 3}
    (tmp_path / "b.yaml").write_text("a: [{x: 1}, {x: 1, 'x': 2}]\n")
    assert_refused(r"b\.yaml, line 1: the key 'x'", load_yaml, tmp_path / "b.yaml")


@pytest.fixture(scope="module")
def cli():
    return Parsed()


def settings_of(cli: Parsed, config: str):
    """(key as a person writes it) -> its value; of a class its name."""
    found = cli.fit(["--config", config])

    def value(key: str):
        node = found
        for part in key.split("."):
            node = node.init_args[part] if "class_path" in node else node[part]
        return node.class_path.split(".")[-1] if isinstance(node, Namespace) else node

    return value


SPEECH = {"data.batch_size": 128, "data.local_epochs": 1, "data.local_steps": None, "trainer.max_epochs": 12}
SPEECH |= {"model.network.dropout": 0.1, "federation.algorithm": "FedAvg"}
SPEECH_GAN = {"model": "SpeechGAN", "model.gan_weight": 0.1, "model.lr": 3e-4, "model.prior": "HistoryPrior"}
SPEECH_GAN |= SPEECH | {"model.sample_acoustic": False}
TILTED, PRIOR_ON = "TiltedExpectationPropagation", {"federation.algorithm": "PriorOn"}
PRIOR_ON |= {"federation.algorithm.networks": ["generator", "discriminator"], "federation.algorithm.inner": TILTED}
PRIOR_ON |= {
    f"federation.algorithm.inner.{k}": v for k, v in (("weight", 1e-3), ("features", "discriminator.bottleneck"))
}
EP = {"federation.algorithm": TILTED, "federation.algorithm.weight": 1e-3}
IMAGES = {"model.generator.members": 10, "model.discriminator.heads": 4, "model.lr": 3e-4, "data.batch_size": 128}
IMAGES |= {"data.partition": "one_class", "data.clients": 10, "data.local_steps": 400, "trainer.max_epochs": 25}
IMAGES |= {"model.noise": pytest.approx((2 * 3e-2 * 3e-4) ** 0.5, rel=1e-3)}
ON_SERVER = {"federation.algorithm.server_steps": 6, "federation.algorithm.batch_size": 128}
ON_SERVER |= {"data.local_steps": 6, "trainer.max_epochs": 1667}
OF_THE_PAPERS = {
    "speech": SPEECH,
    "speech_probgan": SPEECH_GAN,
    "speech_ep_probgan": SPEECH_GAN | PRIOR_ON,
    "speech_ep_sru_ep_probgan": SPEECH_GAN
    | EP
    | {"model.sample_acoustic": True, "federation.algorithm.features": "discriminator.bottleneck"},
    "cifar": IMAGES | EP | {"federation.algorithm.components": 1},
    "cifar_probgan": IMAGES,
    "cifar_mixture_ep_probgan": IMAGES | EP | {"federation.algorithm.components": 10},
    "cifar_fedavg_gan": ON_SERVER,
    "cifar_f2a": ON_SERVER,
}


@pytest.mark.parametrize("config", OF_THE_PAPERS)
def test_configurations_have_the_settings_of_the_papers(cli, config):
    value = settings_of(cli, f"{config}.yaml")
    assert {key: value(key) for key in OF_THE_PAPERS[config]} == OF_THE_PAPERS[config]
    if config.startswith("speech"):
        loggers, callbacks = value("trainer.logger"), value("trainer.callbacks")
        assert {each.class_path.split(".")[-1] for each in loggers} == {"MetricsFile", "WandbHistory"}
        rates = [each for each in callbacks if each.class_path.endswith("WordErrorRate")]
        assert [each.init_args.every_n_epochs for each in rates] == [1]


def test_table_1_has_every_method_objective_and_setting():
    studies = {study.variant: study for study in read_studies(find_config("studies/cifar_table1.yaml", studies=True))}
    settings = ("centralised", "iid_2", "iid_10", "one_class", "dirichlet_01", "dirichlet_05")
    assert set(studies) == {f"{setting}_{objective}" for setting in settings for objective in ("w", "ls")}
    table = {"vanilla", "bayesgan", "probgan", "fedavg_gan", "f2a", "ep_bgan", "ep_probgan", "mixture_ep_probgan"}
    ours = {"ep_laplace", "generator_sites", "generator_sites_ep", "embedding_sites", "embedding_sites_ep"}
    for variant, study in studies.items():
        central = variant.startswith("centralised")
        assert set(study.methods) == ({"vanilla", "bayesgan", "probgan", "ep_probgan"} if central else table | ours)
        assert len(study.seeds) == 5


def test_no_run_of_table_1_starts_without_the_extractor_that_judges_it(capsys):
    studies = read_studies(find_config("studies/cifar_table1.yaml", studies=True))
    (study,) = [study for study in studies if study.variant == "one_class_ls"]
    (run,) = [run for run in runs_of(study, Path("runs")) if run.seed == 0 and run.method.name == "f2a"]
    words = cli_command(run)[len(CLI) :]
    settings = printed(capsys, *words[1:])
    (metrics,) = [each for each in settings["trainer"]["callbacks"] if each["class_path"].endswith("GenerativeMetrics")]
    assert metrics["init_args"]["required"]
    assert metrics["init_args"]["samples"] == 50_000
    everyones = {
        variant.variant: {m.settings["trainer.callbacks"][3]["init_args"]["required"] for m in variant.methods.values()}
        for variant in studies
    }
    assert all(required == {True} for required in everyones.values()), everyones


ROOT = Path(__file__).parent.parent
CONFIGS = [ROOT / "README.md", *config_folders()[-1].rglob("*.yaml"), *(ROOT / "docs").rglob("*.md")]
CLASS = re.compile(r"\b(lit_epgan(?:\.\w+)*)\.([A-Z]\w*)")
NOT_BY_ROOM = re.compile(r"(?:class_path: |(?<![\w./]))(?:callbacks|datamodules)\.(?:\w+\.)*[A-Z]\w*")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_class_is_named_by_its_room(path):
    text = path.read_text(encoding="utf-8")
    assert not NOT_BY_ROOM.findall(text)
    for module, name in set(CLASS.findall(text)):
        assert module.count(".") == 1, f"{module}.{name}"
        room = importlib.import_module(module)
        assert name in room.__all__, f"{module} does not offer {name}"


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_help_is_a_screen_of_common_keys(command, capsys):
    assert main([command, "--help"]) == 0
    page = capsys.readouterr().out
    assert len(page.splitlines()) < 60
    assert all(len(line) <= 130 for line in page.splitlines())
    assert "--help all" in page
    assert f"lit_epgan {command} --config" in page


def test_help_all_lists_every_key_and_the_short_page_no_other(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--help", "all"])
    assert ended.value.code == 0
    everything = capsys.readouterr().out
    assert len(everything.splitlines()) > 300
    ours = set(re.findall(r"--(trainer\.\w+|ckpt_path|accept_changes|seed_everything|config)\b", PAGE))
    assert ours
    assert all(f"--{key}" in everything for key in ours)


def test_help_is_for_its_own_words_and_the_version_is_said(capsys):
    assert short_help(["fit", "--config", "a.yaml"]) is None
    assert short_help(["fit", "--help", "all"]) is None
    assert short_help(["study", "--help"]) is None
    assert main(["--version"]) == 0
    assert re.fullmatch(r"lit_epgan \d+\.\d+\.\d+\n", capsys.readouterr().out)
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--model.help", "GAN"])
    assert ended.value.code == 0
    assert "--model.generator" in capsys.readouterr().out


DIGIT_LIKE = st.text(alphabet="0123456789abcdefox_.:+-eEnNiI", min_size=1, max_size=10)

NUMBER_LIKE = (
    *("yes", "no", "on", "off", "true", "False", "null", "~", "nan", ".nan", "inf", "-.inf", "1e5", ".5e3", "1_000"),
    *("0o7", "0x1f", "0b1", "12:30", "12:30:45.5", "2026-11-25", "7876e627", "+1", "-", "=", "<<", "1.", ".", "0"),
)

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STRINGS = st.one_of(DIGIT_LIKE, st.sampled_from(NUMBER_LIKE), ANY_TEXT)


@settings(max_examples=50, deadline=None)
@given(st.recursive(STRINGS, lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner), max_leaves=8))
def test_whatever_is_dumped_is_loaded_by_the_parser_s_own_reader(data):
    assert get_loader("yaml")(quoted({"key": data})) == {"key": data}


@settings(max_examples=4)
@given(st.lists(STRINGS, min_size=2, max_size=50))
@example([*NUMBER_LIKE])
def test_a_configuration_is_parsed_as_it_was(cli, strings):
    """Of keys that are texts: where one may be none, the parser takes some texts for that, however they are quoted."""
    parser = cli.parser_of_fit
    config = cli.config.fit.clone()
    config.data.init_args.data_dir, config.trainer.logger[0].init_args.file = strings[:2]
    config.federation.init_args.local = strings
    again = parser.parse_string(parser.dump(config, skip_validation=True))
    assert values(again) == values(config)


def values(config: Namespace):
    return [config.data.init_args.data_dir, config.trainer.logger[0].init_args.file, config.federation.init_args.local]


def test_classes_are_seen_and_runs_named_like_numbers_quoted(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "toy.yaml", "--data.data_dir", "7876e627", "--print_config"])
    printed = capsys.readouterr().out
    assert 'data_dir: "7876e627"' in printed
    assert yaml.safe_load(printed)["data"]["init_args"]["data_dir"] == "7876e627"
    found = {match for path in CONFIGS for match in CLASS.findall(path.read_text(encoding="utf-8"))}
    assert {("lit_epgan.callbacks", "FederationCallback"), ("lit_epgan.federated", "FedAvg")} <= found


@pytest.mark.parametrize("null", ["null", "None"])
def test_null_reaches_a_class_within_a_class(capsys, null):
    words = ["--config", "polynomial.yaml", "--config", "algorithms/central_noise.yaml"]
    words += ["--federation.mechanism.noise_multiplier", null, "--federation.mechanism.target_epsilon", "2"]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words, "--print_config"])
    mechanism = yaml.safe_load(capsys.readouterr().out)["federation"]["init_args"]["mechanism"]["init_args"]
    assert mechanism["noise_multiplier"] is None
    assert mechanism["target_epsilon"] == 2
