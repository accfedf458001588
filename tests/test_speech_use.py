"""From nothing to word error rates on the command line, with a miniature of the corpus."""

import shutil
from types import SimpleNamespace

import jiwer
import numpy as np
import pandas as pd
import pytest
import torch

from lit_epgan.callbacks.word_error_rate import WordErrorRate, log_posteriors, lowest
from lit_epgan.cli.main import main
from lit_epgan.errors import UserError
from lit_epgan.modules.acoustic_model import AcousticModel
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from lit_epgan.speech.decoding import Decoder
from tests.speech import words_of_miniature

SMALL = ["--model.network.hidden", "16", "--model.network.layers", "1", "--model.network.projection", "16"]


@pytest.fixture
def command(tmp_path, monkeypatch, speech_cache):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    return ["--config", "speech.yaml", *words_of_miniature(speech_cache), *SMALL, "--trainer.accelerator", "cpu"]


@pytest.mark.slow
def test_fit_then_test(command, tmp_path):
    assert main(["fit", *command, "--trainer.max_epochs", "2", "--data.batch_size", "8"]) == 0
    rounds = pd.read_csv(tmp_path / "runs" / "speech" / "metrics.csv")
    assert rounds["wer_dev"].notna().sum() == 2
    assert main(["test", *command]) == 0
    folder = tmp_path / "runs" / "speech"
    logged = pd.read_csv(folder / "test_metrics.csv").iloc[-1]
    table = pd.read_csv(folder / "test" / "word_errors.csv").set_index("session")
    decoded = pd.read_csv(folder / "test" / "hypotheses.csv", keep_default_na=False)
    rate = 100 * jiwer.wer(decoded["reference"].tolist(), decoded["hypothesis"].tolist())
    assert logged["wer"] == pytest.approx(rate, rel=1e-5)
    assert table.loc["all", "wer"] == pytest.approx(rate, abs=0.01)
    assert logged["wer_low"] <= logged["wer"] <= logged["wer_high"]
    assert set(table.index) == {"S05", "S06", "all"}
    counts = ["words", "substitutions", "deletions", "insertions"]
    assert (table.loc[["S05", "S06"], counts].sum() == table.loc["all", counts]).all()
    assert set(decoded["session"]) == {"S05", "S06"}
    assert 0 <= logged["wer_gmm"] < 100
    assert 0 <= logged["wer_gmm_dev"] < 100


def test_the_last_round_of_a_study_is_tested_or_held_against_the_development_sessions(command, tmp_path):
    words = ["--config", "speech.yaml", *command[2:], "--trainer.max_epochs", "2", "--data.batch_size", "8"]
    look = "{class_path: lit_epgan.callbacks.WordErrorRate, init_args: {utterances: 4, last: %s}}"
    looks = f"[{{class_path: lit_epgan.callbacks.RoundCheckpoint}}, {look}]"
    folder = tmp_path / "runs" / "speech"
    assert main(["fit", *words, "--trainer.callbacks", looks % "test"]) == 0
    rounds = pd.read_csv(folder / "metrics.csv")
    (last,) = rounds.dropna(subset="wer").to_dict("records")
    assert last["epoch"] == 1
    assert rounds["wer_dev"].notna().sum() == 2
    decoded = pd.read_csv(folder / "test" / "hypotheses.csv", keep_default_na=False)
    rate = 100 * jiwer.wer(decoded["reference"].tolist(), decoded["hypothesis"].tolist())
    assert last["wer"] == pytest.approx(rate, rel=1e-5)
    shutil.rmtree(folder)
    assert main(["fit", *words, "--trainer.callbacks", looks % "dev"]) == 0
    rounds = pd.read_csv(folder / "metrics.csv")
    assert rounds["wer_dev_all"].notna().sum() == 1
    assert "wer" not in rounds
    assert not (folder / "test").exists()
    with pytest.raises(UserError, match="one of nothing, dev, test"):
        WordErrorRate(last="eval")


def test_the_scale_is_sought_upwards_until_error_rates_rise():
    rates, tried = {0.1: 9.0, 0.15: 7.0, 0.2: 7.0, 0.3: 8.0, 0.5: 1.0}, []
    assert lowest([0.5, 0.1, 0.15, 0.2, 0.3], lambda scale: tried.append(scale) or rates[scale]) == (0.2, 7.0)
    assert tried == [0.1, 0.15, 0.2, 0.3]
    assert lowest([0.3], rates.get) == (0.3, 8.0)


def test_the_scale_is_chosen_on_development_sessions_alone():
    """A scale that is best for the development sessions is taken, whatever the evaluation sessions would like."""
    data = SimpleNamespace(
        utterances=lambda split: (
            [SimpleNamespace(recording=SimpleNamespace(text="one two"))] if split == "dev" else 1 / 0
        ),
        decoder=SimpleNamespace(words=lambda scores, scale: "one two" if scale == 0.125 else "one"),
    )
    assert WordErrorRate()._best_scale(data, [None]) == (0.125, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_posteriors_of_utterances_of_any_length_and_of_networks_of_any_precision(dtype):
    module = AcousticModel(SRUAcousticNetwork(200, 8, 1, 8, 123)).to(dtype)
    lengths = [7, 20, 33]
    scores = log_posteriors(module, [SimpleNamespace(mel=torch.randn(n, 40)) for n in lengths])
    assert [len(each) for each in scores] == lengths
    assert all(each.dtype == np.float32 and np.isfinite(each).all() for each in scores)


def test_posteriors_that_are_no_numbers_are_not_decoded():
    decoder = object.__new__(Decoder)
    with pytest.raises(UserError, match=r"diverged; lower model\.lr"):
        decoder.words(np.full((3, 123), np.nan), 0.1)


def test_other_data_cannot_be_decoded():
    with pytest.raises(UserError, match="WordErrorRate decodes speech"):
        WordErrorRate().setup(SimpleNamespace(datamodule=object()), None, "fit")
