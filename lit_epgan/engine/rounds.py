"""The server's side: one round, whoever carries tasks and answers."""

import copy
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.algorithm import NETWORKS, Algorithm, AlgorithmNetworks, Exchange, Server
from lit_epgan.engine.collectives import all_reduce, gather_objects, rank, ranks
from lit_epgan.engine.divergence import Causes, ReportNorms, largest_norm, overflowing
from lit_epgan.engine.mechanisms import MASKS, NOISE, Mechanism, refuse_buffers, refuse_counts, refuse_single_reports
from lit_epgan.engine.messages import (
    AS,
    MOST,
    TIED,
    Aggregator,
    Combination,
    Count,
    Report,
    Stack,
    Task,
    Total,
    Weighted,
    begins,
    common_shape,
    declared,
    fault,
    is_finite,
    nbytes,
    norm,
    scalar,
    shapes_declared,
    shapes_told,
)
from lit_epgan.engine.module_state import PREFIX, ModuleState, heads
from lit_epgan.engine.private import Private, PrivateStates
from lit_epgan.engine.runner import WEIGHT, Answer
from lit_epgan.engine.samplers import Everyone, Sampler
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed, seed_streams
from lit_epgan.lib.text import few

NOT_ASKED = "its answer is not as it was asked for"
NOT_FINITE = "its update is not finite"
BUDGET = ("clients", "steps", "bytes_up", "bytes_down")
HIDDEN = "whose update it was is hidden: lower the learning rate, or bound updates by a mechanism such as NormClipping"
CLIPPED = "whose update it was is hidden, and each is clipped: lower the noise, or the server's learning rate"


@dataclass
class Federation:
    """The server's side of a federation.

    Attributes:
        algorithm: whose rounds are run.
        server: what the algorithm sees.
        tensors: what of the server's module lies outside the flat vector.
        networks: the algorithm's own.
        names: the clients' names.
        active: indices of the clients that hold data.
        sampler: draws the cohorts.
        aggregator: stands for the sum of the clients' changes; None for the sum.
        mechanism: sees all totals.
        private: what the clients keep; each rank holds its own clients'.
        secure: whether the server sees sums of reports alone.
        elsewhere: whether clients answer from elsewhere. One whose numbers overflow is left out then; in one process
            the round is refused, so that nobody overlooks that a training diverges.
    """

    algorithm: Algorithm
    server: Server
    tensors: ModuleState
    networks: AlgorithmNetworks
    names: list[str]
    active: list[int]
    sampler: Sampler = field(default_factory=Everyone)
    aggregator: Aggregator | None = None
    mechanism: Mechanism | None = None
    private: PrivateStates = field(default_factory=PrivateStates)
    secure: bool = False
    elsewhere: bool = False


def cohorts_by(algorithm: Algorithm, sampler: Sampler, mechanism: Mechanism | None) -> Sampler:
    """What draws the cohorts: the sampler that is set, as the algorithm and then the mechanism want it."""
    drawn = algorithm.sampler(sampler)
    return drawn if mechanism is None else mechanism.sampler(drawn)


class ServerCopy:
    """All that a round changes at the server; the clients' private states have a way back of their own.

    Args:
        federation: whose server it is.

    Attributes:
        parameters: the flat vector (d,).
        tensors: what of the module lies outside it, by name.
    """

    def __init__(self, federation: Federation) -> None:
        server, tensors = federation.server, federation.tensors
        self._federation = federation
        self.parameters = server.parameters.clone()
        self.tensors = dict(tensors.server)  # they are replaced, never written to
        self._versions = dict(tensors.versions)
        self._state = {name: value.clone() for name, value in server.state.items()}
        self._networks = None if federation.networks.server is None else federation.networks.server.clone()

    def restore(self) -> None:
        """Make the server what it was."""
        federation = self._federation
        federation.server.parameters.copy_(self.parameters)
        federation.server.state.clear()
        federation.server.state.update({name: value.clone() for name, value in self._state.items()})
        if federation.networks.server is not None and self._networks is not None:
            federation.networks.server.copy_(self._networks)
        federation.tensors.go_back(self.tensors, self._versions)

    def trouble(self) -> str | None:
        """What of the server must not be kept, as it has become since; None where all may be."""
        federation, server = self._federation, self._federation.server
        learnt = {"the server's model": server.parameters}
        learnt |= {f"the algorithm's {name!r}": value for name, value in server.state.items()}
        if federation.networks.server is not None:
            learnt["the algorithm's networks"] = federation.networks.server
        trouble = overflowing(learnt, largest_norm(server.parameters.dtype))
        for name, value in federation.tensors.server.items():
            before = self.tensors.get(name)
            if trouble is None and value is not before and value.is_floating_point():
                was = torch.isfinite(before) if before is not None and before.shape == value.shape else True
                if bool((~torch.isfinite(value) & was).any()):
                    trouble = f"the buffer {name!r} would not be finite"
        return trouble


