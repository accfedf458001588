"""Speech as a federation: what a chunk is, who holds which, and that nothing is made twice."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from lit_epgan.datamodules.speech import SpeechDataModule, chunks_of
from lit_epgan.errors import UserError
from lit_epgan.speech.frames import chunk_starts
from lit_epgan.speech.preparation import UNALIGNED, Utterance
from lit_epgan.speech.sessions import pool_of
from lit_epgan.speech.stages import digest_of_result
from tests.speech import MAKERS, MINIATURE


@pytest.fixture
def settings(speech_cache):
    return MINIATURE | {"cache_dir": str(speech_cache)}


def sorted_starts(data):
    return torch.cat([own.starts for own in data.data.train.values()]).sort().values


def test_a_chunk_is_twenty_frames_with_their_future_and_states():
    mel = torch.arange(47.0)[:, None] + torch.arange(40) / 100
    utterances = [Utterance(None, mel, torch.arange(47)), Utterance(None, -mel, torch.full((47,), UNALIGNED))]
    chunks = chunks_of([utterances[1], *utterances])
    assert len(chunks) == 3
    assert chunk_starts(47) == [0, 20, 27]
    assert chunk_starts(19) == []
    x, states = chunks.fetch([1, 2])
    assert x.shape == (2, 20, 200)
    assert states.tolist() == [list(range(20, 40)), list(range(27, 47))]
    torch.testing.assert_close(x[0, 3], torch.cat([mel[23 + i] for i in range(5)]))
    torch.testing.assert_close(x[1, 19], mel[46].repeat(5))  # the last frame stands for its future
    torch.testing.assert_close(x[0, 3], chunks[1][0][3])


def test_sessions_are_clients_and_iid_deals_the_same_chunks(settings):
    sessions, iid, pooled = (SpeechDataModule(**settings, partition=kind) for kind in ("sessions", "iid", "pooled"))
    for data in (sessions, iid, pooled):
        data.setup()
    assert sessions.client_names == iid.client_names == ["S01", "S02", "S03"]
    assert [c.records for c in sessions.clients] == [c.records for c in iid.clients]
    assert pooled.client_names == ["all"]
    for other in (iid, pooled):
        assert torch.equal(sorted_starts(other), sorted_starts(sessions))
    assert not torch.equal(iid.data.train["S01"].starts.sort().values, sessions.data.train["S01"].starts.sort().values)


def test_features_are_normalised_by_speaker_and_aligned(settings):
    data = SpeechDataModule(**settings)
    own = [u for u in data.utterances("train") if u.recording.speaker == "S01-1"]
    frames = torch.cat([u.mel for u in own])
    torch.testing.assert_close(frames.mean(0), torch.zeros(40), atol=1e-3, rtol=0)
    torch.testing.assert_close(frames.std(0), torch.ones(40), atol=1e-2, rtol=0)
    assert all(len(u.pdfs) == len(u.mel) and u.pdfs[0] != UNALIGNED for u in own)


def test_sentences_of_the_splits_and_of_the_grammar_are_from_different_pools(settings):
    corpus = SpeechDataModule(**settings)._corpus()
    for split in ("train", "dev", "eval"):
        assert {pool_of(r.text) for r in corpus.recordings if r.split == split} == {split}
    assert {pool_of(sentence) for sentence in corpus.grammar} == {"language model"}


def test_what_is_made_is_kept(settings, monkeypatch):
    first = SpeechDataModule(**settings).utterances("eval")

    def never(*_):
        raise AssertionError("made anew")

    for name in MAKERS:
        monkeypatch.setattr(f"lit_epgan.speech.{name}", never)
    second = SpeechDataModule(**settings).utterances("eval")
    assert all(torch.equal(a.mel, b.mel) and torch.equal(a.pdfs, b.pdfs) for a, b in zip(first, second, strict=True))
    with pytest.raises(AssertionError, match="made anew"):
        SpeechDataModule(**(settings | {"iterations": 9})).utterances("eval")


def test_a_users_manifest_with_a_broken_file(settings, tmp_path):
    """The miniature, copied as a user's own corpus; one file of it is cut."""
    own = SpeechDataModule(**settings)
    rows = ["session,speaker,text,audio,seconds,split"]
    for split in ("train", "dev", "eval"):
        for u in own.utterances(split):
            r, name = u.recording, f"{len(rows)}.flac"
            shutil.copy(r.audio, tmp_path / name)
            rows.append(f"{r.session},{r.speaker},{r.text},{name},{r.seconds},{split}")
    (tmp_path / "manifest.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "2.flac").write_bytes(b"fLaC")
    given = {"manifest": str(tmp_path / "manifest.csv"), "cache_dir": str(tmp_path / "cache"), "workers": 1}
    with pytest.raises(UserError, match=r"2\.flac cannot be read"):
        SpeechDataModule(**given).prepare_data()
    data = SpeechDataModule(**given, on_error="skip", iterations=8, gaussians=150)
    with pytest.warns(UserWarning, match=r"left out 1 utterances: .*2\.flac"):
        data.prepare_data()
    kept = data.utterances("train")
    assert len(kept) == len(own.utterances("train")) - 1
    np.testing.assert_allclose(kept[0].mel, own.utterances("train")[0].mel, atol=0.5)


def test_two_corpora_are_one_too_many():
    with pytest.raises(UserError, match=r"data\.manifest and data\.chime5"):
        SpeechDataModule(manifest="a", chime5="b")


def test_what_is_unknown_and_what_cannot_be_is_said(settings, speech_cache, monkeypatch):
    with pytest.raises(UserError, match=r"data\.partition is 'i\.i\.d\.'; it must be one of sessions, iid, pooled"):
        SpeechDataModule(**settings, partition="i.i.d.")
    data = SpeechDataModule(**settings)
    prepared = replace(data.prepared, unknown=Counter({"kubernetes": 3, "7": 1}))
    assert not data.prepared.unknown
    monkeypatch.setattr("lit_epgan.datamodules.speech.prepare", lambda *_: prepared)
    with pytest.warns(UserWarning, match=r"no pronunciation of 2 words, said 4 times \(kubernetes, 7\)"):
        SpeechDataModule(**settings).prepare_data()


@pytest.mark.slow
def test_features_of_two_processes_are_those_of_one(settings, tmp_path):
    """With the features removed they are computed again, and what was made of them is found under their digest."""
    SpeechDataModule(**settings).prepare_data()
    cache = shutil.copytree(settings["cache_dir"], tmp_path / "cache")
    before = {path.name: digest_of_result(path) for path in cache.rglob("[!.]*-*-*")}
    removed = list(cache.rglob("features-1-*"))
    for folder in removed:
        shutil.rmtree(folder)
    assert len(removed) == 6
    SpeechDataModule(**settings | {"cache_dir": str(cache), "workers": 2}).prepare_data()
    assert {path.name: digest_of_result(path) for path in cache.rglob("[!.]*-*-*")} == before
