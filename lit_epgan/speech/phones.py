"""Words, phones and their hidden Markov models: CMUdict, its transducer, and Kaldi's phone models."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_epgan.lib.errors import UserError
from lit_epgan.speech.packages import speech_package

SILENCE, UNKNOWN = "SIL", "SPN"  # phones of silence and of words without a pronunciation
UNKNOWN_WORD = "<unk>"
SPOKEN = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
PHONES = (SILENCE, UNKNOWN, *SPOKEN.split())
Pronunciation = tuple[str, ...]
STATES = 3  # of a phone
PDFS = STATES * len(PHONES)
SELF_LOOP_SCALE = 0.1  # of the log probabilities of staying in a state, while aligning and decoding; Kaldi's recipes'


@dataclass(frozen=True)
class Lexicon:
    """Pronunciations of a vocabulary, with the numbers of its words and phones.

    The phones are CMUdict's 39, silence and unknown, whatever the words, so that there are always as many HMM states.

    Attributes:
        entries: word and phones, a row for every pronunciation, without disambiguation symbols.
        words, phones: number of each symbol; 0 is epsilon.
    """

    entries: list[tuple[str, Pronunciation]]
    words: dict[str, int] = field(init=False)
    phones: dict[str, int] = field(init=False)
    _marked: list[tuple[str, Pronunciation]] = field(init=False)

    def __post_init__(self) -> None:
        count = Counter(phones for _, phones in self.entries)
        prefixes = {phones[:i] for _, phones in self.entries for i in range(1, len(phones))}
        used: Counter[Pronunciation] = Counter()
        marked = []
        for word, phones in self.entries:
            if count[phones] > 1 or phones in prefixes:  # else the graph could not be made deterministic
                used[phones] += 1
                marked.append((word, (*phones, f"#{used[phones]}")))
            else:
                marked.append((word, phones))
        hashes = [f"#{i}" for i in range(max(used.values(), default=0) + 1)]
        vocabulary = sorted({word for word, _ in self.entries})
        object.__setattr__(self, "_marked", marked)
        object.__setattr__(self, "phones", {p: i for i, p in enumerate(("<eps>", *PHONES, *hashes))})
        object.__setattr__(self, "words", {w: i for i, w in enumerate(("<eps>", *vocabulary, "#0", "<s>", "</s>"))})

    @property
    def disambiguation(self) -> list[int]:
        """Numbers of the phones #0, #1, ..."""
        return [number for phone, number in self.phones.items() if phone.startswith("#")]

    def known(self, text: str) -> list[str]:
        """The words of a text, those without a pronunciation as ``<unk>``."""
        return [word if word in self.words else UNKNOWN_WORD for word in text.split()]

    def numbers(self, text: str) -> list[int]:
        """The numbers of a text's words."""
        return [self.words[word] for word in self.known(text)]

    def transducer(self, disambiguated: bool) -> Any:
        """L: from phones to words, with silence of probability 1/2 before, between and after words. ``disambiguated``:
        with the symbols #1, #2, ... behind homophones and prefixes, and loops of #0 that let the grammar's back-off
        arcs pass."""
        kaldifst = speech_package("kaldifst")
        fst = kaldifst.StdVectorFst()
        begin, hub, pause = fst.add_state(), fst.add_state(), fst.add_state()
        fst.start = begin
        fst.set_final(hub, 0.0)
        half = math.log(2.0)

        def arc(source: int, phone: int, word: int, cost: float, target: int) -> None:
            fst.add_arc(source, kaldifst.StdArc(phone, word, cost, target))

        arc(begin, 0, 0, half, hub)
        arc(begin, 0, 0, half, pause)
        arc(pause, self.phones[SILENCE], 0, 0.0, hub)
        for word, phones in self._marked if disambiguated else self.entries:
            state, output = hub, self.words[word]
            for phone in phones[:-1]:
                following = fst.add_state()
                arc(state, self.phones[phone], output, 0.0, following)
                state, output = following, 0
            arc(state, self.phones[phones[-1]], output, half, hub)
            arc(state, self.phones[phones[-1]], output, half, pause)
        if disambiguated:
            kaldifst.add_self_loops(fst, [self.phones["#0"]], [self.words["#0"]])
        kaldifst.arcsort(fst, "olabel")
        return fst


def lexicon(words: Iterable[str]) -> Lexicon:
    """The pronunciations of ``words``; those that CMUdict lacks are left out, and stand as ``<unk>`` in a text.
    UserError: CMUdict has none of them."""
    known = cmudict()
    entries = [(word, phones) for word in sorted(set(words)) for phones in known.get(word, [])]
    if not entries:
        raise UserError("CMUdict has none of the corpus' words: its texts must be English words in lower case.")
    return Lexicon([*entries, (UNKNOWN_WORD, (UNKNOWN,))])


@lru_cache(maxsize=1)
def cmudict() -> dict[str, list[Pronunciation]]:
    """All pronunciations of CMUdict's 134,000 words, as pocketsphinx brings them along."""
    path = Path(speech_package("pocketsphinx").get_model_path()) / "en-us" / "cmudict-en-us.dict"
    entries: dict[str, list[Pronunciation]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        word, *phones = line.split()
        entries.setdefault(re.sub(r"\(\d+\)$", "", word), []).append(tuple(phones))
    return entries


@dataclass
class PhoneModels:
    """Three states from left to right for each phone, each with a probability density (pdf) of its own: Kaldi's map
    from phone and state to pdf, its transition model, and how often each transition was taken when they were learnt."""

    tree: Any
    transitions: Any
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def pdfs(self) -> NDArray[np.int64]:
        """The pdf of transition 1, 2, ...; transitions number from 1."""
        count = self.transitions.num_transition_ids
        return np.array([self.transitions.transition_id_to_pdf(t) for t in range(1, count + 1)])

    def learn(self, counts: NDArray[np.float64]) -> None:
        """Transition probabilities from how often each transition was taken (number of transitions + 1,)."""
        self.counts = counts
        self.transitions.mle_update(counts, speech_package("kaldi_hmm_gmm").MleTransitionUpdateConfig())

    def decodable(self, scores: NDArray[np.float32]) -> Any:
        """What Kaldi's decoders read: log scores (frames, pdfs) of every frame under every pdf."""
        columns = np.ascontiguousarray(scores[:, self.pdfs], dtype=np.float32)
        return speech_package("kaldi_hmm_gmm").DecodableCtc(columns)  # reads column transition - 1


def phone_models() -> PhoneModels:
    """Phone models with the initial probabilities of a loop, 3/4."""
    khg = speech_package("kaldi_hmm_gmm")
    states = " ".join(
        f"<State> {i} <PdfClass> {i} <Transition> {i} 0.75 <Transition> {i + 1} 0.25 </State>" for i in range(STATES)
    )
    phones = " ".join(str(i) for i in range(1, len(PHONES) + 1))
    topology = khg.HmmTopology()
    topology.read(
        f"<Topology> <TopologyEntry> <ForPhones> {phones} </ForPhones> {states} "
        f"<State> {STATES} </State> </TopologyEntry> </Topology>"
    )
    tree = khg.monophone_context_dependency(topology.phones, topology.get_phone_to_num_pdf_classes())
    return PhoneModels(tree, khg.TransitionModel(tree, topology))
