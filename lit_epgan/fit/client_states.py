"""Where clients' private states from round to round are kept: in memory, or in files beside the checkpoints."""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects, rank, ranks
from lit_epgan.engine.private import Private, PrivateStates
from lit_epgan.lib import tensor_file
from lit_epgan.lib.atomic import flush_to_disk
from lit_epgan.lib.errors import UserError


class StatesOnDisk(PrivateStates):
    """Every client's private state, as a file for each round in which it changed; no file is changed once it counts.

    A checkpoint holds the number of each client's file, so that neither its size nor its time grows with what clients
    keep. A file that is superseded stays until neither the last checkpoint nor the one before it refers to it.

    Args:
        folder: where to; every run has a folder of its own in it. On several ranks they share it.
        names: all clients' names.

    Attributes:
        rounds: finished so far.
        files: by client that keeps anything, the round that its file is of.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        super().__init__()
        self._parent, self._index = folder, {name: k for k, name in enumerate(names)}
        self._run = gather_objects(secrets.token_hex(4))[0]  # of no random stream
        self._device = torch.device("cpu")
        self.rounds = 0
        self.files: dict[str, int] = {}
        self._asked: dict[str, bool] = {}  # who has proposed, and whether there is a file of it
        self._forgotten: list[tuple[int, str, str]] = []  # since which round, submodule, attribute
        self._superseded: list[tuple[int, Path]] = []  # since which round
        self._unflushed: list[Path] = []
        self._saved = 0  # rounds in the checkpoint that was asked for last
        self._written = 0  # rounds in the checkpoint that was written last

    @property
    def folder(self) -> Path:
        """The folder of this run's files."""
        return self._parent / self._run

    def _path(self, client: str, round_: int) -> Path:
        return self.folder / f"{self._index[client]}.{round_}.pt"

    def _read(self, client: str, round_: int) -> Private:
        state = Private(**tensor_file.load(self._path(client, round_), sealed=True)).on(self._device)
        for since, path, name in self._forgotten:
            if round_ < since:
                state.attributes.get(path, {}).pop(name, None)
        return state

    def _write(self, client: str, state: Private) -> None:
        path = self._path(client, self.rounds)
        # a view of something larger would be written with all of it
        own = {
            name: {k: v.clone() if isinstance(v, Tensor) else v for k, v in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in vars(state).items()
        }
        tensor_file.save(own, path)
        self._unflushed.append(path)

    def _kept(self, client: str) -> Private:
        return self._read(client, self.files[client]) if client in self.files else Private()

    # A round ----------------------------------------------------------------------------------------------------------

    def take_up(self, client: str) -> Private:
        """A client's private state, read from its file."""
        if client in self._asked:
            return self._read(client, self.rounds) if self._asked[client] else Private()
        return self._kept(client)

    def propose(self, client: str, state: Private) -> None:
        """Write what the client keeps if the round is finished."""
        self._asked[client] = state.holds_anything
        if state.holds_anything:
            self._write(client, state)

    def forget(self, client: str, state: Private | None = None) -> None:
        """The client's round does not count; what it has released stays released."""
        if state is None and self._asked.get(client):
            state = self._read(client, self.rounds)
        if self._asked.pop(client, False):
            self._path(client, self.rounds).unlink(missing_ok=True)
        if state is not None and state.released:
            self._write(client, replace(self._kept(client), released=state.released))
            self._counts(client, True)

    def forget_attribute(self, path: str, name: str) -> None:
        """An attribute is no client's own any more: it is left out of files written before."""
        self._forgotten.append((self.rounds, path, name))

    def commit(self) -> None:
        """The round is finished: its files count."""
        for client, holds in self._asked.items():
            self._counts(client, holds)
        self._asked = {}
        self.rounds += 1

    def _counts(self, client: str, holds: bool) -> None:
        before = self.files.pop(client, self.rounds)
        if before != self.rounds:
            self._superseded.append((self.rounds, self._path(client, before)))
        if holds:
            self.files[client] = self.rounds

    def abandon(self) -> None:
        """The round is cut off."""
        for client in list(self._asked):
            self.forget(client)

    # Checkpoints ------------------------------------------------------------------------------------------------------

    def _own(self) -> dict[str, int]:
        return {name: of for name, of in self.files.items() if self._index[name] % ranks() == rank()}

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The numbers of the clients' files; the disk holds all of these when this returns."""
        for path in [p for p in self._unflushed if p.exists()]:
            flush_to_disk(path)
        if self._unflushed:
            flush_to_disk(self.folder)
        self._unflushed = []
        self._saved = self.rounds
        return dict(self.files), {"run": self._run, "rounds": self.rounds, "forgotten": list(self._forgotten)}

    def load(self, clients: Mapping[str, Any], common: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what a checkpoint holds; states that it holds itself are written to files.

        Raises:
            UserError: a file is not there.
        """
        self._device = device
        if not common:
            for name, state in clients.items():
                if self._index[name] % ranks() == rank():
                    self._write(name, Private(**state))
                    self.files[name] = self.rounds
            self.rounds += 1
            return
        self._run, self.rounds, self.files = common["run"], common["rounds"], dict(clients)
        self._forgotten = [(since, path, name) for since, path, name in common["forgotten"]]
        self._saved = self._written = self.rounds
        there = set(os.listdir(self.folder)) if self.folder.is_dir() else set()
        for name, of in self._own().items():
            if (path := self._path(name, of)).name not in there:
                raise UserError(
                    f"client {name!r} keeps its state in {path}, which is not there: copy the folder {self.folder} "
                    "beside the checkpoint's run, and resume from last.ckpt or previous.ckpt, whose files are kept"
                )
        self._tidy(there)

    def _tidy(self, there: set[str]) -> None:
        """What an earlier process has left and this checkpoint does not refer to is superseded.

        Files of rounds that are to be repeated stay: a later checkpoint may refer to them, and they are written alike.
        """
        of_client = {k: self.files.get(name, -1) for name, k in self._index.items() if k % ranks() == rank()}
        for path in (self.folder / name for name in there if name.endswith(".pt") and name[0] != "."):
            k, of = map(int, path.stem.split("."))
            if k in of_client and of != of_client[k] and of < self.rounds:
                self._superseded.append((max(of_client[k], of + 1), path))

    def checkpointed(self) -> None:
        """Remove the files that neither the checkpoint asked for last nor the one before it refers to."""
        before, self._written = self._written, self._saved
        for path in [path for since, path in self._superseded if since < before]:
            path.unlink(missing_ok=True)
        self._superseded = [(since, path) for since, path in self._superseded if since >= before]
        if before and rank() == 0:
            for other in self._parent.iterdir():
                if other.is_dir() and len(other.name) == len(self._run) and other.name != self._run:
                    shutil.rmtree(other, ignore_errors=True)


PrivateStatesPlace = Literal["memory", "disk"]
FOLDER = "private_states"


def check_place(trainer: Trainer, place: PrivateStatesPlace, simulated: bool, personal: bool) -> None:
    """Refuse a place that does not exist, or that nobody would tidy.

    Args:
        trainer: of the fit.
        place: as FederationCallback's ``private_states``.
        simulated: whether one job holds all clients.
        personal: whether clients keep layers or buffers of their own, which a checkpoint must hold to be evaluated.

    Raises:
        UserError: as said.
    """
    if place not in ("memory", "disk"):
        raise UserError(f"FederationCallback's private_states is {place!r}; choose memory or disk")
    if place == "disk" and not simulated:
        raise UserError("private_states: disk is for simulations; an institution's state is one, so choose memory")
    if place == "disk" and personal:
        raise UserError(
            "private_states: disk leaves personal layers and buffers out of the checkpoints, which could not be "
            "evaluated then: choose memory, or leave local and local buffers out"
        )
    if place == "disk" and _checkpoints(trainer) is None:
        raise UserError(
            "private_states: disk keeps the states beside the checkpoints that refer to them: add RoundCheckpoint() to "
            "the Trainer's callbacks"
        )


def private_states(trainer: Trainer, place: PrivateStatesPlace, names: list[str]) -> PrivateStates:
    """The clients' states at their place.

    Args:
        trainer: whose RoundCheckpoint says where the disk's place is, and when a checkpoint is written.
        place: as FederationCallback's ``private_states``.
        names: all clients' names.
    """
    checkpoints = _checkpoints(trainer)
    if checkpoints is None:
        return PrivateStates()
    on_disk = place == "disk"
    states = StatesOnDisk(checkpoints.folder(trainer) / FOLDER, names) if on_disk else PrivateStates()
    checkpoints.on_saved = states.checkpointed
    return states


def _checkpoints(trainer: Trainer) -> Any:
    """The callback that writes a checkpoint a round, and says when it is written: RoundCheckpoint."""
    return next((c for c in trainer.callbacks if hasattr(c, "on_saved")), None)  # type: ignore[attr-defined]
