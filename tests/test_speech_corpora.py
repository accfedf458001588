"""Where recordings come from: sentences that no two pools share, sessions, manifests, CHiME-5's layout, bad audio."""

import json
import time
from itertools import islice

import numpy as np
import pytest
import soundfile

from lit_epgan.datamodules import SpeechDataModule
from lit_epgan.lib.errors import UserError
from lit_epgan.speech.corpora import (
    Recording,
    chime5,
    from_manifest,
    plain_words,
    read_audio,
    read_manifest,
    readable,
    write_manifest,
)
from lit_epgan.speech.phones import cmudict
from lit_epgan.speech.sessions import (
    FAMILIES,
    MAIN_TOPIC,
    POOLS,
    SNR,
    TOPICS,
    plan_sessions,
    pool_of,
    sentences,
    vocabulary,
)
from lit_epgan.speech.stages import Stages, digest_of_result
from lit_epgan.speech.synthesis import corpus
from tests.refusals import assert_refused

RATE = 16000
SESSIONS = {"train": 16, "dev": 6, "eval": 6}


def tone(path, seconds=1.0, rate=RATE):
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, 0.1 * np.sin(np.arange(int(seconds * rate)) / 10), rate)
    return path


def manifest(folder, rows, header="session,speaker,text,audio,seconds,split"):
    path = folder / "manifest.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_pools_share_no_sentence_have_pronunciations_and_fill_sessions():
    uniform = [1 / len(TOPICS)] * len(TOPICS)
    drawn = {pool: set(islice(sentences(pool, uniform, 0, pool), 500)) for pool in set(POOLS)}
    assert all(len(own) == 500 for own in drawn.values())
    assert len(set.union(*drawn.values())) == 500 * len(drawn)
    assert all(pool_of(sentence) == pool for pool, own in drawn.items() for sentence in own)
    assert not [word for word in vocabulary() if word not in cmudict()]
    for topic in range(len(TOPICS)):
        only = [float(topic == k) for k in range(len(TOPICS))]
        for pool in ("dev", "eval"):
            assert len(list(islice(sentences(pool, only, topic), 80))) == 80


def test_nobody_who_trains_is_heard_in_evaluation_and_lengths_are_imbalanced():
    """No two speakers have voice, pitch and vocal tract in common, and no two sessions the room."""
    plans = plan_sessions(SESSIONS, 60, 3000, speakers=200)  # so many that chance alone would repeat some
    speakers = [s for p in plans for s in p.speakers]
    assert len({s.name for s in speakers}) == len(speakers)
    assert len({(s.voice, s.pitch, s.tract) for s in speakers}) == len(speakers)
    assert len({p.own for p in plans}) == len(plans)
    plans = plan_sessions(SESSIONS, 60, 3000, imbalance=4)
    train = [p.seconds for p in plans if p.split == "train"]
    assert (sum(train), max(train) / min(train)) == (pytest.approx(3600), pytest.approx(4))
    assert sum(p.words for p in plans if p.split == "eval") >= 3000


def test_a_session_sounds_alike_whatever_was_spoken_before_it_or_beside(tmp_path):
    plans = [p for p in plan_sessions({"train": 2, "dev": 1, "eval": 1}, 0.1, 1, speakers=2) if p.split == "train"]
    first = corpus(plans, Stages(tmp_path / "a"))
    time.sleep(1.1)  # espeak's random numbers would be those of another second
    second = corpus(plans[::-1], Stages(tmp_path / "b"), workers=2)
    assert [digest_of_result(each) for each in first] == [digest_of_result(each) for each in second[::-1]]


