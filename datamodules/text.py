"""Text by user as a federation: sentences of words for a word model, single words for a character model.

The text is the documentation of Python's standard library, which everybody has, or Stack Overflow's.
"""

import ast
import re
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.datamodules.tff_files import TFFFile
from lit_epgan.lib.bounds import at_least, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.symbols import ByteSymbols, WordSymbols, most_frequent

Sentence = Sequence[str]  # tokens
LEVELS = ("words", "characters")
LEFT_OUT = {"site-packages", "test", "tests"}  # folders
FEWEST = 3  # words of a sentence
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
TOKENS = "tokens"  # the feature that has a sentence, its tokens separated by spaces


class TokenSequences(BatchDataset):
    """Sequences of numbers, each between the symbols that begin and end it, cut after ``longest`` symbols between them;
    the end of one that was cut is left out. A batch is as long as its longest sequence. The end is repeated up to
    there, where the mask is False."""

    def __init__(self, sequences: Sequence[Sequence[int]], begin: int, end: int, longest: int) -> None:
        rows = [[begin, *sequence[:longest], *([end] if len(sequence) <= longest else [])] for sequence in sequences]
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        width = int(self.lengths.max()) if rows else 0
        filled = [row + [end] * (width - len(row)) for row in rows]
        self.symbols = torch.tensor(filled, dtype=torch.int64).view(len(rows), width)

    def __len__(self) -> int:
        return len(self.symbols)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sequence, int64 (T,), and its mask, bool (T,), T the data set's longest."""
        symbols = self.symbols[index]
        return symbols, torch.arange(len(symbols)) < self.lengths[index]

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: [symbols, int64 (b, T), mask, bool (b, T)], T the batch's longest."""
        lengths = self.lengths[indices]
        longest = int(lengths.max())
        return [self.symbols[indices, :longest], torch.arange(longest) < lengths[:, None]]


class Text(TokenSequences):
    """One user's sentences: as the numbers that a model learns from (``TokenSequences``), and as the words that they
    are, of which those in the vocabulary have a number of their own.

    Attributes:
        users: where the text is that of several users, which is public, how many sentences each has, one after another.
    """

    def __init__(self, sentences: Sequence[Sentence], vocabulary: WordSymbols, *sequences: Any) -> None:
        super().__init__(*sequences)
        self.sentences, self.vocabulary = sentences, vocabulary
        self.users: Sequence[int] = ()


