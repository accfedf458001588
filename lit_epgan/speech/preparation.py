"""From recordings to what is trained and decoded: features, alignments, decoding graph; each kept, none made twice."""

import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.speech.corpora import Corpus, OnError, Recording, readable
from lit_epgan.speech.decoding import Decoder, WordErrors, decoding_graph, log_prior, word_errors
from lit_epgan.speech.frames import Frames, cepstra, log_mel, normalise
from lit_epgan.speech.gmm import AlignedClient, Mixtures, train_mixtures, training_graphs
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.phones import PDFS, Lexicon, PhoneModels, lexicon, phone_models
from lit_epgan.speech.sessions import Split
from lit_epgan.speech.stages import Stages, digest_of_file, digest_of_result

UNALIGNED = -100  # what cross-entropy leaves out
FINAL_BEAM = 20.0


@dataclass(frozen=True)
class Utterance:
    """An utterance, ready: log-mel features (frames, 40), normalised by speaker, and the HMM state of each frame, int64
    (frames,); ``UNALIGNED`` throughout where no path was found."""

    recording: Recording
    mel: Tensor
    pdfs: Tensor


@dataclass(frozen=True)
class Prepared:
    """A corpus, ready: utterances of each split, by session, what leads from scores to words, the mixtures that aligned
    it, a sentence for everything that was left out, and how often each word without a pronunciation is said."""

    utterances: dict[Split, dict[str, list[Utterance]]]
    decoder: Decoder
    mixtures: Mixtures
    skipped: list[str]
    unknown: Counter[str]

    def errors_of_mixtures(self, split: Split, scale: float) -> list[WordErrors]:
        """The errors of decoding every utterance of a split with the Gaussian mixtures, at an acoustic scale."""
        errors = []
        for own in self.utterances[split].values():
            spoken = _cepstra([u.mel for u in own], [u.recording for u in own])
            for utterance, x in zip(own, spoken, strict=True):
                hypothesis = self.decoder.words_of_mixtures(self.mixtures, x, scale)
                errors.append(word_errors(utterance.recording.text, hypothesis))
        return errors


def prepare(
    corpus: Corpus,
    stages: Stages,
    iterations: int = 24,
    gaussians: int = 1000,
    on_error: OnError = "refuse",
    workers: int = 1,
) -> Prepared:
    """Features, alignments and decoding graph of a corpus, made now by so many processes or kept from before in
    ``stages``; ``iterations`` and ``gaussians`` are ``gmm.train_mixtures``'s. UserError: audio that cannot be used and
    is not skipped, or a session that has none; no word has a pronunciation."""
    sessions: dict[tuple[Split, str], list[Recording]] = {}
    for each in corpus.recordings:
        sessions.setdefault((each.split, each.session), []).append(each)
    folders = _feature_folders(list(sessions.values()), stages, on_error, workers)
    loaded = {key: _read_features(folder, sessions[key]) for key, folder in zip(sessions, folders, strict=True)}
    skipped = [sentence for _, _, sentences in loaded.values() for sentence in sentences]
    words = lexicon({w for each in corpus.recordings for w in each.text.split()})
    texts = {f"{split} {name}": [r.text for r in kept] for (split, name), (kept, _, _) in loaded.items()}
    came_from = [[digest_of_result(folder) for folder in folders], texts, iterations, gaussians]
    features = {" ".join(key): (own, mel, key[0] == "train") for key, (own, mel, _) in loaded.items()}
    alignment = stages.result(
        "alignment-2", came_from, lambda folder: _align(features, words, iterations, gaussians, folder)
    )
    phones, mixtures = _read_models(alignment)
    vocabulary = lexicon(corpus.words)
    came_from = [digest_of_result(alignment), corpus.words, corpus.grammar]
    graph = stages.result(
        "graph-1",
        came_from,
        lambda folder: decoding_graph(vocabulary, phones, corpus.grammar).write(str(folder / "HCLG.fst")),
    )
    pdfs = torch.load(alignment / "pdfs.pt", weights_only=True)
    utterances: dict[Split, dict[str, list[Utterance]]] = {"train": {}, "dev": {}, "eval": {}}
    for (split, name), (kept, mel, _) in loaded.items():
        own = pdfs[f"{split} {name}"].long().split([len(x) for x in mel])
        rows = zip(kept, mel, own, strict=True)
        utterances[split][name] = [Utterance(recording, x, pdf) for recording, x, pdf in rows]
    trained = [u.pdfs.numpy() for own in utterances["train"].values() for u in own if u.pdfs[0] != UNALIGNED]
    fst = speech_package("kaldifst").StdVectorFst.read(str(graph / "HCLG.fst"))
    decoder = Decoder(fst, phones, vocabulary, log_prior(trained, PDFS))
    failed = [u.recording for own in utterances["train"].values() for u in own if u.pdfs[0] == UNALIGNED]
    skipped += [f"{each.audio}: no alignment of {each.text!r} was found" for each in failed]
    unknown = Counter(w for each in corpus.recordings for w in each.text.split() if w not in words.words)
    return Prepared(utterances, decoder, mixtures, skipped, unknown)


