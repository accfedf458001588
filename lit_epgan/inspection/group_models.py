"""A GAN or a character model of each group: how its selected examples train it, and how its samples are shown."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lit_epgan.datamodules.text import Text, TokenSequences
from lit_epgan.federated.drift.server_optimizers import FedAvgM
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.inspection.federated_generator import FederatedGenerator, examples_taken, nothing
from lit_epgan.inspection.image_view import picture
from lit_epgan.inspection.release import image_statistics
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.user_records import Records
from lit_epgan.inspection.view import Panel, Users
from lit_epgan.inspection.words_view import as_text, joined_share, visible, word_records
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, isolated
from lit_epgan.lib.symbols import ByteSymbols
from lit_epgan.lib.text import printable
from lit_epgan.modules import GAN, LanguageModel, UniformPrior

SYMBOLS = ByteSymbols()


class FederatedGAN(FederatedGenerator):
    """A GAN for each group, trained by DP-FedAvg-GAN (Augenstein et al. 2020, algorithm 1) on the selected examples.

    ``FederatedGenerator`` says what one user can move, and has the settings that are not named here.

    Args:
        gan: the module; every group starts with a copy.
        rounds: of training.
        bound: S, the largest norm of a discriminator's change.
        noise_multiplier: z; give it or ``target_epsilon``.
        server_steps: of the generator in a round.
        local_steps: of a user in a round, at most, in one pass over the selected examples.
        batch_size: of all steps.
        samples: images that are shown of each group.

    Raises:
        UserError: a number is out of its range, or the GAN keeps what a private run cannot.
    """

    kind, reported, method = "GAN", "discriminator", "DP-FedAvg-GAN"
    server = "The generators are trained on the server against these discriminators, and see no image."
    reading = "The lower pictures are samples of a generator that never saw an image of theirs."
    skips_refused = True  # a GAN of few users would show nothing

    def __init__(
        self,
        gan: GAN,
        rounds: int,
        bound: float,
        noise_multiplier: float | None = None,
        *,
        server_steps: int = 6,
        local_steps: int = 6,
        batch_size: int = 32,
        samples: int = 100,
        **price: Any,
    ) -> None:
        _check_gan(gan)
        own = {"local_steps": local_steps, "batch_size": batch_size, "samples": samples}
        super().__init__(gan, FedAvgGAN(server_steps, batch_size), rounds, bound, noise_multiplier, **own, **price)
        self.gan = gan

    def check_users(self, private: Mapping[str, Dataset]) -> None:
        """Refuse images of another shape than the GAN's, too; it is public."""
        super().check_users(private)
        made = tuple(self.gan.sample(1, generator_for("shape")).shape[1:])
        shape = next((tuple(own[0][0].shape) for own in private.values() if len(own)), made)  # type: ignore[arg-type]
        if made != shape:
            raise UserError(f"generator.gan makes images {made}, and the users' are {shape}: give it that shape")

    def selected(self, users: Users, seed: int) -> dict[str, list[Tensor]]:
        found = selected_images(users.records(), users.selection, seed)
        none = next(iter(found.values()))[0][:0]  # of users after the last block that has a record
        return {name: own + [none] * (len(users.private) - len(own)) for name, own in found.items()}

    def batch(self, own: Tensor, rows: Tensor) -> list[Tensor]:
        return [own[rows]]

    def loss(self, module: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        return turn_loss(module, batch)

    def optimizer(self, module: GAN) -> torch.optim.Optimizer:
        """The generator's, with the discriminator's parameters beside its own, at their own learning rate.

        A network whose turn it is not has no gradient, so a step leaves it as it is.
        """
        optimizers = module.configure_optimizers()
        assert isinstance(optimizers, list)
        for group in optimizers[1].param_groups:
            optimizers[0].add_param_group(group)
        return optimizers[0]

    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.gan.discriminator.parameters())

    def shown(self, panel: Panel, module: GAN) -> Panel:
        made = module.sample(self.samples, generator_for("samples"))
        lines = ["samples of the group's GAN"]
        lines += [f"{each.title} {float(each.of(made).mean()):+.2f}" for each in image_statistics(0.0)]
        return replace(panel, samples=picture(made), made=lines)

    def kept(self, module: GAN) -> dict[str, Tensor]:
        return module.generator.state_dict()