class _OutsideTheAlgorithm:
    """What is merged whatever the algorithm does: buffers, frozen parameters that moved, the algorithm's networks.

    Args:
        federation: the server's side.
        number: of the round, from 0.
    """

    def __init__(self, federation: Federation, number: int) -> None:
        self._federation, self._number = federation, number
        self._waiting = Total()

    @property
    def waits(self) -> bool:
        """Whether an exchange has brought something that is not merged yet."""
        return WEIGHT in self._waiting

    def take(self, total: Total, now: bool) -> list[str]:
        """Take what is merged out of an exchange's total; ``now``: whether to merge it, with all that waits. Gives the
        names of buffers that cannot be merged."""
        federation, waiting = self._federation, self._waiting
        for name in [n for n in total.sums if n in (WEIGHT, NETWORKS) or n.startswith(PREFIX)]:
            value = total.sums.pop(name)
            waiting.sums[name] = waiting.sums[name] + value if name in waiting else value
        for name in [n for n in total.each if n.startswith(PREFIX)]:
            waiting.each.setdefault(name, {}).update(total.each.pop(name))
        if not now or not self.waits:
            return []
        self._waiting = Total()
        weight = waiting.sums.pop(WEIGHT)
        unlike = federation.tensors.apply(waiting, weight, self._number)
        if NETWORKS in waiting:
            federation.networks.apply(waiting.sums.pop(NETWORKS) / weight)
        return unlike


