"""A fit as one end of a federation of several processes: the server's, or an institution's."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn

from lit_epgan import tensor_file
from lit_epgan.atomic import write_text
from lit_epgan.callbacks.remote_drivers import InstitutionDriver, ServerDriver
from lit_epgan.callbacks.round_driver import RoundDriver
from lit_epgan.callbacks.shared_seat import SharedSeat
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.elsewhere import place as take_place
from lit_epgan.engine import Federation, Mechanism, Sampler, Seat
from lit_epgan.engine.collectives import rank, ranks
from lit_epgan.errors import UserError
from lit_epgan.listing import few
from lit_epgan.remote.contributions import PAGE, Contributions, operator_page
from lit_epgan.remote.policy import Policy, ReportFilter
from lit_epgan.remote.protocol import Endpoint, endpoint
from lit_epgan.remote.remote_clients import RemoteClients, agreed
from lit_epgan.remote.remote_server import ListeningServer, RemoteServer, SharedLink
from lit_epgan.runs.checkpoints import LAST, PREVIOUS, fault
from lit_epgan.runs.yaml_files import load_yaml

if TYPE_CHECKING:
    from lit_epgan.remote.secure_aggregation import Masking  # needs a library of the extra ``flare``

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

    def go_back(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Let a checkpoint that is about to be gone on from be an earlier one, where others have no later one."""

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

    def __init__(self, where: Endpoint, folder: Path, settings: Mapping[str, str]) -> None:
        self._where, self._folder, self._listener = where, folder, where.listener()
        self._settings = agreed(settings)
        self._clients: RemoteClients | None = None
        self._rounds: int | None = None

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """No client's batches are read here."""
        datamodule.federate(sampler, trains, lambda round_: False)

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """One that asks the institutions, once all of them are there, or have been waited for."""
        terms = self._where.terms
        self._clients = clients = RemoteClients(
            self._listener, federation.names, terms.patience, terms.largest, self._settings
        )
        clients.meet(federation.active, terms.gather)
        missing = [federation.names[k] for k in federation.active if k not in clients.present]
        if missing:
            rank_zero_warn(f"{few(missing)} did not call within {terms.gather:g} seconds; the federation begins")
        contributions = Contributions(self._folder / CONTRIBUTIONS)
        trainer = datamodule.trainer
        self._rounds = trainer.max_epochs if trainer is not None else None
        driven = (seat, datamodule, clients, terms.least, contributions, self._show)
        if terms.secure:
            from lit_epgan.callbacks.secure_driver import SecureServerDriver  # needs a library of the extra ``flare``

            return SecureServerDriver(federation, terms.largest, *driven)
        return ServerDriver(federation, *driven)

    def _show(self, over: bool = False) -> None:
        """Write the operator's page anew."""
        write_text(
            self._folder / PAGE,
            operator_page(self._folder / CONTRIBUTIONS, self._folder.resolve().name, self._rounds, over),
        )

    def end(self) -> None:
        """Let the institutions go."""
        if self._clients is not None:
            self._clients.end()
            self._show(over=True)


class AtInstitution(Alone):
    """An institution's process: one client works here, when the server asks it."""

    holds_server = False

    def __init__(
        self, where: Endpoint, names: Sequence[str], folder: Path, policy: str | None, settings: Mapping[str, str]
    ) -> None:
        if where.name not in names:
            raise UserError(f"the institution {where.name!r} is none of the federation's clients: {', '.join(names)}")
        report_filter = ReportFilter(_policy(policy), folder / SENT, where.terms.dry)
        client, masking = list(names).index(where.name), _masking(where, names, report_filter.policy)
        link = where.called(STARTING) if rank() == 0 else None
        if ranks() > 1:
            kind, shared = RemoteServer if rank() == 0 else ListeningServer, SharedLink(link)
            self._server = kind(shared, where.name, client, report_filter, agreed(settings), masking)
        else:
            assert link is not None
            self._server = RemoteServer(link, where.name, client, report_filter, agreed(settings), masking)

    def federate(self, datamodule: FederatedDataModule, sampler: Sampler, trains: Callable[[int], bool]) -> None:
        """The server says when this client's batches are read."""
        datamodule.federate(AskedByServer(self._server), trains, self._server.trains)
        datamodule.one_seat = True

    def driver(self, federation: Federation, seat: Seat, datamodule: FederatedDataModule) -> RoundDriver:
        """One whose rounds are the server's."""
        shared = SharedSeat() if ranks() > 1 else None
        return InstitutionDriver(federation, seat, datamodule, self._server, shared)

    def go_back(self, checkpoint: dict[str, Any], path: Path) -> None:
        """An institution that is ahead of the server, which has lost a round, goes on from the checkpoint before.

        Args:
            checkpoint: what stands in the last one; what stands in the one before takes its place.
            path: of the last one.
        """
        round_, before = self._server.first(), path.with_name(PREVIOUS)
        if self.ended or checkpoint["epoch"] <= round_ or path.name != LAST or fault(before) is not None:
            return
        earlier = tensor_file.load(before)
        if earlier["epoch"] <= round_:
            rank_zero_warn(f"{path} is of a later round than {round_}, the server's: {before} is gone on from")
            checkpoint.clear()
            checkpoint.update(earlier)

    def check(self, algorithm: str, mechanism: Mechanism | None) -> None:
        """Refuse what the institution's policy does not allow, and noise that several ranks would add.

        Raises:
            UserError: naming the rule.
        """
        if mechanism is not None and mechanism.by_record and ranks() > 1:
            raise UserError(
                f"{type(mechanism).__name__} protects records on one rank, and trainer.devices is {ranks()} at this "
                "institution: set it to 1"
            )
        name = None if mechanism is None else type(mechanism).__name__
        own = None if mechanism is None else mechanism.own_epsilon()
        self._server.report_filter.policy.check_plan(algorithm, name, own)

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
    except OSError as error:
        raise UserError(f"the policy {path} cannot be read: {str(error).splitlines()[0]}") from error


def _masking(where: Endpoint, names: Sequence[str], policy: Policy) -> "Masking | None":
    """What masks an institution's answers; None where the federation's terms ask for none.

    Raises:
        UserError: the policy asks for it, or the certificate cannot be used.
    """
    policy.check_secure(where.terms.secure)
    if not where.terms.secure:
        return None
    from lit_epgan.remote.keys import Identity
    from lit_epgan.remote.secure_aggregation import LEAST, Masking

    folder = where.certificates
    identity = Identity.of_folder(Path(folder), where.name) if folder else None
    return Masking(where.name, names, identity, policy.cohort or LEAST)


def this_end(
    datamodule: FederatedDataModule, folder: Path, policy: str | None = None, settings: Mapping[str, str] | None = None
) -> Alone:
    """This process's end of the federation.

    Args:
        datamodule: set up; with data of its own, it takes its place among the clients.
        folder: the run's.
        policy: an institution's, a file.
        settings: which both ends must have alike, values by keys.

    Raises:
        UserError: the data are not those of one client, or the policy is none.
    """
    where = endpoint()
    if where is None:
        return Alone()
    if where.terms.names:
        take_place(datamodule, where.terms.names, where.name or None)
    if where.role == "server":
        return AtServer(where, folder, settings or {})
    return AtInstitution(where, datamodule.client_names, folder, policy, settings or {})


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
