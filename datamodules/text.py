"""Text by user as a federation: sentences of words for a word model, single words for a character model."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.token_sequences import TokenSequences
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for
from lit_epgan.symbols import ByteSymbols, WordSymbols, most_frequent

Sentence = Sequence[str]  # tokens
LEVELS = ("words", "characters")


class Text(TokenSequences):
    """One user's sentences: as the numbers that a model learns from, and as the words that they are.

    Args:
        sentences: tokens each.
        vocabulary: the words that have a number of their own.
        sequences: what ``TokenSequences`` takes.

    Attributes:
        sentences, vocabulary: see above.
    """

    def __init__(self, sentences: Sequence[Sentence], vocabulary: WordSymbols, *sequences: Any) -> None:
        super().__init__(*sequences)
        self.sentences, self.vocabulary = sentences, vocabulary


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
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``clients_per_round``, ``num_workers`` and
            ``seed`` of FederatedDataModule.

    Attributes:
        symbols: what the numbers mean; known once the data are loaded.
        sentences: each client's, as it has them; known once the data are loaded.

    Raises:
        UserError: a number is below 1, or ``joined`` is no share.
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
        for name, value in (("clients", clients), ("held_out_users", held_out_users), ("vocabulary", vocabulary),
                            ("longest", longest)):  # fmt: skip
            if value is not None and value < 1:
                raise UserError(f"data.{name} is {value}; it must be at least 1")
        if not 0 <= joined <= 1:
            raise UserError(f"data.joined is {joined}; it is a share of the sentences, from 0 to 1")
        self.level, self.clients_wanted, self.held_out_users = level, clients, held_out_users
        self.vocabulary, self.longest, self.joined, self.split_seed = vocabulary, longest, joined, split_seed
        self.symbols: WordSymbols | ByteSymbols | None = None
        self.sentences: dict[str, list[Sentence]] = {}

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        """Every user's sentences, by name."""
        raise NotImplementedError

    def load(self) -> ClientData:
        """Hold some users out, make the vocabulary of their text, and number what the others wrote.

        Raises:
            UserError: there are fewer users than are asked for.
        """
        everybody = self.users()
        wanted = (
            self.clients_wanted if self.clients_wanted is not None else max(1, len(everybody) - self.held_out_users)
        )
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
        self.sentences = {name: self._with_fault(name, everybody[name]) for name in chosen}
        self.symbols = words if self.level == "words" else ByteSymbols()
        evaluated = self._sequences(public, words)
        train = {name: self._sequences(own, words) for name, own in self.sentences.items()}
        return ClientData(train=train, val=evaluated, test=evaluated)

    def _with_fault(self, name: str, sentences: Sequence[Sentence]) -> list[Sentence]:
        return with_joined(sentences, self.joined, generator_for(self.split_seed, name, "joined"))

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