class TextDataModule(FederatedDataModule):
    """Users and their sentences, from ``users()`` of a subclass.

    Some users are held out. They take part in nothing, their text counts as public, and the vocabulary is made of it.
    ``words`` gives each sentence as numbers of words. ``characters`` gives each word outside the vocabulary as bytes,
    which is what the paper's character model learns (Augenstein et al. 2020, section 5). ``joined`` is the fault of the
    same section: the first two tokens of a sentence become one.

    Args:
        level: ``words`` or ``characters``.
        clients: how many users train; None for all that are not held out.
        held_out_users: whose sentences are the validation and test data.
        vocabulary: size of the vocabulary.
        longest: words of a sentence, or bytes of a word, that are kept.
        joined: share of the clients' sentences whose first two tokens are joined; of those held out none are.
        split_seed: decides who is held out, who trains, and which sentences are joined.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        symbols: what the numbers mean; known once the data are loaded.
        sentences: each client's, as it has them; known once the data are loaded.
    """

    def __init__(
        self,
        level: Literal["words", "characters"] = "words",
        clients: int | None = None,
        held_out_users: int = 70,
        vocabulary: int = 2000,
        longest: int = 20,
        joined: float = 0.0,
        split_seed: int = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        if level not in LEVELS:
            raise UserError(f"data.level is {level!r}; it must be one of {', '.join(LEVELS)}")
        at_least(1, "data", clients=clients, held_out_users=held_out_users, vocabulary=vocabulary, longest=longest)
        within("[0, 1]", "data", joined=joined)
        self.level, self.clients_wanted, self.held_out_users = level, clients, held_out_users
        self.vocabulary, self.longest, self.joined, self.split_seed = vocabulary, longest, joined, split_seed
        self.symbols: WordSymbols | ByteSymbols | None = None
        self.sentences: dict[str, list[Sentence]] = {}

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        raise NotImplementedError

    def load(self) -> ClientData:
        """Hold some users out, make the vocabulary of their text, and number what the others wrote. UserError: there
        are fewer users than are asked for."""
        everybody = self.users()
        wanted = self.clients_wanted or max(1, len(everybody) - self.held_out_users)
        if wanted + self.held_out_users > len(everybody):
            raise UserError(
                f"{wanted} clients and {self.held_out_users} held-out users are more than the {len(everybody)} users "
                "there are: lower data.clients or data.held_out_users"
            )
        names = sorted(everybody)
        order = torch.randperm(len(names), generator=generator_for(self.split_seed, "held out")).tolist()
        held_out = [names[k] for k in order[: self.held_out_users]]
        chosen = sorted(names[k] for k in order[self.held_out_users : self.held_out_users + wanted])
        public = [sentence for name in held_out for sentence in everybody[name]]
        words = WordSymbols(most_frequent(public, self.vocabulary))
        self.sentences = {
            name: with_joined(everybody[name], self.joined, generator_for(self.split_seed, name, "joined"))
            for name in chosen
        }
        self.symbols = words if self.level == "words" else ByteSymbols()
        evaluated = self._sequences(public, words)
        evaluated.users = [len(everybody[name]) for name in held_out]
        train = {name: self._sequences(own, words) for name, own in self.sentences.items()}
        return ClientData(train=train, val=evaluated, test=evaluated)

    def _sequences(self, sentences: Sequence[Sentence], words: WordSymbols) -> Text:
        symbols = self.symbols
        assert symbols is not None
        if isinstance(symbols, ByteSymbols):
            numbers = [symbols.encode(word) for sentence in sentences for word in sentence if word not in words]
        else:
            numbers = [symbols.encode(sentence) for sentence in sentences]
        return Text(sentences, words, numbers, len(symbols) - 2, len(symbols) - 1, self.longest)


def with_joined(sentences: Sequence[Sentence], share: float, generator: torch.Generator) -> list[Sentence]:
    """The same sentences, a ``share`` of which, drawn one by one, have their first two tokens joined by a space."""
    hit = (torch.rand(len(sentences), generator=generator) < share).tolist()
    return [joined(sentence) if fault else sentence for sentence, fault in zip(sentences, hit, strict=True)]


def joined(sentence: Sentence) -> Sentence:
    """The sentence, its first two tokens joined by a space."""
    return sentence if len(sentence) < 2 else [f"{sentence[0]} {sentence[1]}", *sentence[2:]]


class DocstringsDataModule(TextDataModule):
    """The documentation strings of the standard library of the Python that runs: every module is a user.

    The modules are read as text and never imported. How many users and sentences there are depends on the Python:
    3.11.7 has 705 users with 22,327 sentences and 398,496 tokens, half of the users 9 sentences or fewer.

    Args:
        library: another folder of Python files, a user each, in the standard library's place.
        text: settings of ``TextDataModule`` and of ``FederatedDataModule``.
    """

    def __init__(self, library: str | None = None, **text: Any) -> None:
        super().__init__(**text)
        self.library = library

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        """Every module's sentences, by its path in the library. UserError: there are none, as where a Python came
        without its library's source."""
        return docstrings(Path(self.library or sysconfig.get_paths()["stdlib"]).expanduser())


@cache
def docstrings(library: Path) -> dict[str, list[Sentence]]:
    """Sentences of the documentation strings below a folder, by the file's path in it, as lower-case tokens.

    A sentence ends at its full stop, question or exclamation mark, or at an empty line, and has at least 3 words. A
    token is a word of letters and apostrophes, or any other character. UserError: there are none.
    """
    users = {}
    for path in sorted(library.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(library).parts) and (found := sentences(_read(path))):
            users[path.relative_to(library).as_posix()] = found
    if not users:
        raise UserError(f"there is no documented Python file below {library}: give another folder as data.library")
    return users


def sentences(source: str) -> list[Sentence]:
    """The sentences of the documentation strings of Python source; none where it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # files that test the parser, and null bytes
        return []
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    parts = [part for text in texts for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    return [tokens(part) for part in parts if len(part.split()) >= FEWEST]


def tokens(sentence: str) -> Sentence:
    """Lower-case words of letters and apostrophes, and every other character that is no space."""
    return re.findall(r"[a-z']+|[^\sa-z]", sentence.lower())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


class StackOverflowDataModule(TextDataModule):
    """Questions and answers of users, a sentence an example (Augenstein et al. 2020, appendix B.1).

    There are 342,477 users with 136 million sentences. So a number of users is drawn, and of each the first sentences
    are read. Those held out are drawn from the same file.

    Args:
        path: ``stackoverflow_train.h5`` (needs the extra ``hdf5``) or ``stackoverflow.sqlite``, unpacked.
        clients: how many users train.
        sentences_per_user: that are read, at most.
        text: settings of ``TextDataModule`` and of ``FederatedDataModule``.
    """

    def __init__(self, path: str, clients: int = 1000, sentences_per_user: int = 100, **text: Any) -> None:
        super().__init__(clients=clients, **text)
        at_least(1, "data", sentences_per_user=sentences_per_user)
        self.path, self.sentences_per_user = path, sentences_per_user

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        """The sentences of as many users as are needed, drawn from the file. UserError: there is no such file, it is
        not laid out so, or h5py is needed and missing."""
        file = TFFFile(self.path)
        names = file.clients()
        order = torch.randperm(len(names), generator=generator_for(self.split_seed, "users")).tolist()
        wanted = (self.clients_wanted or 0) + self.held_out_users
        chosen = [names[k] for k in order[:wanted]]
        texts = file.texts(chosen, TOKENS, self.sentences_per_user)
        return {name: [text.split() for text in own] for name, own in texts.items()}
