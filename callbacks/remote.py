"""A fit as one end of a federation of several processes: the server's, or an institution's."""

from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from lit_epgan.callbacks.remote_drivers import InstitutionDriver, ServerDriver
from lit_epgan.callbacks.round_driver import RoundDriver
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import Federation, Mechanism, Sampler, Seat
from lit_epgan.errors import UserError
from lit_epgan.remote.clients import RemoteClients
from lit_epgan.remote.contributions import Contributions
from lit_epgan.remote.gate import Gate
from lit_epgan.remote.link import Place, place
from lit_epgan.remote.policy import Policy
from lit_epgan.remote.server import RemoteServer
from lit_epgan.runs.yaml_files import load_yaml

STARTING = 120.0  # seconds that a server may take to start
CONTRIBUTIONS = "contributions.csv"  # in the server's folder: who contributed when
SENT = "sent.csv"  # in an institution's folder: what has left it


class Alone:
    """One job holds the server and all clients."""

    holds_server = holds_clients = True

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """Let the data module draw the rounds' clients."""
        datamodule.federate(sampler, trains)

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """What drives the rounds."""
        return RoundDriver(federation, seat, datamodule)

    def check(self, algorithm: str, mechanism: Mechanism | None) -> None:
        """Refuse a training that this end does not allow, before it begins."""

    @property
    def ended(self) -> bool:
        """Whether another process has ended the fit."""
        return False

    def end(self) -> None:
        """The fit is over."""


class AtServer(Alone):
    """The server's process: no client works here."""

    holds_clients = False

    def __init__(self, where: Place, folder: Path) -> None:
        self._where, self._folder, self._listener = where, folder, where.listener()
        self._clients: RemoteClients | None = None

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """No client's batches are read here."""
        datamodule.federate(sampler, trains, lambda round_: False)

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """One that asks the institutions, once all of them are there."""
        terms = self._where.terms
        self._clients = RemoteClients(self._listener, federation.names, terms.patience, terms.largest)
        self._clients.meet(federation.active)
        contributions = Contributions(self._folder / CONTRIBUTIONS)
        return ServerDriver(federation, seat, datamodule, self._clients, terms.least, contributions)

    def end(self) -> None:
        """Let the institutions go."""
        if self._clients is not None:
            self._clients.end()


class AtInstitution(Alone):
    """An institution's process: one client works here, when the server asks it."""

    holds_server = False

    def __init__(self, where: Place, names: Sequence[str], folder: Path, policy: str | None) -> None:
        if where.name not in names:
            raise UserError(f"the institution {where.name!r} is none of the federation's clients: {', '.join(names)}")
        gate = Gate(_policy(policy), folder / SENT, where.terms.dry)
        self._server = RemoteServer(where.called(STARTING), where.name, list(names).index(where.name), gate)

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """The server says when this client's batches are read."""
        datamodule.federate(AskedByServer(self._server), trains, self._server.trains)

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """One whose rounds are the server's."""
        return InstitutionDriver(federation, seat, datamodule, self._server)

    def check(self, algorithm: str, mechanism: Mechanism | None) -> None:
        """Refuse what the institution's policy does not allow.

        Raises:
            UserError: naming the rule.
        """
        name = None if mechanism is None else type(mechanism).__name__
        own = None if mechanism is None else mechanism.own_epsilon()
        self._server.gate.policy.check_plan(algorithm, name, own)

    @property
    def ended(self) -> bool:
        """Whether the server has said that there are no more rounds."""
        return self._server.ended

    def end(self) -> None:
        """The server knows: it has counted the rounds, or will miss this institution."""
        self._server.link.close()


def _policy(path: str | None) -> Policy:
    """The policy in a file; without one everything is allowed."""
    if path is None:
        return Policy()
    try:
        return Policy.of(load_yaml(Path(path)), path)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"the policy {path} cannot be read: {str(error).splitlines()[0]}") from error


def this_end(names: Sequence[str], folder: Path, policy: str | None = None) -> Alone:
    """This process's end of the federation.

    Args:
        names: the clients'.
        folder: the run's.
        policy: an institution's, a file.
    """
    where = place()
    if where is None:
        return Alone()
    return AtServer(where, folder) if where.role == "server" else AtInstitution(where, names, folder, policy)


class AskedByServer(Sampler):
    """The one client of an institution, in every round."""

    def __init__(self, server: RemoteServer) -> None:
        self._server = server

    def draw(self, clients: Sequence[int], seed: int, round_: int) -> list[list[int]]:
        """This client."""
        return [[self._server.client]]

    def rate(self, clients: int) -> float:
        """1: whoever is drawn less often pays for no less."""
        return 1.0