def turn_loss(gan: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """The loss () of the network whose turn it is, on real images (n, *shape); 0 of a user that has nothing to tell."""
    assert isinstance(gan, GAN)
    (player,) = gan.turns
    return gan.player_loss(player, batch) if len(batch[0]) else nothing(getattr(gan, player))


def _check_gan(gan: GAN) -> None:
    """A user outside a group must report exact zeros, and whatever a Trainer would do between steps is not done."""
    kept = {
        "average": (gan.average is None, "null"),
        "lr_decay": (gan.lr_decay is None, "null"),
        "r1": (gan.r1 == 0, "0"),
        "noise": (gan.noise == 0, "0"),
        "optimizer": (gan.optimizer in ("sgd", "adam"), "sgd or adam"),
        "prior": (type(gan.prior) is UniformPrior, "null"),
    }
    for name, (fits, wanted) in kept.items():
        if not fits:
            raise UserError(f"generator.gan.{name} must be {wanted} in an inspection")


def selected_images(users: Iterable[Records], selection: Selection, seed: int) -> dict[str, list[Tensor]]:
    """Of each group, by name, the images (n, *shape) that each user trains on; n is 0 of a user outside."""
    found: dict[str, list[Tensor]] = {name: [] for name in selection.groups}
    for records, taken in examples_taken(users, selection, seed):
        for own, column in zip(found.values(), taken.unbind(1), strict=True):
            own += records.x[column].split(records.sums(column).long().tolist())
    return found


class FederatedLanguageModel(FederatedGenerator):
    """A model of a word's bytes for each group, trained by DP-FedAvg with server momentum on the selected words.

    It is the model of words outside the vocabulary of Augenstein et al. 2020, section 5, by algorithm 2 there.
    ``FederatedGenerator`` says what one user can move, and has the settings that are not named here.

    Args:
        model: of bytes; every group starts with a copy.
        rounds: of training.
        bound: S, the largest norm of a user's change.
        noise_multiplier: z; give it or ``target_epsilon``.
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
        *,
        local_steps: int = 8,
        batch_size: int = 16,
        momentum: float = 0.9,
        longest: int = 20,
        samples: int = 1000,
        listed: int = 40,
        **price: Any,
    ) -> None:
        at_least(1, "generator", longest=longest, listed=listed)
        if model.network.symbols != len(SYMBOLS):
            raise UserError(
                f"generator.model's network has {model.network.symbols} symbols, and bytes have {len(SYMBOLS)}: set "
                "its symbols to that"
            )
        _check_optimizer(model)
        own = {"local_steps": local_steps, "batch_size": batch_size, "samples": samples}
        super().__init__(model, FedAvgM(momentum=momentum), rounds, bound, noise_multiplier, **own, **price)
        self.model, self.longest, self.listed = model, longest, listed

    def check_users(self, private: Mapping[str, Dataset]) -> None:
        super().check_users(private)
        for own in private.values():
            if not isinstance(own, Text):
                raise UserError(
                    f"generator makes words, and a user's data are a {type(own).__name__}: give a data module of text, "
                    "or lit_epgan.inspection.FederatedGAN for images"
                )

    def selected(self, users: Users, seed: int) -> dict[str, list[TokenSequences]]:
        found = selected_words(map(as_text, users.private.values()), users.selection, seed)
        ends = len(SYMBOLS) - 2, len(SYMBOLS) - 1
        return {
            name: [TokenSequences(list(map(SYMBOLS.encode, words)), *ends, self.longest) for words in own]
            for name, own in found.items()
        }

    def batch(self, own: TokenSequences, rows: Tensor) -> list[Tensor]:
        return own.fetch(rows.tolist()) if len(rows) else [own.symbols, own.symbols.bool()]

    def loss(self, module: nn.Module, batch: list[Tensor]) -> Tensor:
        assert isinstance(module, LanguageModel)
        return module.training_step(batch, 0) if len(batch[0]) else nothing(module)

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


def selected_words(users: Iterable[Text], selection: Selection, seed: int) -> dict[str, list[list[str]]]:
    """Of each group, by name, the words that each user trains on, each as often as it is taken; none of one outside."""
    found: dict[str, list[list[str]]] = {name: [] for name in selection.groups}
    texts = list(users)
    for text, (_, taken) in zip(texts, examples_taken(map(word_records, texts), selection, seed), strict=True):
        words = [word for sentence in text.sentences for word in sentence]
        for own, column in zip(found.values(), taken.unbind(1), strict=True):
            own.append([words[k] for k in column.nonzero().flatten().tolist()])
    return found