def test_few_sessions_cover_every_range_evenly():
    """Of six development sessions one has its noise level in each sixth of the range; no topic twice, no accent."""
    plans = [p for p in plan_sessions(SESSIONS, 60, 3000) if p.split == "dev"]
    (low, high), sixths = SNR, range(len(plans))
    assert sorted(int((p.own.snr - low) / (high - low) * len(plans)) for p in plans) == list(sixths)
    topics = [np.argmax(p.topics) for p in plans]
    assert len(set(topics)) == len(plans)
    assert all(max(p.topics) == pytest.approx(MAIN_TOPIC + (1 - MAIN_TOPIC) / len(TOPICS)) for p in plans)
    accents = [p.speakers[0].voice.split("+")[0] for p in plans]
    assert len(set(accents)) == len(plans)
    families = [p.speakers[0].voice.split("+")[1] in FAMILIES["female"] for p in plans]
    assert sum(families) == len(plans) // 2


@pytest.mark.parametrize(
    ("name", "value"), [("heterogeneity", 1.5), ("imbalance", 0.5), ("minutes", 0), ("speakers", 0)]
)
def test_a_plan_that_cannot_be_is_refused(name, value):
    assert_refused(name, plan_sessions, **{"sessions": SESSIONS, "minutes": 1.0, "words": 10, name: value})


def test_a_manifest_is_read(tmp_path):
    tone(tmp_path / "a.wav")
    rows = ["S1,anna,Turn it OFF!,a.wav,1.0,train", "S2,bert,two,a.wav,1.0,dev", "S3,carl,two,a.wav,0.5,eval"]
    corpus = from_manifest(manifest(tmp_path, rows))
    assert [r.text for r in corpus.recordings] == ["turn it off", "two", "two"]
    assert (corpus.grammar, corpus.words) == (["turn it off"], ["it", "off", "turn"])


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("S1,anna,two,a.wav,long,train", "line 3: seconds and start must be numbers"),
        ("S1,anna,two,a.wav,-1,train", "line 3: seconds must be positive"),
        (",anna,two,a.wav,1.0,train", "line 3: the session is empty"),
        ("S1,anna,two,a.wav,1.0,testing", "line 3: the split is 'testing'"),
        ("S1,anna,well, I think so,a.wav,1.0,train", r"line 3 has 7 fields, .* 6 columns, session, speaker, text"),
        ("S1,anna,a.wav,1.0", r"line 3 has 4 fields, .* names 6 columns, session"),
        ('\n"S1","an\nna",two,a.wav,long,train', "line 4: seconds"),
    ],
)
def test_a_mistake_in_a_manifest_is_named(tmp_path, row, said):
    tone(tmp_path / "a.wav")
    assert_refused(said, read_manifest, manifest(tmp_path, ["S1,anna,two,a.wav,1.0,train", row]))


def test_commas_at_a_headers_end_and_in_quotation_marks(tmp_path):
    tone(tmp_path / "a.wav")
    header = "session,speaker,audio,seconds,text,"
    row = "S1,anna,a.wav,1.0,two,"
    assert read_manifest(manifest(tmp_path, [row], header))[0].text == "two"
    rows = [row, "S1,anna,a.wav,1.0,well, I think so"]
    said = "line 3 holds 'I think so' where the first line names no column"
    assert_refused(said, read_manifest, manifest(tmp_path, rows, header))
    tone(tmp_path / "a.wav")
    (read,) = read_manifest(manifest(tmp_path, ['S1,anna,"well, I think so",a.wav,1.0,train']))
    assert read.text == "well i think so"


