"""Rounds of a federation of several processes, driven by a fit's batches: at the server, and at an institution."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lit_epgan.callbacks.round_driver import RoundDriver
from lit_epgan.callbacks.shared_seat import SharedSeat
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.rounds import Mark
from lit_epgan.engine import Federation, OptimizedParameters, Round, Seat
from lit_epgan.errors import UserError
from lit_epgan.remote.contributions import Contribution, Contributions
from lit_epgan.remote.remote_clients import RemoteClients, Shapes
from lit_epgan.remote.remote_server import RemoteRound, RemoteServer


class ServerDriver(RoundDriver):
    """Rounds whose clients are processes of their own: with a round's first batch all of it is asked and answered.

    The batch itself is not trained on; it is there because a Trainer's epoch has at least one. An institution that is
    lost is left out of the round, and of those that follow until it calls again.

    Args:
        federation, seat, datamodule: as of a RoundDriver.
        clients: the institutions.
        least: of them must be there, or the fit ends.
        contributions: the list of who contributed when.
        show: is called when a round is over.
    """

    def __init__(
        self,
        federation: Federation,
        seat: Seat,
        datamodule: FederatedDataModule,
        clients: RemoteClients,
        least: int,
        contributions: Contributions,
        show: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(federation, seat, datamodule)
        self._clients, self._least, self._contributions, self._show = clients, least, contributions, show

    def _open(self, mark: Mark) -> None:
        """Nobody works here."""

    def _answer(self) -> None:
        round_, clients, names = self._round, self._clients, self.federation.names
        assert isinstance(round_, Round)
        self._take_in()
        cohort, parts = self.federation.server.cohort, {name: Contribution() for name in names}
        clients.begin(self._number, cohort, self.federation.algorithm.trains(self._number))
        while round_.exchange is not None:
            for k in list(round_.asked):
                parts[names[k]].asked = True
            self._exchange(round_, parts)
            self._check()
            if round_.exchange is not None:  # the round is not void
                round_.close()
        clients.over(self._number, round_.dropped)
        for k, name in enumerate(names):
            parts[name].counted = parts[name].asked and k not in round_.dropped
        self._contributions.note(self._number, parts)
        self._show()

    def _exchange(self, round_: Round, parts: dict[str, Contribution]) -> None:
        """Ask everybody who is to be asked, and take in what they answer."""
        names = self.federation.names
        held = {k: self.federation.private.take_up(names[k]) for k in round_.asked}
        tasks = {k: round_.task(k, own.delivered) for k, own in held.items()}
        answers = list(self._clients.ask(tasks))  # all of them, for most of them say which shapes are right
        sent = next(iter(tasks.values())).received if tasks else {}
        shapes = Shapes([answer.report for _, answer in answers if answer is not None], sent)
        for k, answer in answers:
            part = parts[names[k]]
            if answer is not None and (misfit := shapes.misfit(answer.report)):
                self._clients.lose(k, misfit)
                answer = None
            if answer is None:
                part.why = self._clients.why(k)
                round_.leave_out(k, part.why)
                continue
            heard = self._clients.heard[k]
            part.seconds, part.bytes = part.seconds + heard.seconds, part.bytes + heard.bytes
            answer.private.delivered = held[k].delivered
            round_.receive(k, answer)
            if k in round_.dropped:
                part.why = "its update is not finite"

    def _take_in(self) -> None:
        """Those who have called since the last round know nothing of what they were sent before."""
        for k in self._clients.meet():
            kept = self.federation.private.clients.get(self.federation.names[k])
            if kept is not None:
                kept.delivered = {}

    def _check(self) -> None:
        here = len(self._clients.present)
        if here < self._least:
            lost = "; ".join(f"{self.federation.names[k]}: {why}" for k, why in self._clients.lost.items())
            raise UserError(
                f"round {self._number}: {here} institutions are left of at least {self._least} ({lost}). "
                "Start them again, and go on with --ckpt_path last"
            )


class InstitutionDriver(RoundDriver):
    """Rounds that the server's process holds.

    Args:
        federation, seat, datamodule: as of a RoundDriver.
        server: the link.
        shared: where several ranks train the client.
    """

    def __init__(
        self,
        federation: Federation,
        seat: Seat,
        datamodule: FederatedDataModule,
        server: RemoteServer,
        shared: SharedSeat | None = None,
    ) -> None:
        super().__init__(federation, seat, datamodule)
        self._server, self._shared = server, shared

    def take_up(self, batch: Any) -> Any:
        """As of a RoundDriver; on several ranks this rank's part of the batch."""
        return super().take_up(batch if self._shared is None else self._shared.part(batch))

    def before_backward(self, loss: Tensor) -> None:
        """On several ranks let the loss count by this rank's rows."""
        if self._shared is not None:
            self._shared.weigh(loss)

    def before_step(self, optimized: OptimizedParameters) -> None:
        """On several ranks average the gradients first."""
        if self._shared is not None:
            self._shared.average(optimized)
        super().before_step(optimized)

    def _new_round(self) -> Any:
        return RemoteRound(self._server, self.federation.private, self._number)
