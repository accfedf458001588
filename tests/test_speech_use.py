"""From nothing to word error rates on the command line, with a miniature of the corpus."""

import json
import shutil
import sys
from types import SimpleNamespace

import jiwer
import numpy as np
import pandas as pd
import pytest
import soundfile
import torch

from lit_epgan.callbacks.word_error_rate import WordErrorRate, log_posteriors, lowest
from lit_epgan.cli.main import main
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.acoustic_model import AcousticModel
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from lit_epgan.speech.decoding import Decoder
from tests.chime5_tree import write_chime5
from tests.refusals import assert_refused
from tests.speech import words_of_miniature
from tests.test_cli import refusal

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
    assert_refused("one of nothing, dev, test", WordErrorRate, last="eval")


def test_scales_are_sought_and_what_cannot_be_decoded_is_not():
    rates, tried = {0.1: 9.0, 0.15: 7.0, 0.2: 7.0, 0.3: 8.0, 0.5: 1.0}, []
    assert lowest([0.5, 0.1, 0.15, 0.2, 0.3], lambda scale: tried.append(scale) or rates[scale]) == (0.2, 7.0)
    assert tried == [0.1, 0.15, 0.2, 0.3]
    assert lowest([0.3], rates.get) == (0.3, 8.0)
    # A scale that is best for the development sessions is taken, whatever the evaluation sessions would like
    data = SimpleNamespace(
        utterances=lambda split: (
            [SimpleNamespace(recording=SimpleNamespace(text="one two"))] if split == "dev" else 1 / 0
        ),
        decoder=SimpleNamespace(words=lambda scores, scale: "one two" if scale == 0.125 else "one"),
    )
    assert WordErrorRate()._best_scale(data, [None]) == (0.125, 0.0)
    decoder = object.__new__(Decoder)
    assert_refused(r"diverged; lower model\.lr", decoder.words, np.full((3, 123), np.nan), 0.1)
    with pytest.raises(UserError, match="WordErrorRate decodes speech"):
        WordErrorRate().setup(SimpleNamespace(datamodule=object()), None, "fit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_posteriors_of_utterances_of_any_length_and_of_networks_of_any_precision(dtype):
    module = AcousticModel(SRUAcousticNetwork(200, 8, 1, 8, 123)).to(dtype)
    lengths = [7, 20, 33]
    scores = log_posteriors(module, [SimpleNamespace(mel=torch.randn(n, 40)) for n in lengths])
    assert [len(each) for each in scores] == lengths
    assert all(each.dtype == np.float32 and np.isfinite(each).all() for each in scores)


ROWS = ["S1,anna,two,a.wav,1.0,train", "S2,bert,two,a.wav,1.0,dev", "S3,carl,two,a.wav,1.0,eval"]
COLUMNS = "session,speaker,text,audio,seconds,split"
SPOKEN = {"speaker": "P01", "words": "two", "start_time": "0:00:00.00", "end_time": "0:00:01.00"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with a second of noise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    soundfile.write(tmp_path / "a.wav", 0.1 * np.random.default_rng(0).standard_normal(16000), 16000)
    return tmp_path


def told(capsys, *words):
    small = ["--model.network.hidden", "8", "--model.network.layers", "1", "--trainer.accelerator", "cpu"]
    given = ["--data.cache_dir", "cache", "--data.workers", "1", "--trainer.max_epochs", "1"]
    return refusal(capsys, "fit", "--config", "speech.yaml", *given, *small, *words)


def manifest(folder, *rows, header=COLUMNS):
    (folder / "own.csv").write_text("\n".join([header, *rows]) + "\n")
    return ["--data.manifest", "own.csv"]


def chime5(folder, entries):
    for split, session in (("train", "S03"), ("dev", "S02"), ("eval", "S01")):
        (folder / "CHiME5" / "transcriptions" / split).mkdir(parents=True)
        (folder / "CHiME5" / "transcriptions" / split / f"{session}.json").write_text(json.dumps(entries))
    return ["--data.chime5", "CHiME5"]


def test_a_manifest_that_is_not_there_or_lacks_something(folder, capsys):
    assert "there is no manifest nowhere.csv" in told(capsys, "--data.manifest", "nowhere.csv")
    assert "no column 'speaker'" in told(
        capsys, *manifest(folder, "S1,two,a.wav,1", header="session,text,audio,seconds")
    )
    assert "b.wav is not there: mend or remove it, or set --data.on_error skip" in told(
        capsys, *manifest(folder, *ROWS, "S1,anna,two,b.wav,1.0,train")
    )
    assert "no recording of the split dev" in told(capsys, *manifest(folder, ROWS[0]))
    (folder / "own.csv").write_bytes(b"session,speaker,text,audio,seconds\nS1,a,caf\xe9,a.wav,1\n")
    assert "own.csv cannot be read as a CSV table in UTF-8" in told(capsys, "--data.manifest", "own.csv")


def test_a_folder_that_is_not_chime5_or_audio_that_is_none_or_too_short(folder, capsys):
    (folder / "b.wav").write_text("no audio " * 100)
    sentence = told(capsys, *manifest(folder, *ROWS, "S1,anna,two,b.wav,1.0,train"))
    assert sentence.startswith("b.wav cannot be read as audio")
    assert sentence.endswith("or set --data.on_error skip to leave such audio out.")
    assert "a.wav holds 1.00 of 9.00 s" in told(capsys, *manifest(folder, *ROWS, "S1,anna,two,a.wav,9.0,train"))
    assert "CMUdict has none" in told(capsys, *manifest(folder, *(row.replace("two", "qqxzz") for row in ROWS)))
    assert "nowhere is not CHiME-5's folder" in told(capsys, "--data.chime5", "nowhere")
    assert "CHiME5/audio/train/S03_P01.wav is not there" in told(capsys, *chime5(folder, [SPOKEN]))


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"a": 1}, "S03.json is no transcription: a list"),
        (["a", {"words": 3, "speaker": "P01"}], "no recording of the split train"),
        ([SPOKEN | {"start_time": "one"}], "S03.json: an utterance has no start_time"),
    ],
)
def test_a_transcription_that_is_none(folder, capsys, entries, said):
    assert said in told(capsys, *chime5(folder, entries))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--data.manifest", "a", "--data.chime5", "b"], "data.manifest and data.chime5 are both given"),
        (["--data.mask_bins", "41"], "give at most 40 bins"),
        (["--data.heterogeneity", "2"], "heterogeneity is 2.0"),
        (["--data.dev_sessions", "0"], "dev_sessions is 0"),
        (["--data.iterations", "7"], "data.iterations is 7; it must be at least 8"),
        (["--data.on_error", "ignore"], "data.on_error is 'ignore'"),
    ],
)
def test_a_setting_that_cannot_be(folder, capsys, words, said):
    assert said in told(capsys, *words)


