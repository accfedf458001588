"""What the configurations of EP-GAN's table 2 say: appendices F.4.1 to F.4.3, and what is logged each round."""

from typing import Any

import pytest
import yaml

from lit_epgan.cli import main

CONFIGS = ("speech.yaml", "speech_probgan.yaml", "speech_ep_probgan.yaml", "speech_ep_sru_ep_probgan.yaml")


def resolved(config: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    with pytest.raises(SystemExit):
        main(["fit", "--config", config, "--print_config"])
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return settings


@pytest.mark.parametrize("config", CONFIGS)
def test_what_all_share(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolved(config, capsys)
    data, trainer = settings["data"]["init_args"], settings["trainer"]
    assert (data["batch_size"], data["local_epochs"], data["local_steps"]) == (128, 1, None)
    assert trainer["max_epochs"] == 12
    assert settings["model"]["init_args"]["network"]["init_args"]["dropout"] == 0.1
    loggers = {each["class_path"].split(".")[-1] for each in trainer["logger"]}
    assert loggers == {"MetricsFile", "WandbLogger"}
    rates = [each for each in trainer["callbacks"] if each["class_path"].endswith("WordErrorRate")]
    assert [each["init_args"]["every_n_epochs"] for each in rates] == [1]


@pytest.mark.parametrize("config", CONFIGS[1:])
def test_the_gan_of_three_of_the_losses(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = resolved(config, capsys)["model"]
    assert model["class_path"] == "lit_epgan.speech_gan.SpeechGAN"
    assert (model["init_args"]["gan_weight"], model["init_args"]["lr"]) == (0.1, 3e-4)
    assert model["init_args"]["prior"]["class_path"] == "lit_epgan.priors.HistoryPrior"
    assert model["init_args"]["sample_acoustic"] == (config == "speech_ep_sru_ep_probgan.yaml")


def test_whose_prior_is_ep(capsys: pytest.CaptureFixture[str]) -> None:
    algorithms = [resolved(config, capsys)["federation"]["init_args"]["algorithm"] for config in CONFIGS]
    names = [each["class_path"].split(".")[-1] for each in algorithms]
    assert names == ["FedAvg", "FedAvg", "PriorOn", "TiltedExpectationPropagation"]
    assert algorithms[2]["init_args"]["networks"] == ["generator", "discriminator"]
    for tilted in (algorithms[2]["init_args"]["inner"], algorithms[3]):
        assert tilted["class_path"].endswith("TiltedExpectationPropagation")
        assert (tilted["init_args"]["weight"], tilted["init_args"]["features"]) == (1e-3, "discriminator.bottleneck")
