"""Speech as a federation: what a chunk is, who holds which, and that nothing is made twice."""

import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.speech import ChunkDataset, SpeechDataModule, chunks_of
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules.acoustic_model import AcousticModel
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from lit_epgan.speech.frames import CHUNK, FUTURE, INPUTS, MELS, SpectralMasking, chunk_starts, runs, with_future
from lit_epgan.speech.preparation import UNALIGNED, Utterance
from lit_epgan.speech.sessions import pool_of
from lit_epgan.speech.stages import digest_of_result
from tests.federations import fit
from tests.refusals import assert_refused
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


def test_sessions_are_clients_and_iid_deals_the_same_chunks(settings, caplog):
    caplog.set_level("INFO", "lightning.pytorch")
    sessions, iid, pooled = (SpeechDataModule(**settings, partition=kind) for kind in ("sessions", "iid", "pooled"))
    for data in (sessions, iid, pooled):
        data.setup()
    assert caplog.text.count(f"where it is not yet kept in {settings['cache_dir']}") == 3
    assert sessions.client_names == iid.client_names == ["S01", "S02", "S03"]
    assert [c.records for c in sessions.clients] == [c.records for c in iid.clients]
    assert pooled.client_names == ["all"]
    for other in (iid, pooled):
        assert torch.equal(sorted_starts(other), sorted_starts(sessions))
    assert not torch.equal(iid.data.train["S01"].starts.sort().values, sessions.data.train["S01"].starts.sort().values)


def test_features_of_a_speaker_are_normalised_and_sentences_from_different_pools(settings):
    data = SpeechDataModule(**settings)
    own = [u for u in data.utterances("train") if u.recording.speaker == "S01-1"]
    frames = torch.cat([u.mel for u in own])
    torch.testing.assert_close(frames.mean(0), torch.zeros(40), atol=1e-3, rtol=0)
    torch.testing.assert_close(frames.std(0), torch.ones(40), atol=1e-2, rtol=0)
    assert all(len(u.pdfs) == len(u.mel) and u.pdfs[0] != UNALIGNED for u in own)
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
    assert_refused(r"2\.flac cannot be read", SpeechDataModule(**given).prepare_data)
    data = SpeechDataModule(**given, on_error="skip", iterations=8, gaussians=150)
    with pytest.warns(UserWarning, match=r"left out 1 utterances: .*2\.flac"):
        data.prepare_data()
    kept = data.utterances("train")
    assert len(kept) == len(own.utterances("train")) - 1
    np.testing.assert_allclose(kept[0].mel, own.utterances("train")[0].mel, atol=0.5)


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
    cache = shutil.copytree(settings["cache_dir"], tmp_path / "cache", ignore=shutil.ignore_patterns(".*"))
    before = {path.name: digest_of_result(path) for path in cache.rglob("[!.]*-*-*")}
    removed = list(cache.rglob("features-1-*"))
    for folder in removed:
        shutil.rmtree(folder)
    assert len(removed) == 6
    SpeechDataModule(**settings | {"cache_dir": str(cache), "workers": 2}).prepare_data()
    assert {path.name: digest_of_result(path) for path in cache.rglob("[!.]*-*-*")} == before


FRAMES = CHUNK + FUTURE


def masked(n, seed=0, **options):
    """Whether each entry of n chunks is masked, (n, 20, 5, 40)."""
    x = torch.ones(n, CHUNK, INPUTS)
    return SpectralMasking(**options)(x, generator_for(seed)).eq(0).unflatten(-1, (FUTURE + 1, MELS))


def test_a_chunk_is_what_a_masked_spectrogram_would_have_given():
    """Entry (t, i, m) is bin m of frame t + i, so that the masks are those of a spectrogram (24, 40)."""
    mel = torch.randn(64, FRAMES, MELS, generator=generator_for("mel")) + 10  # nowhere zero
    x = with_future(mel)
    y = SpectralMasking(bins=10, frames=6, masks=2)(x, generator_for(3))
    spectrogram = torch.cat([y[..., :MELS], y[:, -1, MELS:].unflatten(-1, (FUTURE, MELS))], 1)
    torch.testing.assert_close(with_future(spectrogram), y)
    lost = spectrogram.eq(0)
    assert torch.equal(spectrogram[~lost], mel[~lost])
    whole_bins, whole_frames = lost.all(1), lost.all(2)
    assert torch.equal(lost, whole_bins[:, None] | whole_frames[..., None])
    assert whole_bins.any()
    assert whole_frames.any()


def test_the_masked_share_is_half_of_the_widest_mask():
    """E f = F / 2 of 40 bins, E t = T / 2 of 24 frames."""
    bins = masked(20000, bins=10, frames=0)
    assert bins.float().mean() == pytest.approx(5 / 40, rel=0.02)
    assert torch.equal(bins, bins[:, :1, :1].expand_as(bins))  # the same in all frames and in their futures
    frames = runs((20000, 1), FRAMES, 6, generator_for(0))
    assert frames.float().mean() == pytest.approx(3 / 24, rel=0.02)
    assert masked(20000, bins=0, frames=6).float().mean() == pytest.approx(3 / 24, rel=0.1)


