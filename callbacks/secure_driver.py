"""The server's rounds under secure aggregation: institutions are asked who is ready, and then for masked answers."""

from typing import Any

from lit_epgan.callbacks.remote_drivers import ServerDriver
from lit_epgan.engine import Federation, Round, Sampler, Task
from lit_epgan.engine.private import Private
from lit_epgan.engine.sums_alone import MASKS, refuse_single_reports
from lit_epgan.engine.wire import encode_task
from lit_epgan.errors import UserError
from lit_epgan.listing import few
from lit_epgan.remote.contributions import Contribution
from lit_epgan.remote.protocol import Kind, Message, answer_to
from lit_epgan.remote.secure_aggregation import LEAST, MaskedSum

Parts = dict[str, Contribution]


class SecureServerDriver(ServerDriver):
    """A ``ServerDriver`` that gets the sum of an exchange's answers, and no answer by itself.

    An institution that is lost while it works is left out, as without masks. One that is lost after it was ready, and
    before its masked answer is here, makes the round void: the others have masked for it, too.

    Args:
        federation: the server's side.
        largest: bytes of an answer.
        driven: all else as of a ServerDriver.

    Raises:
        UserError: a round has fewer clients than a sum must have, or the aggregator looks at single reports.
    """

    def __init__(self, federation: Federation, largest: int, *driven: Any) -> None:
        _check_cohort(federation.sampler, len(federation.active))
        refuse_single_reports(federation.algorithm, {}, federation.aggregator, MASKS)
        super().__init__(federation, *driven)
        federation.secure = True
        self._least, self._largest = max(self._least, LEAST), largest

    def _exchange(self, round_: Round, parts: Parts) -> None:
        """Ask who is ready, and those for masked answers."""
        names, summed = self.federation.names, MaskedSum(self._largest)
        held = {k: self.federation.private.take_up(names[k]) for k in round_.asked}
        tasks = {k: round_.task(k, own.delivered) for k, own in held.items()}
        self._get_ready(round_, tasks, summed, parts)
        members = {k: task for k, task in tasks.items() if names[k] in summed.members}
        if not members:
            return  # the round, when it is closed, says so
        if len(members) < LEAST:
            missing = f"; {_why(parts)}" if _why(parts) else ""
            self._void(round_, f"{len(members)} institutions are ready, of at least {LEAST}{missing}", parts)
        elif lost := self._collect(round_, members, summed, parts):
            self._void(round_, f"{few(lost)} got lost when the others had masked for it", parts)
        else:
            kept = {k: Private(delivered=held[k].delivered) for k in members}
            round_.receive_sum(kept, *summed.total())

    def _get_ready(self, round_: Round, tasks: dict[int, Task], summed: MaskedSum, parts: Parts) -> None:
        """Let everybody do its work; those that are lost meanwhile, or have nothing to be masked, are left out."""
        names = self.federation.names

        def taken(k: int, note: Message) -> str:
            return summed.take(names[k], answer_to(tasks[k], note, Kind.READY))

        for k, trouble in self._clients.gather(tasks, lambda k: Message(Kind.TASK, encode_task(tasks[k])), taken):
            self._heard(k, parts)
            if trouble != "":
                self._leave_out(round_, k, self._clients.why(k) if trouble is None else trouble, parts)

    def _collect(self, round_: Round, members: dict[int, Task], summed: MaskedSum, parts: Parts) -> list[str]:
        """Add the members' masked answers; the names of those whose answers do not come."""
        told, lost = Message(Kind.SET, summed.told()), []
        for k, words in self._clients.gather(
            members, lambda k: told, lambda k, note: summed.words(answer_to(members[k], note))
        ):
            self._heard(k, parts)
            if words is None:
                self._leave_out(round_, k, self._clients.why(k), parts)
                lost.append(self.federation.names[k])
            else:
                summed.add(words)
        return lost

    def _heard(self, k: int, parts: Parts) -> None:
        heard = self._clients.heard.pop(k, None)
        if heard is not None:
            part = parts[self.federation.names[k]]
            part.seconds, part.bytes = part.seconds + heard.seconds, part.bytes + heard.bytes

    def _leave_out(self, round_: Round, k: int, why: str, parts: Parts) -> None:
        parts[self.federation.names[k]].why = why
        round_.leave_out(k, why)

    @staticmethod
    def _void(round_: Round, why: str, parts: Parts) -> None:
        round_.void(why)
        for part in parts.values():
            if part.asked and not part.why:
                part.why = "the round is void"


def _why(parts: Parts) -> str:
    """Who is left out, and why."""
    return few([f"{name}: {part.why}" for name, part in parts.items() if part.why], between="; ")


def _check_cohort(sampler: Sampler, clients: int) -> None:
    """Refuse rounds of too few.

    Raises:
        UserError: naming the setting.
    """
    expected = sampler.rate(clients) * clients
    if expected < LEAST:
        raise UserError(
            f"secure aggregation sums the reports of at least {LEAST} institutions, and a round has {expected:g}: the "
            "fewer there are, the more each sum shows of them; take more (data.clients_per_round), or leave secure "
            "aggregation out"
        )
