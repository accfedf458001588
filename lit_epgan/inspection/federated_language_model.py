"""DP-FedAvg of a character model on a group's selected words, whose own words show what these are."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.datamodules.text import Text, TokenSequences
from lit_epgan.errors import UserError
from lit_epgan.federated.drift.server_optimizers import FedAvgM
from lit_epgan.inspection.federated_generator import FederatedGenerator, nothing
from lit_epgan.inspection.selected import selected_words
from lit_epgan.inspection.shown_words import visible
from lit_epgan.inspection.text import as_text
from lit_epgan.inspection.view import Panel, Users
from lit_epgan.inspection.words import joined_share
from lit_epgan.modules import LanguageModel
from lit_epgan.randomness import generator_for, isolated
from lit_epgan.symbols import ByteSymbols
from lit_epgan.text import printable

SYMBOLS = ByteSymbols()


class FederatedLanguageModel(FederatedGenerator):
    """A model of a word's bytes for each group, trained by DP-FedAvg with server momentum on the selected words.

    It is the model of words outside the vocabulary of Augenstein et al. 2020, section 5, by algorithm 2 there.
    ``FederatedGenerator`` says what one user can move.

    Args:
        model: of bytes; every group starts with a copy.
        rounds: of training.
        bound: S, the largest norm of a user's change.
        noise_multiplier: z; give it or ``target_epsilon``.
        target_epsilon: of all rounds of all groups together, at the price's delta; the smallest z is taken.
        users_per_round: drawn without replacement; null for everyone.
        users: how many there are, a public number; with ``users_per_round`` the price depends on it.
        local_steps: of a user in a round, at most, in one pass over the selected words.
        batch_size: of these, in words.
        momentum: of the server.
        longest: bytes of a word that are kept.
        samples: words that are made of each group, for the share of those that hold a space.
        listed: of these, different ones that are shown.

    Raises:
        UserError: a number is out of its range, or the model's symbols are not bytes.
    """

    kind, reported, method = "language model", "character model", "DP-FedAvg with server momentum"
    server = (
        "Words are made by the released models alone. One may be a user's, also one with a count below the threshold: "
        "the price covers that."
    )
    reading = (
        "The lower words are made byte by byte by a group's language model. How many hold a space depends on the noise "
        "in training, too, and on how well the model has learnt: the interval of their share leaves that out."
    )
    skips_refused = False  # it may show what words have in common of which each is rare

    def __init__(
        self,
        model: LanguageModel,
        rounds: int,
        bound: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        users_per_round: int | None = None,
        users: int | None = None,
        local_steps: int = 8,
        batch_size: int = 16,
        momentum: float = 0.9,
        longest: int = 20,
        samples: int = 1000,
        listed: int = 40,
    ) -> None:
        if min(longest, listed) < 1:
            raise UserError("generator.longest and generator.listed are at least 1")
        if model.network.symbols != len(SYMBOLS):
            raise UserError(
                f"generator.model's network has {model.network.symbols} symbols, and bytes have {len(SYMBOLS)}: set "
                "its symbols to that"
            )
        _check_optimizer(model)
        price = noise_multiplier, target_epsilon, users_per_round, users
        super().__init__(model, FedAvgM(momentum=momentum), rounds, bound, *price, local_steps, batch_size, samples)
        self.model, self.longest, self.listed = model, longest, listed

    def check_users(self, private: Mapping[str, Dataset]) -> None:
        """Refuse users whose number is another than was said, or whose data are no text; both are public.

        Args:
            private: each user's records, by name.

        Raises:
            UserError: naming what was said, and what it is.
        """
        super().check_users(private)
        for own in private.values():
            if not isinstance(own, Text):
                raise UserError(
                    f"generator makes words, and a user's data are a {type(own).__name__}: give a data module of text, "
                    "or lit_epgan.inspection.FederatedGAN for images"
                )

    def selected(self, users: Users, seed: int) -> dict[str, list[TokenSequences]]:
        """Words as bytes."""
        found = selected_words(map(as_text, users.private.values()), users.selection, seed)
        return {name: list(map(self._bytes, own)) for name, own in found.items()}

    def _bytes(self, words: list[str]) -> TokenSequences:
        return TokenSequences(list(map(SYMBOLS.encode, words)), len(SYMBOLS) - 2, len(SYMBOLS) - 1, self.longest)

    def batch(self, own: TokenSequences, rows: Tensor) -> list[Tensor]:
        """Symbols and their mask."""
        return own.fetch(rows.tolist()) if len(rows) else [own.symbols, own.symbols.bool()]

    def loss(self, module: nn.Module, batch: list[Tensor]) -> Tensor:
        """The cross-entropy of the next byte."""
        assert isinstance(module, LanguageModel)
        return module.training_step(batch, 0) if len(batch[0]) else nothing(module)

    def optimizer(self, module: LanguageModel) -> torch.optim.Optimizer:
        """The module's own."""
        return module.configure_optimizers()

    def numbers(self) -> int:
        """All of the model's."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def shown(self, panel: Panel, module: LanguageModel) -> Panel:
        """With different ones of the words that it makes, and the share of all that hold a space."""
        made = self._made(module)
        listed = [visible(printable(word)) for word in list(dict.fromkeys(made))[: self.listed]]
        share, before = joined_share(made), joined_share(self._made(self.model))
        lines = [
            "made by the group's language model",
            f"{share.joined} of {share.shown} words made hold a space: {share.percent}; the interval is that of making "
            "so few",
            f"of those made before training: {before.percent}",
        ]
        return replace(panel, made_words=listed, made=lines)

    def _made(self, model: LanguageModel) -> list[str]:
        drawn = model.sample(self.samples, self.longest, generator_for("samples"))
        return list(map(SYMBOLS.decode, drawn))

    def kept(self, module: LanguageModel) -> dict[str, Tensor]:
        """The model's."""
        return dict(module.state_dict())


def _check_optimizer(model: LanguageModel) -> None:
    """A user outside a group must report exact zeros."""
    tried = copy.deepcopy(model)
    optimizer = tried.configure_optimizers()
    with isolated():
        nothing(tried).backward()
        optimizer.step()
    if not all(map(torch.equal, model.parameters(), tried.parameters())):
        raise UserError(
            "generator.model's optimizer moves parameters whose gradient is zero, as weight decay does, and who has no "
            "word of a group would not report zeros: take one that does not, as torch.optim.SGD"
        )
