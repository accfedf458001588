"""The Gaussian mixtures recognise, and an aligner of another make hears the same phones at the same time."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pocketsphinx
import pytest
import soundfile

from lit_epgan.speech.corpora import Recording, from_manifest, read_audio, write_manifest
from lit_epgan.speech.decoding import total
from lit_epgan.speech.phones import PHONES, SILENCE, cmudict
from lit_epgan.speech.preparation import UNALIGNED, prepare
from lit_epgan.speech.sessions import Conditions, plan_sessions
from lit_epgan.speech.stages import Stages
from lit_epgan.speech.synthesis import embedded

QUIET = Conditions(reverberation=0.1, noise="white", snr=40.0, low=50.0, high=7800.0)
NEAR = 3  # frames


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Eight minutes of training in a quiet room, accents and voices mixed alike in all sessions."""
    sessions = {"train": 6, "dev": 1, "eval": 3}
    plans = plan_sessions(sessions, minutes=8, words=400, heterogeneity=0.0, imbalance=1.0, seed=1)
    quiet = [
        replace(plan, own=QUIET, heterogeneity=1.0, speakers=tuple(replace(s, tract=100) for s in plan.speakers))
        for plan in plans  # with the timbres' own vocal tracts: others' pocketsphinx aligns more seldom
    ]
    stages = Stages(tmp_path_factory.mktemp("oracles"))
    return prepare(embedded(quiet, stages, grammar=500, workers=1, seed=1), stages, iterations=12, gaussians=500)


@pytest.mark.slow
def test_the_mixtures_word_error_rate_is_below_twenty_percent(prepared):
    errors = total(prepared.errors_of_mixtures("eval", 0.1))
    assert errors.words >= 400
    assert errors.rate < 20


@pytest.mark.slow
def test_another_aligner_hears_the_same_phones(prepared):
    """Of our frames of speech at least 80 % have the same phone within 3 frames in pocketsphinx's alignment.

    Sentences that pocketsphinx cannot align at all are left out: 5 of 24 when this was written, wider beams made it 17.
    """
    decoder = pocketsphinx.Decoder(pocketsphinx.Config(lm=None, loglevel="FATAL"))
    near = frames = failed = 0
    for session in prepared.utterances["train"].values():
        for utterance in session[:4]:
            ours = [PHONES[pdf // 3] for pdf in utterance.pdfs.tolist()]
            try:
                theirs = phones_of(decoder, utterance.recording, len(ours) + NEAR)
            except RuntimeError:
                failed += 1
                continue
            for t, phone in enumerate(ours):
                if phone != SILENCE:
                    frames += 1
                    near += phone in theirs[max(0, t - NEAR) : t + NEAR + 1]
    assert failed <= 8  # of 24: else too few are left to speak for all
    assert frames > 1000
    assert near / frames >= 0.8


def phones_of(decoder, recording, frames):
    """The phone of each frame by pocketsphinx: words are aligned first, then their phones."""
    samples = (read_audio(recording) * 2**16).clip(-(2**15), 2**15 - 1).astype(np.int16).tobytes()
    decoder.set_align_text(recording.text)
    for attempt in range(2):
        if attempt:
            decoder.set_alignment()
        decoder.start_utt()
        decoder.process_raw(samples, full_utt=True)
        decoder.end_utt()
    phones = [SILENCE] * frames
    for word in decoder.get_alignment():
        for phone in word:
            phones[phone.start : phone.start + phone.duration] = [phone.name] * phone.duration
    return phones


DATA = Path("/usr/share/pocketsphinx/test/data")
READERS = {"cards": "cards.transcription", "librivox": "transcription"}


def of_people(test):
    there = all((DATA / reader / file).is_file() for reader, file in READERS.items())
    why = "needs recordings of people: apt-get install pocketsphinx-testdata"
    return pytest.mark.slow(pytest.mark.skipif(not there, reason=why)(test))


def recordings():
    for reader, file in READERS.items():
        for line in (DATA / reader / file).read_text().splitlines():
            text, name = re.fullmatch(r"<s> (.+?) *</s> \((.+)\)", line).groups()
            audio = DATA / reader / f"{name}.wav"
            yield Recording(reader, reader, text, audio, soundfile.info(audio).duration, "eval")


@pytest.fixture(scope="module")
def utterances(tmp_path_factory):
    """The recordings, aligned by mixtures that were trained on espeak's quiet rooms."""
    folder = tmp_path_factory.mktemp("real")
    stages = Stages(folder / "cache")
    plans = plan_sessions(
        {"train": 3, "dev": 1, "eval": 1}, minutes=6, words=20, heterogeneity=0.0, imbalance=1.0, seed=1
    )
    quiet = [replace(plan, own=QUIET, heterogeneity=1.0) for plan in plans]
    spoken = embedded(quiet, stages, grammar=1, workers=1, seed=1).recordings
    write_manifest(folder / "manifest.csv", [*spoken, *recordings()])
    prepared = prepare(from_manifest(folder / "manifest.csv", outside=True), stages, iterations=12, gaussians=400)
    assert not prepared.skipped
    return [each for reader in READERS for each in prepared.utterances["eval"][reader]]


def phones(utterance):
    """The phones that an utterance is aligned with, one after another, without silence."""
    pdfs = utterance.pdfs.numpy()
    begins = np.flatnonzero(np.diff(pdfs, prepend=-1) != 0)
    states = pdfs[begins]
    return [PHONES[pdf // 3] for pdf in states if pdf % 3 == 0 and PHONES[pdf // 3] != SILENCE]


@of_people
def test_every_recording_has_finite_features_and_all_its_phones_in_order(utterances):
    assert len(utterances) == 10
    for each in utterances:
        assert each.mel.isfinite().all()
        assert len(each.mel) == len(each.pdfs) == pytest.approx(100 * each.recording.seconds, abs=5)
        assert UNALIGNED not in each.pdfs
        found, ends = phones(each), {0}
        for word in each.recording.text.split():
            ends = {
                end + len(one) for end in ends for one in cmudict()[word] if tuple(found[end : end + len(one)]) == one
            }
        assert len(found) in ends, each.recording.text


@of_people
def test_phones_lie_where_another_aligner_finds_them(utterances):
    """Of our frames of speech 80 to 85 % were near in three syntheses, and 34 % with phones of equal length."""
    decoder = pocketsphinx.Decoder(pocketsphinx.Config(lm=None, loglevel="FATAL"))
    near = equal = frames = 0
    for each in utterances:
        ours = [PHONES[pdf // 3] for pdf in each.pdfs.tolist()]
        theirs = phones_of(decoder, each.recording, len(ours) + NEAR)
        sequence = phones(each)
        for t, phone in enumerate(ours):
            if phone != SILENCE:
                there = theirs[max(0, t - NEAR) : t + NEAR + 1]
                frames += 1
                near += phone in there
                equal += sequence[t * len(sequence) // len(ours)] in there
    assert frames > 2500
    assert near / frames >= 0.7
    assert equal / frames < 0.5  # what a wrong alignment comes to