@pytest.mark.slow
def test_a_network_that_does_not_fit_the_data(folder, capsys, speech_cache):
    words = words_of_miniature(speech_cache)
    assert "the network 7: set its pdfs to 123" in told(capsys, *words, "--model.network.pdfs", "7")
    assert "a frame has 200 columns, the network takes 7" in told(capsys, *words, "--model.network.inputs", "7")


@pytest.mark.parametrize("package", ["soundfile", "kaldi_native_fbank", "kaldi_hmm_gmm"])
def test_the_extra_is_missing(folder, capsys, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    sentence = told(capsys, *manifest(folder, *ROWS))
    assert f"speech needs the package {package}" in sentence
    assert 'pip install -e ".[speech]"' in sentence


SMALL_FOR_CHIME5 = ["--model.network.hidden", "32", "--model.network.layers", "1", "--model.network.projection", "32"]


@pytest.mark.slow
def test_from_the_published_layout_to_word_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    texts = write_chime5(tmp_path / "CHiME5")
    own = ["--data.chime5", "CHiME5", "--data.cache_dir", "cache", "--data.workers", "1"]
    fewer = ["--data.iterations", "10", "--data.gaussians", "250", "--trainer.accelerator", "cpu"]
    command = ["--config", "speech.yaml", *own, *fewer, *SMALL_FOR_CHIME5]
    assert main(["fit", *command, "--trainer.max_epochs", "1", "--data.batch_size", "16"]) == 0
    run = tmp_path / "runs" / "speech"
    assert pd.read_csv(run / "metrics.csv")["wer_dev"].notna().sum() == 1
    assert set(pd.read_csv(run / "partition.csv")["client"]) == {"S03", "S04"}
    assert main(["test", *command]) == 0
    decoded = pd.read_csv(run / "test" / "hypotheses.csv", keep_default_na=False)
    assert decoded["reference"].tolist() == texts["S01"]  # neither what is redacted nor laughter
    table = pd.read_csv(run / "test" / "word_errors.csv").set_index("session")
    assert list(table.index) == ["S01", "all"]
    assert table.loc["all", "words"] == sum(len(text.split()) for text in texts["S01"])
    logged = pd.read_csv(run / "test_metrics.csv").iloc[-1]
    assert table.loc["all", "wer"] == pytest.approx(logged["wer"], abs=0.01)
    assert logged["wer_gmm"] < 60  # 36 when this was written; the right channel is noise