def test_a_column_that_is_there_twice_and_one_or_a_split_that_is_missing_are_refused(tmp_path):
    tone(tmp_path / "a.wav")
    with pytest.raises(UserError, match="more than one column 'text'"):
        read_manifest(manifest(tmp_path, ["S1,anna,a,b,a.wav,1"], "session,speaker,text,Text,audio,seconds"))
    tone(tmp_path / "a.wav")
    with pytest.raises(UserError, match="no column 'speaker'"):
        read_manifest(manifest(tmp_path, ["S1,two,a.wav,1"], "session,text,audio,seconds"))
    assert_refused("no recording of the split dev", from_manifest, manifest(tmp_path, ["S1,anna,two,a.wav,1.0,train"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Okay [laughs], that\u2019s the B-side, isn't it?", "okay that's the b side isn't it"),
        ("hello,world yes\u2014no wait...what and/or", "hello world yes no wait what and or"),
        ("one\ttwo\nthree\u00a0four", "one two three four"),
        ("hello] my [friend", "hello my friend"),
        ("the U.S. and 'quoted' 'em", "the us and quoted 'em"),
        ("It ends.I went 3.5 miles", "it ends i went 3 5 miles"),
        ("[laughs]", ""),
        ("so <noise> we (laughs) go {breath} on [x]", "so we go on"),
        ("nai\u0308ve cafe\u0301", "na\u00efve caf\u00e9"),  # decomposed, as macOS writes it
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "\u0939\u093f\u0928\u094d\u0926\u0940"),  # Hindi's vowels are marks
        ("co\u00adoperate", "cooperate"),
    ],
)
def test_words_of_a_transcript(text, words):
    assert plain_words(text) == words


@pytest.mark.parametrize("apostrophe", "'\u2019\u2018\u201b\u02bc\u02b9\u02bb\u2032\uff07\u00b4`")
def test_an_apostrophe_is_one_however_it_is_typed(apostrophe):
    assert plain_words(f"I don{apostrophe}t") == "i don't"


def test_tags_are_what_the_user_says(tmp_path):
    assert plain_words("(maybe) <noise> so", tags=["<>"]) == "maybe so"
    tone(tmp_path / "a.wav")
    rows = [f"S{k},anna,(maybe) <noise> so,a.wav,1.0,{split}" for k, split in enumerate(("train", "dev", "eval"))]
    assert from_manifest(manifest(tmp_path, rows), tags=["<>"]).grammar == ["maybe so"]
    assert_refused(r"data\.tags has '<', but each is a pair of brackets", SpeechDataModule, tags=["<"])


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    audio = tone(tmp_path / "a.wav", 3.0)
    rows = [
        Recording("S1, kitchen", 'anna "a"', "two", audio, 1.0, "dev", start=1.5),
        Recording("S2", "bert", "one two", audio, 0.5, "train"),
    ]
    write_manifest(tmp_path / "own.csv", rows)
    assert read_manifest(tmp_path / "own.csv") == rows
    write_manifest(tmp_path / "own.csv", rows[1:])
    assert (tmp_path / "own.csv").read_text().splitlines() == [
        "session,speaker,text,audio,seconds,split",
        "S2,bert,one two,a.wav,0.5000,train",
    ]


def test_a_manifest_names_audio_of_its_folder_unless_other_is_allowed(tmp_path):
    audio = tone(tmp_path / "a.wav")
    own = tmp_path / "own"
    own.mkdir()
    (own / "link.wav").symlink_to(audio)
    for name in ("../a.wav", str(audio), "link.wav"):
        file = manifest(own, [f"S1,anna,two,{name},1.0,train"])
        assert_refused(rf"line 2: {name} lies outside of {own}: .* --data\.outside true", read_manifest, file)
        (recording,) = read_manifest(file, outside=True)
        assert recording.audio.samefile(audio)


@pytest.mark.parametrize("rate", [8000, 11025, 44100, 48000])
def test_audio_of_another_rate_is_resampled_and_begins_where_it_should(tmp_path, rate):
    """A tone of 500 Hz in the second half of the file: its part alone is read, and is 500 Hz at 16 kHz."""
    t = np.arange(2 * rate) / rate
    soundfile.write(tmp_path / "a.wav", 0.1 * np.sin(1000 * np.pi * t) * (t >= 1), rate)
    heard = read_audio(Recording("S1", "anna", "two", tmp_path / "a.wav", 1.0, start=1.0))
    assert len(heard) == RATE
    wanted = 0.1 * np.sin(1000 * np.pi * np.arange(RATE) / RATE)
    np.testing.assert_allclose(heard[500:-500], wanted[500:-500], atol=2e-3)