class Round:
    """A round in progress.

    While ``exchange`` is not None: every client of ``asked`` gets its ``task``, its answer is taken in by ``receive``,
    and ``close`` ends the exchange. Then the round is over, and the server's model is the new one. On several ranks
    each asks its own clients, all close the same exchanges, and the algorithm runs alike on all of them.

    Args:
        federation: the server's side.
        number: of the round, from 0.

    Attributes:
        exchange: the question that is being asked; None when the round is over.
        asked: this rank's clients that are to answer it.
        why: this rank's clients whose update was left out, and the cause.
        budget: when the round is over: local steps, bytes sent up and down, each the mean over the round's clients.
    """

    @torch.no_grad()
    def __init__(self, federation: Federation, number: int) -> None:
        self._federation, self.number = federation, number
        server = federation.server
        self._before = ServerCopy(federation)
        self._private = federation.mechanism is not None and federation.mechanism.private
        server.round = number
        if federation.mechanism is not None:
            federation.mechanism.round_begins(number)
        server.chains = federation.sampler.draw(federation.active, server.seed, number)
        self._budget, self._worked = Counter[str](), set[int]()
        self.why: dict[int, str] = {}
        self._causes = Causes(federation.names, number, server.flat, federation.tensors)
        self._norms = ReportNorms(federation.names, number)
        self._exchanges = 0
        self._asked_of: set[tuple[int, str | bool]] = set()
        self._senders: defaultdict[str, list[str]] = defaultdict(list)  # of buffers of a shape of their own
        self._merging = _OutsideTheAlgorithm(federation, number)
        self.budget: dict[str, Tensor] = {}
        self._seed("server", "update")
        self._generator = federation.algorithm.round(server)
        self.exchange: Exchange | None = next(self._generator, None)
        self._ask()

    @property
    def dropped(self) -> list[int]:
        """This rank's clients whose update was left out."""
        return list(self.why)

    def _ask(self) -> None:
        """Get ready for the present exchange; a round without anybody to ask is over."""
        exchange, federation = self.exchange, self._federation
        self.asked: list[int] = []
        if exchange is None:
            self._finish()
            return
        to = federation.server.cohort if exchange.to is None else list(exchange.to)
        if not to:
            self._end()
            return
        if self._private and not set(to) <= set(federation.server.cohort):
            raise UserError(
                f"{type(federation.algorithm).__name__} asks clients beside the round's cohort, which its mechanism's "
                "guarantee does not cover: leave the private mechanism out"
            )
        self.asked = [k for k in to if k % ranks() == rank() and k not in self.why]
        self._answers = (exchange.answer or federation.algorithm.Report, *exchange.beside)
        self._know_shapes(exchange.training)
        self._held: list[tuple[int, Answer, Callable[[], str | None]]] = []
        named: dict[str, Aggregator] = {name: Stack() for kind in self._answers for name in kind.stacked()}
        named |= federation.tensors.combine() if exchange.training else {}
        if federation.mechanism is not None and federation.mechanism.hides_cohort:
            refuse_counts(declared(self._answers)[0])
        if self._private:
            refuse_single_reports(federation.algorithm, named, federation.aggregator, NOISE)
        if federation.secure:
            refuse_single_reports(federation.algorithm, named, federation.aggregator, MASKS)
        aggregator = copy.deepcopy(federation.aggregator)
        self._combination = Combination(named, aggregator, federation.server.parameters.device)

    def _know_shapes(self, training: bool) -> None:
        """What the server knows of the shapes of answers; the rest is to be settled."""
        federation, server = self._federation, self._federation.server
        self._shapes, self._open = shapes_declared(self._answers, server.parameters, server.state)
        if federation.mechanism is not None:
            self._shapes |= federation.mechanism.adds
        if training:
            self._shapes[WEIGHT] = None
            if federation.networks.server is not None:
                self._shapes[NETWORKS] = federation.networks.server.shape
            known, open_ = federation.tensors.shapes()
            self._shapes |= {} if self._private else known
            self._open |= {*known, *open_} if self._private else open_

    def _unsettled(self, report: Report) -> list[str]:
        """Entries of which a shape is open; under a private mechanism whether most send them at all, of buffers."""
        grown = [name for name in report if AS in name] if self._private else []
        open_ = [name for name in report if name in self._open or begins(name) in self._open]
        return [name for name in (*open_, *grown) if name not in self._shapes]

    def settle(self, reports: Iterable[Report]) -> None:
        """Where the server knows no shape, that of most of the exchange's reports is right; comes before ``receive``.

        Under a private mechanism who sends buffers that at most half of the clients send is left out, and the round is
        not refused.
        """
        reports = list(reports)
        for name, told in shapes_told(reports).items():
            if self._unsettled({name: Count(0.0)}):
                rare = name.startswith(PREFIX) and self._private and 2 * told.total() <= len(reports)
                self._shapes[name] = TIED if rare else common_shape(told)

    def fault(self, report: Report) -> str | None:
        """What of a report is not as it was asked for, in a clause."""
        federation, mechanism = self._federation, self._federation.mechanism
        found = fault(report, self._answers, self._shapes, MOST if mechanism is None else mechanism.max_weight)
        if found is None and mechanism is not None and mechanism.hides_cohort:
            odd = [name for name, term in report.items() if isinstance(term, Count) and term.number != 1]
            found = f"{odd[0]!r} is not 1, which whoever takes part counts" if odd else None
        return found or federation.tensors.fault(report)

    def _end(self) -> None:
        """Nobody takes part: nothing is learnt."""
        self._generator.close()
        self.exchange = None
        self.asked = []
        self._finish()

    def task(self, client: int, delivered: dict[str, int] | None = None, billed: bool = True) -> Task:
        """What one client is sent; what it has already is not billed again.

        Args:
            client: its index.
            delivered: versions of the entries that it has been sent before and keeps; brought up to date.
            billed: whether it counts in the budget.
        """
        assert self.exchange is not None
        federation, exchange = self._federation, self.exchange
        received, kept = exchange.sent_to(client), dict(exchange.kept)
        if exchange.training:
            received |= {**federation.tensors.broadcast(), **federation.networks.broadcast()}
            kept |= federation.tensors.kept()
        if federation.mechanism is not None:
            received |= federation.mechanism.broadcast()
        kept = {name: version for name, version in kept.items() if name in received}
        delivered = delivered if delivered is not None else {}
        known = frozenset(name for name, version in kept.items() if delivered.get(name) == version)
        delivered.update(kept)
        if billed:
            self._budget["bytes_down"] += nbytes({n: t for n, t in received.items() if n not in known})
        what = (exchange.question, exchange.training, received, frozenset(kept), known)
        return Task(client, self.number, self._exchanges, *what, self._words(client) in self._asked_of)

    def _words(self, client: int) -> tuple[int, str | bool]:
        """What tells the present exchange's work of a client from its other works in this round."""
        assert self.exchange is not None
        return client, self.exchange.training or self.exchange.question

    def receive(self, client: int, answer: Answer, look: Callable[[], str | None] = lambda: None) -> None:
        """Take in a client's answer; one that is not finite, or not as its message declares, is left out.

        A warning names the client; under a private mechanism it does not, and says nothing of what was sent. While a
        shape is open, answers wait until two agree on it, or all are there: so none decides by being the first.

        Args:
            client: its index.
            answer: what it sends, and keeps.
            look: looks for the cause in the client's data, where they are at hand.
        """
        if not self._held and not self._unsettled(answer.report):
            self._take_in(client, answer, look)
            return
        self._held.append((client, replace(answer, report=_copied(answer.report)), look))
        for shape_name, told in shapes_told(each.report for _, each, _ in self._held).items():
            (shape, often), *_ = told.most_common(1)
            if often > 1 and self._unsettled({shape_name: Count(0.0)}):
                self._shapes[shape_name] = shape
        if not any(self._unsettled(each.report) for _, each, _ in self._held):
            self._release()

    def _release(self) -> None:
        """Take in the answers that waited, in their order."""
        held, self._held = self._held, []
        for client, answer, look in held:
            self._take_in(client, answer, look)

    def _take_in(self, client: int, answer: Answer, look: Callable[[], str | None]) -> None:
        federation, name = self._federation, self._federation.names[client]
        whose = "a client" if self._private else f"client {name!r}"
        wrong = self.fault(answer.report) if 0 <= answer.steps <= MOST else f"it counts {answer.steps} steps"
        if wrong is None and federation.elsewhere:
            size = norm(answer.report)
            if largest_norm(federation.server.parameters.dtype) < size < math.inf:
                wrong = f"its norm, {size:.2g}, is beyond what the model's numbers hold"
        if wrong is not None:
            federation.private.forget(name, answer.private)
            self.why[client] = NOT_ASKED if self._private else f"{NOT_ASKED}: {wrong}"
            told = "it is not as it was asked for" if self._private else wrong
            warnings.warn(f"round {self.number}: the answer of {whose} is left out: {told}", stacklevel=2)
            return
        self._worked.add(client)
        self._budget["steps"] += answer.steps
        self._budget["bytes_up"] += nbytes(answer.report)
        of_buffers = {n: term for n, term in answer.report.items() if n.startswith(PREFIX)}
        size = norm({n: term for n, term in answer.report.items() if n not in of_buffers})
        if math.isfinite(size) and is_finite(of_buffers):
            federation.private.propose(name, answer.private)
            for each in [n for n in of_buffers if AS in n and not n.endswith("/weight")]:
                self._senders[each.removeprefix(PREFIX).split(AS)[0]].append(name)
            counted = self.exchange is not None and self.exchange.training and not self._private
            self._combination.add(client, {**answer.report, **heads(of_buffers)} if counted else answer.report)
            self._causes.finite()
            if not self._private:  # whose report is large is nobody's business then
                self._norms.add(client, size)
        else:
            federation.private.forget(name, answer.private)
            self.why[client] = NOT_FINITE
            find, parameters = self._causes.find, federation.server.parameters
            cause = None if self._private else find(client, answer.report, parameters, look)
            # not on rank 0 alone: only the rank that trained the client knows
            warnings.warn(
                f"round {self.number}: the update of {whose} is not finite and is left out"
                + (f"; {cause}" if cause else ""),
                stacklevel=2,
            )

    def receive_sum(
        self, answered: Mapping[int, Private], report: Report, steps: int, members: Iterable[Report] = ()
    ) -> None:
        """Take in the sum of several clients' answers, of which nobody can look at any.

        Args:
            answered: what each client keeps, by its index.
            report: the sum of their reports, each entry weight times change.
            steps: the sum of their local steps.
            members: of each its report as far as it is known: shapes without numbers.
        """
        federation = self._federation
        self._worked.update(answered)
        self._budget["steps"] += steps
        self._budget["bytes_up"] += nbytes(report) * len(answered)  # a masked report is as large as the sum
        for client, private in answered.items():
            federation.private.propose(federation.names[client], private)
        self._combination.add_sum(report)
        if self.exchange is not None and self.exchange.training and not self._private:
            for each in members:
                self._combination.add_sum(heads(each))

    def void(self, why: str) -> None:
        """End the round without a trace, for what was answered cannot be used; the next one begins as this one has.

        Args:
            why: for the warning.
        """
        warnings.warn(f"round {self.number} is void: {why}; the server's model stays as it was", stacklevel=2)
        self.abandon()
        self.why = dict.fromkeys(self._federation.server.cohort, "the round is void") | self.why
        self.exchange, self.asked = None, []
        self._finish()

    def leave_out(self, client: int, why: str) -> None:
        """Go on without a client whose answer does not come.

        Args:
            client: its index.
            why: for the warning.
        """
        name = self._federation.names[client]
        self._federation.private.forget(name)
        self.why[client] = why
        warnings.warn(f"round {self.number}: client {name!r} is left out: {why}", stacklevel=2)

    @torch.no_grad()
    def close(self) -> None:
        """All clients of the exchange have answered: combine over ranks, and let the algorithm go on.

        Raises:
            UserError: if no client's update is finite, or their total is not, or the server's new model would not be
                or would overflow; the server is what it was before the round then.
        """
        try:
            self._close()
        except UserError:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Leave the round without a trace: the server is what it was before."""
        self._generator.close()
        self._before.restore()
        self._federation.private.abandon()

    def _close(self) -> None:
        assert self.exchange is not None
        federation, exchange = self._federation, self.exchange
        self.settle(each.report for _, each, _ in self._held)
        self._release()
        total = self._combination.close()
        self._norms.close()
        last = exchange.training and exchange.merge and not self._merging.waits
        if not total.sums and not total.each:
            everywhere = gather_objects((self.why, self.asked))
            dropped = {k: why for here, _ in everywhere for k, why in here.items()}
            asked = {k for _, here in everywhere for k in here}
            if dropped and (last or (not exchange.training and asked <= set(dropped))):
                raise UserError(self._nothing(dropped))
            if last:
                self._end()  # none of them had a batch
                return
        if not is_finite(total.sums):
            raise UserError(self._refused("the sum of the clients' updates would overflow, though each is finite"))
        if self._private:
            refuse_buffers(total)
        if federation.mechanism is not None:
            total = federation.mechanism.at_server(total, len(federation.server.cohort))
        if exchange.training:
            for name in self._merging.take(total, exchange.merge):
                senders = f" (here: {few(self._senders[name])})" if self._senders[name] else ""
                warnings.warn(
                    f"round {self.number}: the buffer {name!r} has no shape that most clients give it{senders}, and "
                    "stays the server's: keep it local, or let it have one shape",
                    stacklevel=2,
                )
        self._asked_of.update(map(self._words, self.asked))
        words: tuple[int | str, ...] = ("server", "update", *([self._exchanges] if self._exchanges else []))
        self._seed(*words)
        self._exchanges += 1
        try:
            self.exchange = self._generator.send(self._answers[0].of(total))
        except StopIteration:
            self.exchange = None
        self._ask()

    def _finish(self) -> None:
        device = self._federation.server.parameters.device
        self._budget["clients"] = len(self._worked)
        own = {name: scalar(self._budget[name]).to(device) for name in BUDGET}
        spent = all_reduce(own, {name: each.shape for name, each in own.items()})
        clients = spent["clients"].clamp(min=1)
        told = [name for name in BUDGET[1:] if name != "steps" or not self._private]  # steps tell of records
        self.budget = {f"client/{name}": (spent[name] / clients).squeeze() for name in told}
        if (trouble := self._before.trouble()) is not None:
            raise UserError(self._refused(trouble))
        self._federation.private.commit()

    def _refused(self, trouble: str) -> str:
        cause = CLIPPED if self._private else HIDDEN if self._federation.secure else self._norms.cause()
        return f"round {self.number} is refused: {trouble}; {cause}{self._safe}"

    @property
    def _safe(self) -> str:
        return ". The last checkpoint holds the round before" if self.number else ""

    def _nothing(self, dropped: Mapping[int, str]) -> str:
        names = self._federation.names
        if set(dropped.values()) != {NOT_FINITE}:
            left_out = few([f"{names[k]}: {why}" for k, why in sorted(dropped.items())], between="; ")
            return (
                f"round {self.number}: no client's answer counts, so there is nothing to merge ({left_out}){self._safe}"
            )
        left_out = few([names[k] for k in sorted(dropped)])
        return (
            f"round {self.number}: no client's update is finite, so there is nothing to merge (left out: {left_out}); "
            f"{self._causes.advice(sorted(dropped))}{self._safe}"
        )

    def _seed(self, *words: int | str) -> None:
        seed_streams(derive_seed(self._federation.server.seed, self.number, *words))


def _copied(report: Report) -> Report:
    """A report whose tensors nobody overwrites."""
    return {
        name: term if isinstance(term, Count)
        else term._replace(tensor=term.tensor.clone()) if isinstance(term, Weighted)
        else term.clone()
        for name, term in report.items()
    }  # fmt: skip


def run_round(
    round_: Any,
    answers: Callable[[Any], Iterable[tuple[int, Answer]]],
    look: Callable[[int], str | None] = lambda _: None,
) -> None:
    """The whole round: every exchange goes to the clients, whose answers are taken in and combined.

    Args:
        round_: a ``Round``, or what stands for it where the server is elsewhere.
        answers: asks the clients of ``asked``, and gives each one's index and answer.
        look: looks for the cause in a client's data, where its update is not finite.
    """
    while round_.exchange is not None:
        for client, answer in answers(round_):
            round_.receive(client, answer, partial(look, client))
        round_.close()
