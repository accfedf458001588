"""What a language model reads: words by their place in a vocabulary, or the bytes of a word, as numbers.

The last two of all symbols are those that begin and end a sequence, whatever the others are.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lit_epgan.lib.errors import UserError

BYTES = 256
UNKNOWN = "UNK"  # a word outside the vocabulary, in text that a model has made


@dataclass(frozen=True)
class WordSymbols:
    """Words of a vocabulary, the word at place k with the number k, one symbol for all others, and the two that begin
    and end a sentence."""

    words: tuple[str, ...]
    _places: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(set(self.words)) < len(self.words):
            raise UserError("a vocabulary has a word twice")
        object.__setattr__(self, "_places", {word: place for place, word in enumerate(self.words)})

    def __len__(self) -> int:
        return len(self.words) + 3

    def __contains__(self, word: str) -> bool:
        return word in self._places

    @property
    def unknown(self) -> int:
        """The number of every word outside the vocabulary."""
        return len(self.words)

    def encode(self, sentence: Sequence[str]) -> list[int]:
        """A sentence's numbers, without those of its ends."""
        return [self._places.get(word, self.unknown) for word in sentence]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """The words of numbers below those of a sentence's ends."""
        return [self.words[number] if number < self.unknown else UNKNOWN for number in numbers]


@dataclass(frozen=True)
class ByteSymbols:
    """The 256 bytes of UTF-8, and two symbols that begin and end a word: 258 (Augenstein et al. 2020, appendix B.2)."""

    def __len__(self) -> int:
        return BYTES + 2

    def encode(self, word: str) -> list[int]:
        """A word's bytes, without the symbols of its ends."""
        return list(word.encode())

    def decode(self, numbers: Iterable[int]) -> str:
        """The word of bytes; what is no UTF-8 becomes the replacement character."""
        return bytes(numbers).decode(errors="replace")


def most_frequent(sentences: Iterable[Sequence[str]], count: int) -> tuple[str, ...]:
    """The ``count`` most frequent words, in alphabetical order where they are as frequent."""
    counts = Counter(word for sentence in sentences for word in sentence)
    return tuple(sorted(counts, key=lambda word: (-counts[word], word))[:count])
