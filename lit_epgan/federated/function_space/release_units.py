"""What a client's one release protects, and so what it consists of: its single records, or the client as one user."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lit_epgan.embedding import EmbeddingFactor, GaussianMechanism
from lit_epgan.embedding.factor import clipped
from lit_epgan.engine import Client, Count, Report, Total
from lit_epgan.errors import UserError

Unit = Literal["record", "user"]
TOTAL, OWN, MEMBERS = "embedding", "embedding", "embedding.members"


class RecordUnit:
    """(n_k, sum_i phi(x_i)) of a client's n_k records, with noise of the client's own.

    Args:
        mechanism: adds the noise.
    """

    def __init__(self, mechanism: GaussianMechanism) -> None:
        self.mechanism = mechanism

    def of(self, client: Client, factor: Callable[[], EmbeddingFactor]) -> Tensor:
        """The release (1 + D,) of the client's factor: noised once; whoever asks again gets the same numbers."""
        if OWN not in client.released:
            client.released[OWN] = factor().released(self.mechanism, client.seed, client.index).statistics
        return client.released[OWN]

    def report(self, released: Tensor) -> Report:
        """What is sent of a release (1 + D,): all of it."""
        return {TOTAL: released}

    def take_from(self, total: Total) -> Tensor:
        """The sum (1 + D,) of the releases in an exchange's total, which is left without them."""
        return total.sums.pop(TOTAL)

    def weight(self, client: Client) -> float:
        """What the client counts in the sum: n_k."""
        return client.weight


class UserUnit:
    """(1, mu_k min(1, 1 / ||mu_k||)) of a client that is one user, mu_k = 1/n_k sum_i phi(x_i), exactly.

    The user moves the sum of mu_k by 1 at most. The noise is that of the federation's mechanism, as ``CentralNoise`` at
    a bound of 1; the divisor is the number of users who were asked, which is public.
    """

    def of(self, client: Client, factor: Callable[[], EmbeddingFactor]) -> Tensor:
        """The release (1 + D,) of the client's factor. Being exact, it is not kept."""
        mean = clipped(factor().mean)
        return torch.cat([mean.new_ones(1), mean])

    def report(self, released: Tensor) -> Report:
        """What is sent of a release (1 + D,): the embedding (D,), and that it is one user's."""
        return {TOTAL: released[1:], MEMBERS: Count(1.0, True)}

    def take_from(self, total: Total) -> Tensor:
        """The sum (1 + D,) of the releases in an exchange's total, which is left without them."""
        embedding = total.sums.pop(TOTAL)
        return torch.cat([total.sums.pop(MEMBERS).to(embedding), embedding])

    def weight(self, client: Client) -> float:
        """What the client counts in the sum: 1."""
        return 1.0


def unit_of(unit: Unit, mechanism: GaussianMechanism) -> RecordUnit | UserUnit:
    """The unit of that name.

    Raises:
        UserError: there is none, or a user is to be protected by the noise that a client adds for single records.
    """
    if unit == "record":
        return RecordUnit(mechanism)
    if unit != "user":
        raise UserError(f"unit is {unit!r}; a release protects a record or a user")
    if mechanism.noise_multiplier:
        raise UserError(
            f"noise_multiplier {mechanism.noise_multiplier:g} is noise that each client adds for its single records; "
            "for users leave it out and give the federation a mechanism: CentralNoise(bound=1.0, noise_multiplier=...)"
        )
    return UserUnit()
