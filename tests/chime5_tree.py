"""A miniature of CHiME-5 in its published layout, spoken by espeak."""

import json
from itertools import islice

import numpy as np
import soundfile

from lit_epgan.speech.frames import RATE
from lit_epgan.speech.sessions import TOPICS, plan_sessions, sentences
from lit_epgan.speech.synthesis import espeak

SESSIONS = {"train": ["S03", "S04"], "dev": ["S02"], "eval": ["S01"]}
SENTENCES = {"train": 24, "dev": 8, "eval": 12}
ONE_TOPIC = [1.0] + [0.0] * (len(TOPICS) - 1)  # so that so little training text has most words
BLEED, NOISE = 0.05, 0.001  # what a microphone hears of the other speaker, and of nobody
PAUSE = 0.3  # seconds


def write_chime5(root):
    """Two training sessions, one for development, one for evaluation, of two speakers each.

    Every speaker wears a microphone that hears the whole session, its right channel noise alone; transcriptions hold
    redacted utterances and such without words, too.

    Returns:
        the texts that can be recognised, in their order: {session: [text, ...]}.
    """
    counts = {split: len(names) for split, names in SESSIONS.items()}
    plans = plan_sessions(counts, minutes=1, words=1, heterogeneity=0.0, speakers=2)
    names = [name for own in SESSIONS.values() for name in own]
    return {name: _write_session(root, name, plan) for name, plan in zip(names, plans, strict=True)}


def _write_session(root, name, plan):
    rng = np.random.default_rng(plan.seed)
    people = [f"P{4 * int(name[1:]) + k:02d}" for k in range(2)]
    texts = list(islice(sentences(plan.split, ONE_TOPIC, plan.seed, "chime5"), SENTENCES[plan.split]))
    heard, entries, now = {person: [] for person in people}, [], 0.0
    for number, text in enumerate(texts):
        speaker = number % 2
        samples = np.pad(espeak().say(text, plan.speakers[speaker]), int(RATE * PAUSE))
        for k, person in enumerate(people):
            heard[person].append(samples * (1 if k == speaker else BLEED))
        end = now + len(samples) / RATE
        entries.append(_entry(name, people[speaker], f"[noise] {text.capitalize()}.", now, end))
        now = end
    entries.append(_entry(name, people[0], "[redacted]", 0.0, 1.0))
    entries.append(_entry(name, people[1], "[laughs]", 1.0, 2.0))
    for person, parts in heard.items():
        left = np.concatenate(parts)
        noise = NOISE * rng.standard_normal((len(left), 2))
        audio = root / "audio" / plan.split / f"{name}_{person}.wav"
        audio.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(audio, np.stack([left, 100 * noise[:, 1]], 1) + noise, RATE)
    transcription = root / "transcriptions" / plan.split / f"{name}.json"
    transcription.parent.mkdir(parents=True, exist_ok=True)
    transcription.write_text(json.dumps(entries))
    return texts


def _entry(session, person, words, start, end):
    """An utterance's entry; on an array's clock it begins 40 ms later."""
    times = {
        f"{edge}_time": {"original": _clock(at), person: _clock(at), "U01": _clock(at + 0.04)}
        for edge, at in (("start", start), ("end", end))
    }
    return times | {"words": words, "speaker": person, "ref": "U01", "location": "kitchen", "session_id": session}


def _clock(seconds):
    return f"{int(seconds // 3600)}:{int(seconds // 60) % 60:02d}:{seconds % 60:05.2f}"
