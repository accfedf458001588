"""A server and four institutions, each a thread with a socket of its own, under secure aggregation."""

import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.carriers.protocol import Endpoint, FederateSettings
from lit_epgan.carriers.remote_server import RemoteRound, RemoteServer
from lit_epgan.carriers.secure_aggregation import Masking
from lit_epgan.engine import Federation, Round
from lit_epgan.engine.private import PrivateStates
from lit_epgan.fit.ends import AtSecureServer
from tests.pipe_federations import half

NAMES = [f"client-{k}" for k in range(4)]
LARGEST = 100_000


class Tapped:
    """A link, and all that was sent over it."""

    def __init__(self, link: Any, sent: list[bytes]) -> None:
        self._link, self._sent = link, sent
        self.recv_bytes, self.close = link.recv_bytes, link.close

    def send_bytes(self, data: bytes) -> None:
        self._sent.append(data)
        self._link.send_bytes(data)


class Institution(Thread):
    """Works for the server until its end; where its masking breaks the link, it calls again.

    Attributes:
        sent: every message, in bytes.
        error: why it has ended early.
    """

    def __init__(self, at: Endpoint, name: str, k: int, masking: Masking, folder: Path) -> None:
        super().__init__(daemon=True)
        self._at, self._k, self._masking, self._folder = at, k, masking, folder
        self._federation = half(name)
        self.sent: list[bytes] = []
        self.error: Exception | None = None

    def run(self) -> None:
        federation, states, ended = self._federation, PrivateStates(), False
        while not ended and self.error is None:
            link: Any = Tapped(self._at.called(10.0), self.sent)
            gate = ReportFilter(Policy(), self._folder / f"{NAMES[self._k]}.csv")
            server = RemoteServer(link, NAMES[self._k], self._k, gate, masking=self._masking)
            try:
                self._work(federation, server, states)
                ended = True
            except ConnectionResetError:
                states.abandon()
            except Exception as error:
                self.error = error
            link.close()

    @torch.no_grad()
    def _work(self, federation: Any, server: RemoteServer, states: PrivateStates) -> None:
        number = 0
        while not server.ended:
            federation.model.optimizers.round_begins()
            round_ = RemoteRound(server, states, number)
            while round_.exchange is not None:
                for k in list(round_.asked):
                    private = states.take_up(NAMES[k])
                    round_.receive(k, federation.answer(round_.task(k), private))
                round_.close()
            number += 1


class Secure:
    """The server's end.

    Args:
        folder: for what institutions list, and who contributed.
        name: of the federation; see ``half``.
        maskings: of some clients, another Masking.
        changes: what is done to the server's side before the first round.
    """

    def __init__(
        self,
        folder: Path,
        name: str = "fedavg",
        maskings: Mapping[int, Callable[..., Masking]] | None = None,
        changes: Callable[[Federation], None] = lambda federation: None,
    ) -> None:
        terms = FederateSettings(patience=60.0, gather=60.0, largest=LARGEST, secure=True)
        at = Endpoint("server", str(folder / secrets.token_hex(4)), secrets.token_hex(16), terms=terms)
        self.server = AtSecureServer(at, folder, {})
        kinds = {k: (maskings or {}).get(k, Masking) for k in range(4)}
        self.institutions = [Institution(at, name, k, kinds[k](NAMES[k], NAMES), folder) for k in range(4)]
        self.plain, self.folder = half(name), folder
        for each in self.institutions:  # all have drawn their modules' first weights from the one global stream
            each.start()
        changes(self.plain.federation)
        self.server.begin(self.plain.federation, self.plain.runner, SimpleNamespace(max_epochs=None))  # type: ignore[arg-type]
        assert self.server._clients is not None
        self.clients = self.server._clients

    @property
    def parameters(self) -> Tensor:
        return self.plain.server.parameters

    @torch.no_grad()
    def round(self, number: int, here: Collection[int] = range(4)) -> None:
        """One round, once these clients have called."""
        self.clients.meet(here)
        round_ = Round(self.plain.federation, number)
        self.server.run(round_, lambda _: [], lambda client: None)
        self.budget = round_.budget

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.clients.end()
        for each in self.institutions:
            each.join(10.0)


@torch.no_grad()
def without_masks(rounds: Mapping[int, Collection[int]], name: str = "fedavg") -> Tensor:
    """The server's parameters after rounds in which these clients have counted, in one process."""
    federation = half(name)
    for number, counted in rounds.items():
        federation.model.optimizers.round_begins()
        round_ = Round(federation.federation, number)
        while round_.exchange is not None:
            for k in list(round_.asked):
                if k not in counted:
                    round_.leave_out(k, "it is not to count")
                    continue
                private = federation.federation.private.take_up(NAMES[k])
                round_.receive(k, federation.answer(round_.task(k, private.delivered), private))
            round_.close()
        federation.model.load_server(federation.server.parameters)
    return federation.server.parameters
