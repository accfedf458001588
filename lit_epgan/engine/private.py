"""What clients keep from round to round."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects
from lit_epgan.lib.errors import UserError

LARGE = 100e6  # bytes in a checkpoint, of what all clients keep


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

    @property
    def holds_anything(self) -> bool:
        """Whether there is anything to keep."""
        return any(vars(self).values())

    def copy(self) -> "Private":
        """The same, which work may change."""
        algorithm = {name: value.clone() for name, value in self.algorithm.items()}
        return replace(self, algorithm=algorithm, released=dict(self.released), delivered=dict(self.delivered))

    @property
    def nbytes(self) -> int:
        """How many bytes its tensors take."""
        return _nbytes(vars(self))

    def on(self, device: torch.device) -> "Private":
        """The same with its tensors on a device; optimizers' states move when they are taken up."""
        return Private(**{name: _moved(value, device) for name, value in vars(self).items()})


class PrivateStates:
    """Every client's private state, in memory.

    What clients learn in a round is proposed, and becomes theirs when the round is finished: an update that is
    dropped, or a round that is cut off, leaves no trace.
    """

    def __init__(self) -> None:
        self.clients: dict[str, Private] = {}
        self._proposed: dict[str, Private] = {}
        self._trained: set[str] = set()
        self._told = False

    def take_up(self, client: str) -> Private:
        """A client's private state, as a copy that may be changed; within a round, as its last exchange left it."""
        return (self._proposed.get(client) or self.clients.get(client, Private())).copy()

    def personal(self, client: str) -> dict[str, Tensor]:
        """A client's personal layers by name; empty before its first round."""
        return self.clients.get(client, Private()).personal

    def share_personal(self) -> None:
        """Let every rank know all clients' personal layers, each from the rank that trained it: others' may be old."""
        trained = {n: s.personal for n, s in self.clients.items() if n in self._trained}
        for rank_states in gather_objects(trained):
            for name, personal in rank_states.items():
                self.clients.setdefault(name, Private()).personal = personal

    def propose(self, client: str, state: Private) -> None:
        """What the client keeps if the round is finished."""
        self._proposed[client] = state

    def forget(self, client: str, state: Private | None = None) -> None:
        """The client's round does not count; what it has released stays released."""
        state = state or self._proposed.get(client)
        self._proposed.pop(client, None)
        if state is not None and state.released:
            self.clients.setdefault(client, Private()).released = state.released

    def forget_attribute(self, path: str, name: str) -> None:
        """An attribute of the module's submodule at ``path`` is no client's own any more."""
        for private in self.clients.values():
            private.attributes.get(path, {}).pop(name, None)

    def commit(self) -> None:
        """Make what clients have proposed theirs: the round has counted."""
        self._trained.update(self._proposed)
        for name, state in self._proposed.items():
            self.clients.pop(name, None)
            if state.holds_anything:
                self.clients[name] = state
        self._proposed = {}

    def abandon(self) -> None:
        """The round is cut off."""
        for client in list(self._proposed):
            self.forget(client)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a checkpoint holds: by client, and of all together."""
        return {name: vars(state).copy() for name, state in self.clients.items()}, {}

    def load(self, clients: Mapping[str, Any], common: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what a checkpoint holds.

        Args:
            clients, common: as ``saved`` gave them, over all ranks.
            device: where clients work.

        Raises:
            UserError: the states are in files, and this run holds them in memory.
        """
        if common:
            raise UserError(
                "the checkpoint's clients keep their states on disk: resume with private_states: disk, as the run was "
                "started with"
            )
        self.clients = {name: Private(**state).on(device) for name, state in clients.items()}

    def checkpointed(self) -> None:
        """The checkpoint that ``saved`` was asked for last is written: once that is much, say what spares it."""
        if self._told or len(self.clients) < 2 or any(state.personal for state in self.clients.values()):
            return  # an institution has one state, and a checkpoint must hold personal layers
        size = sum(state.nbytes for state in self.clients.values())
        self._told = size > LARGE
        if self._told:
            warnings.warn(
                f"every checkpoint writes what {len(self.clients):,} clients keep, {size / 1e6:,.0f} MB by now, also "
                "of those at rest: private_states: disk keeps it out of checkpoints and memory",
                stacklevel=2,
            )


def _moved(value: Any, device: torch.device) -> Any:
    tensors = isinstance(value, dict) and all(isinstance(v, Tensor) for v in value.values())
    return {k: v.to(device) for k, v in value.items()} if tensors else value


def _nbytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return sum(map(_nbytes, value.values())) if isinstance(value, Mapping) else 0
