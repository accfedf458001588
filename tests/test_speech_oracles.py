"""The Gaussian mixtures recognise, and an aligner of another make hears the same phones at the same time."""

from dataclasses import replace

import numpy as np
import pocketsphinx
import pytest

from lit_epgan.speech.corpora import read_audio
from lit_epgan.speech.decoding import total
from lit_epgan.speech.phones import PHONES, SILENCE
from lit_epgan.speech.preparation import prepare
from lit_epgan.speech.sessions import Conditions, plan_sessions
from lit_epgan.speech.stages import Stages
from lit_epgan.speech.synthesis import embedded

pytestmark = pytest.mark.slow

QUIET = Conditions(reverberation=0.1, noise="white", snr=40.0, low=50.0, high=7800.0)
NEAR = 3  # frames


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Twelve minutes of training in a quiet room, accents and voices mixed alike in all sessions."""
    sessions = {"train": 6, "dev": 1, "eval": 3}
    plans = plan_sessions(sessions, minutes=12, words=400, heterogeneity=0.0, imbalance=1.0, seed=1)
    quiet = [
        replace(plan, own=QUIET, heterogeneity=1.0, speakers=tuple(replace(s, tract=100) for s in plan.speakers))
        for plan in plans  # with the timbres' own vocal tracts: others' pocketsphinx aligns more seldom
    ]
    stages = Stages(tmp_path_factory.mktemp("oracles"))
    return prepare(embedded(quiet, stages, grammar=500, workers=1, seed=1), stages, iterations=20, gaussians=800)


def test_the_mixtures_word_error_rate_is_below_twenty_percent(prepared):
    errors = total(prepared.errors_of_mixtures("eval", 0.1))
    assert errors.words >= 400
    assert errors.rate < 20


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
