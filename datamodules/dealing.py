"""Users, dealt into those who take part and those held out."""

import torch

from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


def check_dealing(clients: int | None, held_out: float) -> None:
    """Refuse to deal nobody, or to hold out everybody.

    Args:
        clients: how many users are to take part; None for all that are left.
        held_out: share of all users who take part in nothing.

    Raises:
        UserError: ``clients`` is below 1, or ``held_out`` is not in [0, 1).
    """
    if clients is not None and clients < 1:
        raise UserError(f"data.clients is {clients}; it must be at least 1")
    if not 0 <= held_out < 1:
        raise UserError(f"data.held_out is {held_out}; it is a share of the users, from 0 to below 1")


def deal(names: list[str], held_out: float, clients: int | None, seed: int) -> tuple[list[str], list[str]]:
    """The names of those who take part, in their order, and of those held out.

    Raises:
        UserError: there are not as many users as are to take part.
    """
    order = [names[k] for k in torch.randperm(len(names), generator=generator_for(seed, "users")).tolist()]
    cut = round(held_out * len(names))
    others, left = order[:cut], order[cut:]
    if clients is not None and clients > len(left):
        raise UserError(
            f"data.clients is {clients}, but only {len(left)} users are left of {len(names)}: ask for fewer"
        )
    return sorted(left[:clients]), sorted(others)
