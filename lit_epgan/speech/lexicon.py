"""Words and how they are pronounced: CMUdict, its symbols and its transducer."""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from lit_epgan.errors import UserError
from lit_epgan.speech.packages import speech_package

SILENCE, UNKNOWN = "SIL", "SPN"  # phones of silence and of words without a pronunciation
UNKNOWN_WORD = "<unk>"
SPOKEN = "AA AE AH AO AW AY B CH D DH EH ER EY F G HH IH IY JH K L M N NG OW OY P R S SH T TH UH UW V W Y Z ZH"
PHONES = (SILENCE, UNKNOWN, *SPOKEN.split())
Pronunciation = tuple[str, ...]


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
        """L: from phones to words, with silence of probability 1/2 before, between and after words.

        Args:
            disambiguated: with the symbols #1, #2, ... behind homophones and prefixes, and loops of #0 that let the
                grammar's back-off arcs pass.
        """
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

    Raises:
        UserError: CMUdict has none of them.
    """
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