def _feature_folders(
    sessions: Sequence[list[Recording]], stages: Stages, on_error: OnError, workers: int
) -> list[Path]:
    if workers <= 1:
        return [_features_of(own, stages, on_error) for own in sessions]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_features_of, sessions, [stages] * len(sessions), [on_error] * len(sessions)))


def _features_of(recordings: list[Recording], stages: Stages, on_error: OnError) -> Path:
    files = {each.audio: digest_of_file(each.audio) for each in recordings if each.audio.is_file()}
    rows = [[r.speaker, files.get(r.audio, "missing"), r.start, r.seconds] for r in recordings]
    return stages.result("features-1", [rows, on_error], lambda folder: _write_features(recordings, on_error, folder))


def _write_features(recordings: list[Recording], on_error: OnError, folder: Path) -> None:
    skipped: list[str] = []
    number = {id(each): row for row, each in enumerate(recordings)}
    computed = [(number[id(r)], r.speaker, log_mel(samples)) for r, samples in readable(recordings, on_error, skipped)]
    if not computed:
        raise UserError(f"session {recordings[0].session} is empty: {skipped[0]}")
    mel = normalise([x for _, _, x in computed], [speaker for _, speaker, _ in computed])
    tensors = {
        "rows": torch.tensor([row for row, _, _ in computed]),
        "frames": torch.tensor([len(x) for x in mel]),
        "mel": torch.from_numpy(np.concatenate(mel)),
    }
    torch.save(tensors, folder / "features.pt")
    write_text(folder / "skipped.json", json.dumps(skipped))


def _read_features(folder: Path, recordings: list[Recording]) -> tuple[list[Recording], list[Tensor], list[str]]:
    tensors = torch.load(folder / "features.pt", weights_only=True)
    kept = [recordings[row] for row in tensors["rows"].tolist()]
    skipped: list[str] = json.loads((folder / "skipped.json").read_text(encoding="utf-8"))
    return kept, list(tensors["mel"].split(tensors["frames"].tolist())), skipped


def _align(features: dict[str, tuple[list[Recording], list[Tensor], bool]], words: Lexicon, iterations: int,
           gaussians: int, folder: Path) -> None:  # fmt: skip
    """Train on the training sessions, each a client; align all of them under the final model."""
    phones = phone_models()
    clients: dict[str, AlignedClient] = {}
    for name, (recordings, mel, _) in features.items():
        graphs = training_graphs(words, phones, [r.text for r in recordings])
        clients[name] = AlignedClient(_cepstra(mel, recordings), graphs)
    training = [client for name, client in clients.items() if features[name][2]]
    mixtures = train_mixtures(training, phones, iterations, gaussians)
    for client in clients.values():
        client.alignments = []
        client.align(mixtures, phones, FINAL_BEAM)
    torch.save({name: _pdfs(client, phones) for name, client in clients.items()}, folder / "pdfs.pt")
    torch.save(mixtures.state() | {"transitions": torch.from_numpy(phones.counts)}, folder / "models.pt")


def _cepstra(mel: list[Tensor], recordings: list[Recording]) -> list[Frames]:
    """The cepstra (frames, 39) of a session, normalised by speaker."""
    return normalise([cepstra(x.numpy()) for x in mel], [each.speaker for each in recordings])


def _pdfs(client: AlignedClient, phones: PhoneModels) -> Tensor:
    """The HMM states (frames,) of all of a client's utterances, one after another."""
    parts = [
        phones.pdfs[np.array(path) - 1] if path else np.full(len(x), UNALIGNED)
        for path, x in zip(client.alignments, client.cepstra, strict=True)
    ]
    return torch.from_numpy(np.concatenate(parts)).to(torch.int16)


def _read_models(folder: Path) -> tuple[PhoneModels, Mixtures]:
    state: dict[str, Any] = torch.load(folder / "models.pt", weights_only=True)
    phones = phone_models()
    phones.learn(state.pop("transitions").numpy())
    return phones, Mixtures.from_state(state)
