"""What clients keep from round to round."""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor


@dataclass
class Private:
    """What one client keeps from round to round.

    Attributes:
        algorithm: the algorithm's tensors.
        released: what has been released once and for all, and may have left the client even if its round is forgotten.
        personal: its personal layers.
        optimizers: its optimizers' state, where clients keep theirs.
        attributes: what its training changed in the module's ordinary attributes.
        delivered: versions of the broadcast's entries that it has been sent and keeps.
    """

    algorithm: dict[str, Tensor] = field(default_factory=dict)
    released: dict[str, Tensor] = field(default_factory=dict)
    personal: dict[str, Tensor] = field(default_factory=dict)
    optimizers: dict[str, Any] | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    delivered: dict[str, int] = field(default_factory=dict)


class PrivateStates:
    """Every client's private state.

    What clients learn in a round is proposed, and becomes theirs when the round is finished: an update that is
    dropped, or a round that is cut off, leaves no trace.
    """

    def __init__(self) -> None:
        self.clients: dict[str, Private] = {}
        self._proposed: dict[str, Private] = {}

    def take_up(self, client: str) -> Private:
        """A client's private state, as a copy that may be changed; within a round, as its last exchange left it."""
        kept = self._proposed.get(client) or self.clients.get(client, Private())
        algorithm = {name: value.clone() for name, value in kept.algorithm.items()}
        return replace(kept, algorithm=algorithm, released=dict(kept.released), delivered=dict(kept.delivered))

    def personal(self, client: str) -> dict[str, Tensor]:
        """A client's personal layers."""
        return self.clients.get(client, Private()).personal

    def propose(self, client: str, state: Private) -> None:
        """What the client keeps if the round is finished."""
        self._proposed[client] = state

    def forget(self, client: str, state: Private | None = None) -> None:
        """The client's round does not count; what it has released stays released."""
        state = state or self._proposed.get(client)
        self._proposed.pop(client, None)
        if state is not None and state.released:
            self.clients.setdefault(client, Private()).released = state.released

    def commit(self) -> None:
        """The round is finished."""
        for name, state in self._proposed.items():
            self.clients.pop(name, None)
            if _holds_anything(state):
                self.clients[name] = state
        self._proposed = {}

    def abandon(self) -> None:
        """The round is cut off."""
        for client in list(self._proposed):
            self.forget(client)


def _holds_anything(state: Private) -> bool:
    return any(vars(state).values())
