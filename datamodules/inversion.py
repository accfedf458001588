"""The fault of Augenstein et al. 2020, section 5: all images of some users have their pixels multiplied by -1."""

from collections.abc import Sequence

import torch

from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


def check_inverted(share: float) -> None:
    """Refuse what is no share of the users.

    Raises:
        UserError: ``share`` is not between 0 and 1.
    """
    if not 0 <= share <= 1:
        raise UserError(f"data.inverted is {share}; it is a share of the users, from 0 to 1")


def inverted_users(names: Sequence[str], share: float, seed: int) -> set[str]:
    """The ``share`` of the users whose pixels are inverted, drawn at random from ``seed``."""
    order = torch.randperm(len(names), generator=generator_for(seed, "inverted")).tolist()
    return {names[k] for k in order[: round(share * len(names))]}
