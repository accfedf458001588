"""What a client's one release protects, and so what it consists of: its single records, or the client as one user."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from lit_epgan.embedding import EmbeddingFactor, GaussianMechanism
from lit_epgan.embedding.factor import clipped
from lit_epgan.engine import Client, Message, merged
from lit_epgan.errors import UserError

Unit = Literal["record", "user"]
TOTAL, OWN = "embedding", "embedding"


class Release(Message):
    """A client's release as it is sent.

    Attributes:
        embedding: of single records their count and sums (1 + D,), of a user the embedding (D,).
        members: 1 of a user.
    """

    embedding: Tensor | None = merged("sum", default=None)
    members: float | None = merged("records", default=None)


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

    def report(self, released: Tensor) -> Release:
        """What is sent of a release (1 + D,): all of it."""
        return Release(embedding=released)

    def sum_of(self, releases: Release) -> Tensor:
        """The sum (1 + D,) of the clients' releases."""
        assert releases.embedding is not None
        return releases.embedding

    def weight(self, client: Client) -> float:
        """What the client counts in the sum: n_k."""
        return client.records


class UserUnit:
    """(1, mu_k min(1, 1 / ||mu_k||)) of a client that is one user, mu_k = 1/n_k sum_i phi(x_i), exactly.

    The user moves the sum of mu_k by 1 at most. The noise is that of the federation's mechanism, as ``CentralNoise`` at
    a bound of 1; the divisor is the number of users who were asked, which is public.
    """

    def of(self, client: Client, factor: Callable[[], EmbeddingFactor]) -> Tensor:
        """The release (1 + D,) of the client's factor. Being exact, it is not kept."""
        mean = clipped(factor().mean)
        return torch.cat([mean.new_ones(1), mean])

    def report(self, released: Tensor) -> Release:
        """What is sent of a release (1 + D,): the embedding (D,), and that it is one user's."""
        return Release(embedding=released[1:], members=1.0)

    def sum_of(self, releases: Release) -> Tensor:
        """The sum (1 + D,) of the clients' releases."""
        embedding, members = releases.embedding, releases.members
        assert embedding is not None
        return torch.cat([members.to(embedding), embedding])  # type: ignore[union-attr]

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
