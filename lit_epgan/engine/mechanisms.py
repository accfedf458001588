"""What is done to whole reports, around any algorithm: clipping here, noise in a privacy mechanism."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lit_epgan.engine.algorithm import Algorithm
from lit_epgan.engine.client import Client, StepHooks
from lit_epgan.engine.messages import (
    MOST,
    SUMMED,
    Aggregator,
    Broadcast,
    Count,
    Report,
    Term,
    Total,
    Weighted,
    tensor_of,
)
from lit_epgan.engine.samplers import Sampler
from lit_epgan.lib.errors import UserError


@dataclass(frozen=True)
class LocalPlan:
    """What the clients are about to train on in a fit.

    Attributes:
        records: the number of records of each client that holds data, by its index; its name is ``names[index]``.
        names: all clients'.
        batch_size: how many records a local step draws; of a client that has fewer, all.
        steps: of a round's number: the local steps of each client of its cohort, by the client's index.
    """

    records: Mapping[int, int]
    names: list[str]
    batch_size: int
    steps: Callable[[int], Mapping[int, int]]


@dataclass(frozen=True)
class Plan:
    """What a fit is about to do, as far as it is public.

    Attributes:
        sampler: draws the cohorts.
        clients: how many clients hold data.
        exchanges: that are still to come, over all rounds.
        folder: the run's own; None where it keeps nothing.
        resumed: whether a run goes on that has begun before.
        state: the server's tensors, by name, which checkpoints hold; a mechanism keeps what moves there.
        rounds: their numbers, from 0, that are still to come; empty where they are not told.
        local: the clients' training; None where whoever drives the steps does not say it.
        data: what names the data set, as its ledger is found by it; None where nobody says it.
        names: of the clients that hold data here.
    """

    sampler: Sampler
    clients: int
    exchanges: int
    folder: Path | None = None
    resumed: bool = False
    state: dict[str, Tensor] = field(default_factory=dict)
    rounds: range = range(0)
    local: LocalPlan | None = None
    data: str | None = None
    names: Sequence[str] = ()


class Mechanism:
    """Base of what is done to whole reports; by itself it does nothing.

    It sees what the federation adds to a report (buffers, the algorithm's networks), too.

    Attributes:
        private: whether it promises differential privacy. Then the server names no client and warns of none, and
            aggregators that look at single reports are refused.
        by_record: whether it hides single records in what every client does, so that even the server sees none of
            them. Then each local step draws its records by coins, and training tells nothing else.
        adds: the entries that ``at_client`` puts beside a report's own: their shapes by their names.
        max_weight: the largest weight of a client that ``at_client`` lets pass.
        hides_cohort: whether how many take part is secret. Then whoever does counts 1, in every number.
        noise_seed: repeats its noise and its coins, for studies alone; None: they come from the operating system.
    """

    private = False
    by_record = False
    adds: Mapping[str, torch.Size] = {}
    max_weight: float = MOST
    hides_cohort = False
    noise_seed: int | None = None

    def sampler(self, sampler: Sampler) -> Sampler:
        """What draws the cohorts in place of the federation's sampler; asked for on every rank, before ``begin``."""
        return sampler

    def begin(self, plan: Plan) -> None:
        """Before a fit's first round, on every rank.

        Raises:
            UserError: what is planned must not be done.
        """

    def round_begins(self, number: int) -> None:
        """Before a round, on every rank; ``number``: of the round, from 0."""

    def broadcast(self) -> Broadcast:
        """What every client has to know of it, such as a bound that moves; sent with each task."""
        return {}

    def around(self, client: Client, algorithm: Algorithm, training: bool) -> Client:
        """The client as an algorithm gets to see it, its steps told what the mechanism does in them.

        Args:
            client: who is about to do a task.
            algorithm: whose task it is.
            training: whether the question is answered by training.

        Raises:
            UserError: the task must not be done.
        """
        return client

    def check_steps(self, hooks: StepHooks, algorithm: Algorithm) -> None:
        """A client's steps are about to begin.

        Raises:
            UserError: they must not be told this.
        """

    def at_client(self, report: Report, received: Broadcast) -> Report:
        """What leaves the client in place of ``report``; ``received``: what it was sent, ``broadcast`` included."""
        return report

    def at_server(self, total: Total, cohort: int) -> Total:
        """What the algorithm gets in place of ``total``; ``cohort``: how many clients were asked, a public number."""
        return total

    def own_epsilon(self, delta: float | None = None) -> float | None:
        """What all work costs the clients' records by noise of their own, other runs' included; None where they add
        none. ``delta``: for which it is stated; by default the mechanism's."""
        return None

    def drowned(self, numbers: int, clients: float, rounds: int) -> str | None:
        """A sentence where its noise is longer than what clients can say together; None where it is not, or not known.

        Args:
            numbers: that a report has.
            clients: who take part in a round.
            rounds: how many there are.
        """
        return None

    def guarantee(self) -> str | None:
        """What holds when all that is planned has been done, in a sentence; None if nothing is promised."""
        return None

    def end(self) -> None:
        """After the fit's last round, on every rank."""


class NormClipping(Mechanism):
    """Scales every report down to a norm of at most ``bound``, and counts every client alike.

        report <- report min(1, bound / ||report||),   n_k <- min(n_k, max_weight)

    The norm is the Euclidean norm of all of the report's entries together, as one flat vector: parameters, buffers, the
    algorithm's networks and states. Weights and counts are not part of it; they are bounded by themselves.
    It is the client's half of differential privacy, without noise: by itself it promises nothing. A client whose data
    are wrong moves the sum by ``bound`` at most; one that cheats does not clip.

    McMahan, Ramage, Talwar and Zhang 2018, "Learning differentially private recurrent language models", section 2.

    Args:
        bound: S, the largest norm of a report.
        max_weight: the largest weight of a client; 1 makes the mean a plain one.

    Raises:
        UserError: if an argument is not above 0.
    """

    def __init__(self, bound: float, max_weight: float = 1.0) -> None:
        if not bound > 0 or not max_weight > 0:
            raise UserError(f"NormClipping's bound and max_weight are {bound} and {max_weight}; give numbers above 0")
        self.bound = bound
        self.max_weight = max_weight

    def at_client(self, report: Report, received: Broadcast) -> Report:
        """The report, clipped, its weights bounded; tensors that need no scaling are passed on as they are."""
        scale = self.bound / max(flat_norm(report), self.bound)
        return {name: self._bounded(term, scale) for name, term in report.items()}

    def _bounded(self, term: Term, scale: float) -> Term:
        if isinstance(term, Count):
            return Count(min(term.number, self.max_weight), True) if term.of_records else term
        tensor = tensor_of(term)
        if scale < 1:
            tensor = tensor * scale if tensor.is_floating_point() else tensor.double() * scale
        return Weighted(tensor, min(term.weight, self.max_weight)) if isinstance(term, Weighted) else tensor


def flat_norm(report: Report) -> float:
    """The Euclidean norm of all entries of a report but its counts, as one flat vector, in double precision."""
    return math.hypot(*(_norm(tensor_of(term)) for term in report.values() if not isinstance(term, Count)))


def _norm(tensor: Tensor) -> float:
    if not tensor.is_floating_point():
        tensor = tensor.double()
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def refuse_buffers(total: Total) -> None:
    """Refuse what clients changed outside the flat vector: noise would make nonsense of statistics and counters.

    Raises:
        UserError: naming one of them.
    """
    changed = sorted(name for name in total.sums if name.startswith(SUMMED) and name not in total.counts)
    if changed:
        raise UserError(
            f"the clients have changed {changed[0].removeprefix(SUMMED)!r}, which would be merged under noise: leave "
            "buffers the server's with federation.buffers exclude, and frozen parameters alone"
        )


def refuse_counts(kinds: Mapping[str, str]) -> None:
    """Refuse numbers that a random cohort would give away; ``kinds``: by an entry's name, how it merges.

    Raises:
        UserError: naming one of them.
    """
    counted = sorted(name for name, kind in kinds.items() if kind == "count")
    if counted:
        raise UserError(
            f"the algorithm counts {counted[0]!r} among those who take part, which a random cohort would give away: "
            "take a sampler of fixed size (data.clients_per_round)"
        )


class HiddenReports(NamedTuple):
    """Why single reports are not to be seen.

    Attributes:
        admits: the attribute of an aggregator that says whether it may be used.
        why: said of a single report.
        name: what to leave out otherwise.
    """

    admits: str
    why: str
    name: str


NOISE = HiddenReports("private", "which no noise on a sum covers", "the private mechanism")


MASKS = HiddenReports("secure", "which secure aggregation hides", "secure aggregation")


def refuse_single_reports(
    owner: object, named: Mapping[str, Aggregator], changes: Aggregator | None, veil: HiddenReports
) -> None:
    """Refuse aggregators that look at single reports.

    Args:
        owner: the algorithm, for the message.
        named: the aggregators of single entries.
        changes: that of all other changes; None for the sum.
        veil: why.

    Raises:
        UserError: naming the aggregator, or the algorithm and the entry.
    """
    if changes is not None and not getattr(changes, veil.admits):
        raise UserError(
            f"{type(changes).__name__} looks at every client's report by itself, {veil.why}: leave the aggregator out, "
            f"or {veil.name}"
        )
    seen = [name for name, each in named.items() if not getattr(each, veil.admits)]
    if seen:
        raise UserError(
            f"{type(owner).__name__} wants every client's {seen[0]!r} by itself, {veil.why}: take an algorithm whose "
            "reports sum, such as FedAvg (for GANs FedAvgGAN, EmbeddingSites or EmbeddingOnServer; of a buffer, set "
            f"federation.buffers exclude), or leave {veil.name} out"
        )