@pytest.mark.parametrize("fault", ["missing", "text", "empty", "silent", "short", "cut", "number"])
def test_bad_audio_is_named_and_refused_or_skipped(tmp_path, fault):
    good, bad = tone(tmp_path / "good.wav"), tmp_path / "bad.wav"
    said = {"missing": "is not there", "text": "cannot be read", "empty": "cannot be read", "silent": "silence",
            "short": r"shorter than 0\.1 s", "cut": "holds 0.50 of 1.00 s", "number": "no numbers"}[fault]  # fmt: skip
    if fault == "missing":
        pass
    elif fault == "text":
        bad.write_text("this is no audio")
    elif fault == "empty":
        bad.write_bytes(b"")
    else:
        n = {"silent": RATE, "short": RATE // 20, "cut": RATE // 2, "number": RATE}[fault]
        samples = 0.1 * np.sin(np.arange(n)) * (fault != "silent")
        samples[0] = np.nan if fault == "number" else 0.0
        soundfile.write(bad, samples, RATE, subtype="FLOAT")
    seconds = 0.05 if fault == "short" else 1.0
    rows = [f"S1,anna,two,bad.wav,{seconds},train", "S1,anna,two,good.wav,1.0,train"]
    recordings = read_manifest(manifest(tmp_path, rows))
    assert_refused(rf"bad\.wav .*{said}.* --data\.on_error skip", list, readable(recordings, "refuse", []))
    skipped = []
    assert [r.audio for r, _ in readable(recordings, "skip", skipped)] == [good]
    assert "bad.wav" in skipped[0]
    assert "on_error" not in skipped[0]  # it has been set


def test_chime5s_published_layout(tmp_path):
    assert_refused("not CHiME-5", chime5, tmp_path)
    for split, session, speaker in (("train", "S03", "P09"), ("dev", "S02", "P05"), ("eval", "S01", "P01")):
        stereo = np.stack([np.sin(np.arange(4 * RATE) / 9), np.zeros(4 * RATE)], 1)
        (tmp_path / "audio" / split).mkdir(parents=True)
        soundfile.write(tmp_path / "audio" / split / f"{session}_{speaker}.wav", stereo, RATE)
        entries = [
            {"session_id": session, "speaker": speaker, "ref": "U01", "words": words,
             "start_time": {"U01": "0:00:09.00", "original": start}, "end_time": {"U01": "0:00:10.00", "original": end}}
            for words, start, end in (
                ("Turn it [noise] off.", "0:00:01.50", "0:00:02.75"),
                ("[redacted]", "0:00:02.80", "0:00:03.00"),
                ("[laughs]", "0:00:03.00", "0:00:03.50"),
            )
        ]  # fmt: skip
        (tmp_path / "transcriptions" / split).mkdir(parents=True)
        (tmp_path / "transcriptions" / split / f"{session}.json").write_text(json.dumps(entries))
    corpus = chime5(tmp_path)
    assert [(r.split, r.session, r.speaker, r.text) for r in corpus.recordings] == [
        ("train", "S03", "P09", "turn it off"),
        ("dev", "S02", "P05", "turn it off"),
        ("eval", "S01", "P01", "turn it off"),
    ]
    heard = read_audio(corpus.recordings[0])
    assert len(heard) == round(1.25 * RATE)
    np.testing.assert_allclose(heard, np.sin(np.arange(1.5 * RATE, 2.75 * RATE) / 9), atol=1e-3)  # left, from 1.5 s on

    transcription = tmp_path / "transcriptions" / "eval" / "S01.json"
    transcription.write_text(transcription.read_text().replace("P01", "/../../elsewhere"))
    assert_refused(r"S01\.json: the speaker '/\.\./\.\./elsewhere' is no part of a file's name", chime5, tmp_path)
