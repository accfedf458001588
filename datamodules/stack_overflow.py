"""Stack Overflow by user, from the file that TensorFlow Federated publishes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lit_epgan.datamodules.text import Sentence, TextDataModule
from lit_epgan.datamodules.tff_files import TFFFile
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for

TOKENS = "tokens"  # the feature that has a sentence, its tokens separated by spaces


class StackOverflowDataModule(TextDataModule):
    """Questions and answers of users, a sentence an example (Augenstein et al. 2020, appendix B.1).

    There are 342,477 users with 136 million sentences. So a number of users is drawn, and of each the first sentences
    are read. Those held out are drawn from the same file.

    Args:
        path: ``stackoverflow_train.h5`` (needs the extra ``hdf5``) or ``stackoverflow.sqlite``, unpacked.
        clients: how many users train.
        sentences_per_user: that are read, at most.
        text: ``level``, ``held_out_users``, ``vocabulary``, ``longest``, ``joined`` and ``split_seed`` of
            TextDataModule, and what FederatedDataModule takes.

    Raises:
        UserError: a number is below 1.
    """

    def __init__(self, path: str, clients: int = 1000, sentences_per_user: int = 100, **text: Any) -> None:
        super().__init__(clients=clients, **text)
        if sentences_per_user < 1:
            raise UserError(f"data.sentences_per_user is {sentences_per_user}; it must be at least 1")
        self.path, self.sentences_per_user = path, sentences_per_user

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        """The sentences of as many users as are needed, drawn from the file.

        Raises:
            UserError: there is no such file, it is not laid out so, or h5py is needed and missing.
        """
        file = TFFFile(self.path)
        names = file.clients()
        order = torch.randperm(len(names), generator=generator_for(self.split_seed, "users")).tolist()
        wanted = (self.clients_wanted or 0) + self.held_out_users
        chosen = [names[k] for k in order[:wanted]]
        texts = file.texts(chosen, TOKENS, self.sentences_per_user)
        return {name: [text.split() for text in own] for name, own in texts.items()}
