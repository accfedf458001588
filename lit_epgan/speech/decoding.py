"""From frames' scores to words and their errors: decoding graph, beam search, word error rate."""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed
from lit_epgan.speech.frames import Frames
from lit_epgan.speech.gmm import Mixtures
from lit_epgan.speech.packages import silenced, speech_package
from lit_epgan.speech.phones import SELF_LOOP_SCALE, Lexicon, PhoneModels

ORDER = 3


def grammar(lexicon: Lexicon, texts: Sequence[str]) -> Any:
    """G: an acceptor of words, weighted by a tri-gram model of ``texts`` with Kneser-Ney smoothing."""
    kaldifst, kaldilm = speech_package("kaldifst"), speech_package("kaldilm")
    with tempfile.TemporaryDirectory() as name, silenced():
        folder = Path(name)
        (folder / "text").write_text("\n".join(" ".join(lexicon.known(text)) for text in texts) + "\n")
        (folder / "words").write_text("".join(f"{word} {i}\n" for word, i in lexicon.words.items()))
        speech_package("kaldingram.train").main(
            ["--ngram-order", str(ORDER), "--text", str(folder / "text"), "--lm", str(folder / "arpa")]
        )
        text = kaldilm.arpa2fst(
            str(folder / "arpa"), disambig_symbol="#0", read_symbol_table=str(folder / "words"), max_order=ORDER
        )
    fst = kaldifst.compile(text, acceptor=False)
    kaldifst.arcsort(fst, "ilabel")
    return fst


def decoding_graph(lexicon: Lexicon, phones: PhoneModels, texts: Sequence[str]) -> Any:
    """HCLG of a tri-gram model of ``texts`` (Mohri, Pereira and Riley 2008), every operation Kaldi's own."""
    kaldifst, khg = speech_package("kaldifst"), speech_package("kaldi_hmm_gmm")
    words = kaldifst.compose(lexicon.transducer(disambiguated=True), grammar(lexicon, texts))
    kaldifst.determinize_star(words, use_log=True)
    kaldifst.minimize_encoded(words)
    in_context, labels = kaldifst.compose_context(lexicon.disambiguation, 1, 0, words)
    kaldifst.arcsort(in_context, "ilabel")
    states, hashes = khg.get_h_transducer(labels, phones.tree, phones.transitions, khg.HTransducerConfig(1.0))
    graph = kaldifst.compose(states, in_context)
    kaldifst.determinize_star(graph, use_log=True)
    _to_epsilon(graph, set(hashes))
    kaldifst.minimize_encoded(graph)
    return khg.add_self_loops(
        self_loop_scale=SELF_LOOP_SCALE, disambig_syms=[], reorder=True, trans_model=phones.transitions, ifst=graph
    )


def _to_epsilon(graph: Any, symbols: set[int]) -> None:
    """Let input ``symbols`` be epsilon, in place."""
    kaldifst = speech_package("kaldifst")
    for state in kaldifst.StateIterator(graph):
        arcs = [(arc.ilabel, arc.olabel, arc.weight.value, arc.nextstate) for arc in kaldifst.ArcIterator(graph, state)]
        if not any(arc[0] in symbols for arc in arcs):
            continue
        graph.delete_arcs(state, len(arcs))
        for phone, word, cost, target in arcs:
            graph.add_arc(state, kaldifst.StdArc(0 if phone in symbols else phone, word, cost, target))


@dataclass
class Decoder:
    """What stands between scores of HMM states and words.

    Attributes:
        graph: HCLG.
        phones, lexicon: what it is made of.
        log_prior: log p(pdf), (pdfs,), from how often each was aligned.
        beam, max_active: of the search; a poor model's scores are flat, and without a bound it would take minutes.
    """

    graph: Any
    phones: PhoneModels
    lexicon: Lexicon
    log_prior: NDArray[np.float64]
    beam: float = 9.0
    max_active: int = 600
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {number: word for word, number in self.lexicon.words.items()}
        khg = speech_package("kaldi_hmm_gmm")
        config = khg.LatticeFasterDecoderConfig(
            beam=self.beam, max_active=self.max_active, lattice_beam=2.0, determinize_lattice=False
        )
        self._decoder = khg.LatticeFasterDecoder(self.graph, config)

    def words(self, log_posteriors: NDArray, scale: float) -> str:
        """The best words of one utterance under a hybrid model, by log p(pdf | x), float (frames, pdfs), and a factor
        of the likelihoods, which the grammar's are weighed against. UserError: a posterior is no number.

        A network's posterior becomes a likelihood, up to a factor, by Bayes' rule (Bourlard and Morgan 1994): log p(x |
        pdf) = log p(pdf | x) - log p(pdf) + constant.
        """
        if np.isnan(log_posteriors).any():
            raise UserError("the network's posteriors are no numbers: its training has diverged; lower model.lr.")
        return self._best(self.phones.decodable((scale * (log_posteriors - self.log_prior)).astype(np.float32)))

    def words_of_mixtures(self, mixtures: Mixtures, cepstra: Frames, scale: float) -> str:
        """The best words of one utterance under Gaussian mixtures; its cepstra are (frames, 39)."""
        return self._best(mixtures.decodable(cepstra, self.phones, scale))

    def _best(self, decodable: Any) -> str:
        khg = speech_package("kaldi_hmm_gmm")
        found, _, words, _ = khg.decode_utterance_lattice_faster(
            self._decoder, decodable, self.phones.transitions, "", True
        )
        return " ".join(self._names[word] for word in words) if found else ""


def log_prior(alignments: Iterable[NDArray[np.int64]], pdfs: int) -> NDArray[np.float64]:
    """log p(pdf) (pdfs,) of all clients' alignments, each pdf seen once more than it was."""
    counts = np.ones(pdfs)
    for alignment in alignments:
        counts += np.bincount(alignment, minlength=pdfs)
    return np.log(counts / counts.sum())


@dataclass(frozen=True)
class WordErrors:
    """Counts of one utterance, or of many: words of the reference, and the edits of the cheapest way from it to the
    hypothesis."""

    words: int = 0
    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0

    def __add__(self, other: "WordErrors") -> "WordErrors":
        return WordErrors(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    @property
    def errors(self) -> int:
        """Substitutions, deletions and insertions together."""
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Word error rate in percent."""
        return 100 * self.errors / max(1, self.words)


def word_errors(reference: str, hypothesis: str) -> WordErrors:
    """The errors of one hypothesis (jiwer's counts)."""
    if not reference.split():
        return WordErrors(insertions=len(hypothesis.split()))
    counts = speech_package("jiwer").process_words(reference, hypothesis)
    return WordErrors(len(reference.split()), counts.substitutions, counts.deletions, counts.insertions)


def total(counts: Sequence[WordErrors]) -> WordErrors:
    return reduce(add, counts, WordErrors())


def interval(counts: Sequence[WordErrors], draws: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the word error rate in percent, over utterances (Bisani and Ney 2004).

    The same utterances give the same interval.
    """
    errors = np.array([each.errors for each in counts])
    words = np.array([each.words for each in counts])
    rng = np.random.default_rng(derive_seed("bootstrap", len(counts)))
    rows = rng.integers(len(counts), size=(draws, len(counts)))
    rates = 100 * errors[rows].sum(1) / np.maximum(1, words[rows].sum(1))
    low, high = np.quantile(rates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
