"""What the EP-GAN paper says of its experiments (appendices F.3 and F.4) is what the configurations say."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_epgan.cli.main import main
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import CLI, cli_command, runs_of
from lit_epgan.runs.config_files import find_config

SPEECH = ("speech.yaml", "speech_probgan.yaml", "speech_ep_probgan.yaml", "speech_ep_sru_ep_probgan.yaml")


def resolved(config: str | list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    words = ["fit", "--config", config, "--print_config"] if isinstance(config, str) else config
    with pytest.raises(SystemExit):
        main(words)
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return settings


@pytest.mark.parametrize("config", SPEECH)
def test_what_all_recognisers_share(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolved(config, capsys)
    data, trainer = settings["data"]["init_args"], settings["trainer"]
    assert (data["batch_size"], data["local_epochs"], data["local_steps"]) == (128, 1, None)
    assert trainer["max_epochs"] == 12
    assert settings["model"]["init_args"]["network"]["init_args"]["dropout"] == 0.1
    loggers = {each["class_path"].split(".")[-1] for each in trainer["logger"]}
    assert loggers == {"MetricsFile", "WandbHistory"}
    rates = [each for each in trainer["callbacks"] if each["class_path"].endswith("WordErrorRate")]
    assert [each["init_args"]["every_n_epochs"] for each in rates] == [1]


@pytest.mark.parametrize("config", SPEECH[1:])
def test_the_gan_of_three_of_the_recognisers_losses(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = resolved(config, capsys)["model"]
    assert model["class_path"] == "lit_epgan.modules.SpeechGAN"
    assert (model["init_args"]["gan_weight"], model["init_args"]["lr"]) == (0.1, 3e-4)
    assert model["init_args"]["prior"]["class_path"] == "lit_epgan.modules.HistoryPrior"
    assert model["init_args"]["sample_acoustic"] == (config == "speech_ep_sru_ep_probgan.yaml")


def test_which_of_the_recognisers_networks_have_the_ep_prior(capsys: pytest.CaptureFixture[str]) -> None:
    algorithms = [resolved(config, capsys)["federation"]["init_args"]["algorithm"] for config in SPEECH]
    names = [each["class_path"].split(".")[-1] for each in algorithms]
    assert names == ["FedAvg", "FedAvg", "PriorOn", "TiltedExpectationPropagation"]
    assert algorithms[2]["init_args"]["networks"] == ["generator", "discriminator"]
    for tilted in (algorithms[2]["init_args"]["inner"], algorithms[3]):
        assert tilted["class_path"].endswith("TiltedExpectationPropagation")
        assert (tilted["init_args"]["weight"], tilted["init_args"]["features"]) == (1e-3, "discriminator.bottleneck")


@pytest.mark.parametrize("config", ["cifar.yaml", "cifar_probgan.yaml", "cifar_mixture_ep_probgan.yaml"])
def test_the_gans_of_images(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolved(config, capsys)
    model, data = settings["model"]["init_args"], settings["data"]["init_args"]
    assert (model["generator"]["init_args"]["members"], model["discriminator"]["init_args"]["heads"]) == (10, 4)
    assert (model["lr"], model["noise"]) == (3e-4, pytest.approx((2 * 3e-2 * 3e-4) ** 0.5, rel=1e-3))
    assert (data["batch_size"], data["local_steps"], settings["trainer"]["max_epochs"]) == (128, 400, 25)
    assert (data["partition"], data["clients"]) == ("one_class", 10)
    algorithm = settings["federation"]["init_args"]["algorithm"]
    if config != "cifar_probgan.yaml":
        assert algorithm["init_args"]["weight"] == 1e-3
        assert algorithm["init_args"]["components"] == (10 if "mixture" in config else 1)


@pytest.mark.parametrize("config", ["cifar_fedavg_gan.yaml", "cifar_f2a.yaml"])
def test_the_gans_of_images_that_are_trained_on_the_server(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolved(config, capsys)
    algorithm = settings["federation"]["init_args"]["algorithm"]["init_args"]
    assert (algorithm["server_steps"], algorithm["batch_size"]) == (6, 128)
    assert (settings["data"]["init_args"]["local_steps"], settings["trainer"]["max_epochs"]) == (6, 1667)


def test_table_1_has_every_method_objective_and_setting() -> None:
    studies = {study.variant: study for study in read_studies(find_config("studies/cifar_table1.yaml", studies=True))}
    settings = ("centralised", "iid_2", "iid_10", "one_class", "dirichlet_01", "dirichlet_05")
    assert set(studies) == {f"{setting}_{objective}" for setting in settings for objective in ("w", "ls")}
    table = {"vanilla", "bayesgan", "probgan", "fedavg_gan", "f2a", "ep_bgan", "ep_probgan", "mixture_ep_probgan"}
    ours = {"ep_laplace", "generator_sites", "generator_sites_ep", "embedding_sites", "embedding_sites_ep"}
    for variant, study in studies.items():
        central = variant.startswith("centralised")
        assert set(study.methods) == ({"vanilla", "bayesgan", "probgan", "ep_probgan"} if central else table | ours)
        assert len(study.seeds) == 5


@pytest.mark.parametrize("method", ["vanilla", "f2a"])
def test_no_run_of_table_1_starts_without_the_extractor_that_judges_it(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = read_studies(find_config("studies/cifar_table1.yaml", studies=True))
    (study,) = [study for study in studies if study.variant == "one_class_ls"]
    (run,) = [run for run in runs_of(study, Path("runs")) if run.seed == 0 and run.method.name == method]
    words = cli_command(run)[len(CLI) :]
    settings = resolved([*words, "--print_config"], capsys)
    (metrics,) = [each for each in settings["trainer"]["callbacks"] if each["class_path"].endswith("GenerativeMetrics")]
    assert metrics["init_args"]["required"]
    assert metrics["init_args"]["samples"] == 50_000
    everyones = {
        variant.variant: {m.settings["trainer.callbacks"][3]["init_args"]["required"] for m in variant.methods.values()}
        for variant in studies
    }
    assert all(required == {True} for required in everyones.values()), everyones
