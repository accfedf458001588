"""What a person gets wrong about speech: one sentence each on the command line, and exit code 2."""

import json
import sys

import numpy as np
import pytest
import soundfile

from tests.speech import words_of_miniature
from tests.test_cli import refusal

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


def test_audio_that_is_no_audio_or_too_short(folder, capsys):
    (folder / "b.wav").write_text("no audio " * 100)
    sentence = told(capsys, *manifest(folder, *ROWS, "S1,anna,two,b.wav,1.0,train"))
    assert sentence.startswith("b.wav cannot be read as audio")
    assert sentence.endswith("or set --data.on_error skip to leave such audio out.")
    assert "a.wav holds 1.00 of 9.00 s" in told(capsys, *manifest(folder, *ROWS, "S1,anna,two,a.wav,9.0,train"))
    assert "CMUdict has none" in told(capsys, *manifest(folder, *(row.replace("two", "qqxzz") for row in ROWS)))


def test_a_folder_that_is_not_chime5_or_lacks_its_audio(folder, capsys):
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