def test_masks_reach_both_ends_are_each_chunks_own_and_leave_what_was_given():
    found = runs((20000, 1), MELS, 4, generator_for(1)).int()
    lengths = found.sum(1)
    assert lengths.bincount().div(20000).tolist() == pytest.approx([0.2] * 5, rel=0.1)
    edges = torch.nn.functional.pad(found, (1, 1)).diff(dim=1).abs().sum(1)
    assert torch.equal(edges, 2 * (lengths > 0).int())  # one run each
    assert found[:, 0].any()
    assert found[:, -1].any()
    assert runs((100, 1), 4, 4, generator_for(1)).sum(1).max() == 4
    one, two = (masked(4000, bins=8, frames=0, masks=n)[:, 0, 0] for n in (1, 2))
    assert len(one.unique(dim=0)) > 100
    assert two.float().mean() > 1.7 * one.float().mean()
    x = torch.randn(8, CHUNK, INPUTS)
    kept = x.clone()
    assert torch.equal(SpectralMasking(bins=0, frames=0)(x, generator_for(0)), kept)
    assert not torch.equal(SpectralMasking(bins=20, frames=8)(x, generator_for(0)), kept)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("wrong", [{"bins": 41}, {"bins": -1}, {"frames": 25}, {"masks": 0}])
def test_a_mask_that_a_chunk_has_no_room_for_is_refused(wrong):
    assert_refused("masking's bins, frames and masks", SpectralMasking, **wrong)
    assert SpeechDataModule().masking is None
    assert_refused("at most 40 bins", SpeechDataModule, mask_bins=50)


class Seen(Callback):
    def __init__(self, data):
        self.data, self.trained, self.validated = data, [], []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.trained.append(batch[0].clone())

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.validated.append(batch[0].clone())


class OwnChunks(SpeechDataModule):
    def load(self):
        mel = torch.ones(20 * FRAMES, MELS, dtype=torch.float64)
        own = [ChunkDataset(mel, torch.zeros(len(mel)).long(), torch.arange(n) * FRAMES) for n in (12, 20)]
        return ClientData({"a": own[0], "b": own[1]}, val=own[0])

    def prepare_data(self):
        pass


def steps_of(rounds=2, folder=None, resumed=None, **options):
    data = OwnChunks(batch_size=4, mask_bins=8, mask_frames=4, **options)
    seen = Seen(data)
    torch.manual_seed(0)
    module = AcousticModel(SRUAcousticNetwork(hidden=4, layers=1, projection=4))
    trainer = fit(module, data, rounds=rounds, callbacks=[seen], ckpt_path=resumed, limit_val_batches=1)
    if folder is not None:
        trainer.save_checkpoint(folder / "last.ckpt")
    return module, seen, data


def test_only_what_is_trained_on_is_masked():
    _, seen, data = steps_of()
    assert all(x.eq(0).any() for x in seen.trained)
    assert seen.validated
    assert not any(x.eq(0).any() for x in seen.validated)
    assert not any(x.eq(0).any() for x, _ in data.records(1, 0))  # what an algorithm reads beside a round


def test_masks_belong_to_seed_round_and_client():
    (module, first, _), (same, again, _) = steps_of(), steps_of()
    assert all(torch.equal(a, b) for a, b in zip(first.trained, again.trained, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), same.parameters(), strict=True))
    a0, a1, b0, b1 = (first.trained[i] for i in (0, 8, 3, 11))  # three batches of a, five of b, twice
    other = steps_of(seed=1)[1].trained[0]
    assert not any(torch.equal(a0, x) for x in (a1, b0, b1, first.trained[1], other))
    # another client's batches before it change nothing
    alone = OwnChunks(batch_size=4, mask_bins=8, mask_frames=4, clients_per_round=1)
    seen = Seen(alone)
    fit(AcousticModel(SRUAcousticNetwork(hidden=4, layers=1, projection=4)), alone, rounds=4, callbacks=[seen])
    position, checked = 0, 0
    full = steps_of(rounds=4)[1].trained
    for round_ in range(4):
        (client,) = alone.cohort(round_)
        before = 8 * round_ + 3 * client
        for k in range(5 if client else 3):
            assert torch.equal(seen.trained[position + k], full[before + k])
        position, checked = position + (5 if client else 3), checked + client
    assert checked > 0


def test_a_resumed_run_masks_as_one_that_was_never_killed(tmp_path):
    whole, seen, _ = steps_of(rounds=3)
    steps_of(rounds=1, folder=tmp_path)
    resumed, later, _ = steps_of(rounds=3, resumed=str(tmp_path / "last.ckpt"))
    assert all(torch.equal(a, b) for a, b in zip(seen.trained[8:], later.trained, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
