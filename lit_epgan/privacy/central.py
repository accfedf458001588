"""Differential privacy for users around any algorithm, by a server that is trusted to add the noise."""

import math
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from lit_epgan.engine.algorithm import Algorithm
from lit_epgan.engine.client import Client
from lit_epgan.engine.collectives import all_reduce, gather_objects, rank
from lit_epgan.engine.mechanisms import Mechanism, Plan, flat_norm
from lit_epgan.engine.messages import Broadcast, Count, Report, Term, Total, Weighted, tensor_of
from lit_epgan.engine.samplers import Everyone, FixedSize, Poisson, Sampler
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, secure_normal
from lit_epgan.privacy.accountant import Relation, Releases, Spent, noise_multiplier_for, spent
from lit_epgan.privacy.ledger import EVERYONE, Account, Budget
from lit_epgan.privacy.payments import Payments, check_settings, warn_beyond_target


class SecretCohorts(Sampler):
    """Another sampler's cohorts, from a seed of the operating system's that is kept nowhere.

    Every process has a seed of its own, so a run that was resumed draws anew: a round that it repeats, as its release
    came after the checkpoint, asks another cohort. So each release is of a fresh draw, as its price supposes, and two
    runs on the same data never share their cohorts, whatever ``seed_everything`` is.

    Args:
        of: draws the cohorts.
        seed: that nobody else knows, where several federations have to share their cohorts.
    """

    def __init__(self, of: Sampler, seed: int | None = None) -> None:
        self.of = of
        self._seed = gather_objects(secrets.randbits(63))[0] if seed is None else seed  # one for all ranks

    def draw(self, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        """The other sampler's chains; ``seed`` does not matter."""
        return self.of.draw(clients, self._seed, round_)

    def rate(self, clients: int) -> float:
        return self.of.rate(clients)

    def check(self, clients: int) -> None:
        self.of.check(clients)


ASKED_AGAIN = (
    "the algorithm asks a drawn cohort more than once a round, and its epsilon counts on a fresh draw for each "
    "exchange: let everyone take part (no data.clients_per_round), or take an algorithm that asks once a round"
)
DRAWN = (FixedSize, Poisson)
TINY = 1e-30  # smaller factors lose digits in single precision


class CentralNoise(Mechanism):
    """The Gaussian mechanism on the sum of clipped reports: what leaves the server hides each client's whole data set.

        report <- report min(1, S / ||report||),   n_k <- 1,   sum <- sum + N(0, (z S)^2 I)

    The norm is that of all of a report's entries as one flat vector: parameters, buffers, the algorithm's networks. The
    divisor is the cohort's size, a public number. A report that is not finite counts as zero. The noise is drawn once
    an exchange, from the operating system's secure source, on one rank. Cohorts that are drawn come from that source,
    too. Every release is written to a ledger before it is made: a killed run that repeats a round pays for both.

    McMahan, Ramage, Talwar and Zhang 2018, algorithm 1; Augenstein et al. 2020, algorithms 1 and 2.

    Args:
        bound: S, the largest norm of a report.
        noise_multiplier: z; give it or ``target_epsilon``.
        target_epsilon: the smallest z is taken at which all planned rounds cost at most this.
        delta: for which epsilon is stated; below one over the number of clients.
        relation: which data sets are neighbours: ``zero_out`` empties one client's, ``replace_one`` replaces it.
        ledger: the data set's own file, which all runs on it share; by default one for each data set and user of the
            machine (``$LIT_EPGAN_LEDGERS``).
        budget: the largest epsilon that the ledger allows; None for no limit.
        group: the users that this run looks at; what is spent on disjoint groups does not add up.
        noise_seed: makes a study repeatable, and the noise predictable to whoever knows it, as the cohorts are to
            whoever knows ``seed_everything``: then there is no guarantee in real use.
    """

    private = True
    max_weight = 1.0

    def __init__(
        self,
        bound: float,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        relation: Relation = "zero_out",
        ledger: str | None = None,
        budget: float | None = None,
        group: str = EVERYONE,
        noise_seed: int | None = None,
    ) -> None:
        check_settings("CentralNoise", bound, noise_multiplier, target_epsilon, delta, relation, budget)
        self.bound, self.target_epsilon, self.delta, self.relation = bound, target_epsilon, delta, relation
        self.noise_multiplier, self.budget, self.group, self.noise_seed = noise_multiplier, budget, group, noise_seed
        self._payments = Payments(type(self).__name__, ledger, Budget(budget, delta, relation), "user")
        self._planned: Releases | None = None
        self._expected: float | None = None
        self._made = self._round = self._drawn = 0

    # The client -------------------------------------------------------------------------------------------------------

    def around(self, client: Client, algorithm: Algorithm, training: bool) -> Client:
        """The client as it is. UserError: whether a client has records that are looked at would leave without noise, in
        the number of those who have."""
        if algorithm.selects(client.module):
            raise UserError(
                f"{type(algorithm).__name__} looks at the records of one class, and how many clients have any would "
                "leave without noise: give the clients data of that class alone, and set model.label to null"
            )
        return client

    def at_client(self, report: Report, received: Broadcast) -> Report:
        """The report, clipped to a norm of ``bound``; all zeros where it is not finite. Weights are 1."""
        return self._clipped(report, flat_norm(report), self.bound)

    def _clipped(self, report: Report, size: float, bound: float) -> dict[str, Term]:
        scale = min(1.0, bound / size) if size > 0 else 0.0  # 0, too, where a number is infinite or none
        return {name: self._bounded(term, scale) for name, term in report.items()}

    @staticmethod
    def _bounded(term: Term, scale: float) -> Term:
        if isinstance(term, Count):
            return Count(float(term.number > 0), True) if term.of_records else term
        tensor = tensor_of(term)
        if scale == 0:
            tensor = torch.zeros_like(tensor)
        elif scale < 1:
            exact = tensor.dtype == torch.float64 or (tensor.dtype == torch.float32 and scale > TINY)
            tensor = (tensor if exact else tensor.double()) * scale  # half precision would round above the bound
        return Weighted(tensor) if isinstance(term, Weighted) else tensor

    # The server -------------------------------------------------------------------------------------------------------

    @property
    def hides_cohort(self) -> bool:  # type: ignore[override]
        """Under Poisson sampling."""
        return self._expected is not None

    def sampler(self, sampler: Sampler) -> Sampler:
        """The sampler, its draws from the operating system's source; with ``noise_seed`` as they follow from seeds."""
        return SecretCohorts(sampler) if isinstance(sampler, DRAWN) and self.noise_seed is None else sampler

    def begin(self, plan: Plan) -> None:
        """Settle z, and announce all releases in the ledger; before any client's data are read. UserError: the ledger's
        budget would be passed, or there is no ledger to keep it; the sampler's rate is not known to the accountant, or
        a drawn cohort would be asked more than once."""
        kind = self._kind(plan)
        self._expected = plan.sampler.rate(plan.clients) * plan.clients if kind.sampling == "poisson" else None
        _refuse_empty_cohorts(kind, plan, self.delta)
        if kind.rate < 1 and plan.rounds and plan.exchanges > len(plan.rounds):
            raise UserError(ASKED_AGAIN)
        before = self._payments.meet(plan)
        if rank() == 0:
            self._settle(kind, plan, before.get(self.group))
        self._payments.share()
        self._planned = self._payments.planned[self.group]

    def _settle(self, kind: Releases, plan: Plan, before: Account | None) -> None:
        z = self.noise_multiplier
        if before is not None and z is None:
            z = before.planned.noise_multiplier  # as it was settled for the whole run
        if before is not None and z is not None and not before.goes_on_with(kind.with_noise(z, 0), self.group):
            before = None
        count = self._count(plan, before)
        if z is None:
            assert self.target_epsilon is not None
            asked = self.target_epsilon
            z = noise_multiplier_for(asked, self.delta, lambda z: [kind.with_noise(z, count)], self.relation)
        self._check_noise(z)
        self._payments.announce({self.group: kind.with_noise(z, count)}, {} if before is None else {self.group: before})
        price = spent(self._released(), self.delta, self.relation)
        warn_beyond_target(type(self).__name__, price.epsilon, self.target_epsilon)

    def _check_noise(self, noise_multiplier: float) -> None:
        """Before anything is booked. UserError: this z cannot be kept."""

    def _released(self) -> tuple[Releases, ...]:
        """What the model is made of when all is done; a resumed run's of what was released before, too."""
        return (*self._payments.earlier.get(self.group, ()), self._payments.planned[self.group])

    def _kind(self, plan: Plan) -> Releases:
        """One release under the plan's sampler, with a noise multiplier of 1."""
        return _kind(plan.sampler, plan.clients)

    def _count(self, plan: Plan, before: Account | None) -> int:
        """How many of the kind are planned; ``before``: the account that goes on, on the rank that has the ledger."""
        return plan.exchanges

    def round_begins(self, number: int) -> None:
        """Note which round it is, by which noise with a seed differs, whatever process it is drawn in."""
        self._round, self._drawn = number, 0

    def _price(self) -> int:
        """How many of the kind the present exchange is."""
        return 1

    def at_server(self, total: Total, cohort: int) -> Total:
        """The sums with noise, counts as they are; the release stands in the ledger before the noise is drawn.
        UserError: nothing of the ledger can be written, or its budget would be passed, or a drawn cohort is asked
        again."""
        assert self._planned is not None, "begin comes first"
        if self._drawn and self._planned.rate < 1:  # the algorithm's exchanges() has not said so
            raise UserError(ASKED_AGAIN)
        price = self._price()
        self._payments.pay({self.group: price}, [self.group] if rank() == 0 else [])
        self._made, self._drawn = self._made + price, self._drawn + 1
        learnt = sorted(name for name in total.sums if name not in total.counts)
        deviation = self.deviations(learnt)
        noise = {name: self._normal(total[name], name) * deviation[name] for name in learnt} if rank() == 0 else {}
        for name, value in all_reduce(noise, {name: total[name].shape for name in learnt}).items():
            total.sums[name] = total[name] + value.to(total[name].device)
        if self._expected is not None:  # how many coins said yes is not public
            for name in total.counts:
                total.sums[name] = torch.full_like(total[name], self._expected)
        return total

    def deviations(self, names: Sequence[str]) -> dict[str, float]:
        """By name, the standard deviation of the noise on each coordinate of a sum: z S."""
        assert self._planned is not None, "begin comes first"
        return dict.fromkeys(names, self._planned.noise_multiplier * self.bound)

    def _normal(self, like: Tensor, name: str) -> Tensor:
        if self.noise_seed is None:
            return secure_normal(like.numel()).view(like.shape)
        generator = generator_for(self.noise_seed, "central noise", self._round, self._drawn, name)
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    def end(self) -> None:
        self._payments.end()

    def spent(self) -> Spent:
        """What this run has released since it began or was resumed."""
        made = [self._planned.times(self._made)] if self._planned is not None else []
        return spent(made, self.delta, self.relation)

    def guarantee(self) -> str | None:
        """What all planned releases guarantee together, for the model and for nothing beside it."""
        if self._planned is None:
            return None
        made = self._released()
        price = spent(made, self.delta, self.relation)
        seeded = "" if self.noise_seed is None else " The noise is a study's: whoever knows noise_seed can take it off."
        where = self._payments.told(self.delta, self.relation)
        what = f"{' and '.join(map(str, made))}, {self._how()}"
        return f"the server's model after all rounds has {price}: {what}.{where}{seeded}"

    def drowned(self, numbers: int, clients: float, rounds: int) -> str | None:
        """Where the noise of all rounds, sqrt(T) z S sqrt(d), is longer than T sums of K reports, of T K S at most."""
        assert self._planned is not None, "begin comes first"
        once = self._planned.noise_multiplier * math.sqrt(numbers) / max(clients, 1)
        lasting = once / math.sqrt(max(rounds, 1))
        if lasting <= 1:
            return None
        return (
            f"{type(self).__name__}: in each round the noise is {once:.2g} times as long as the sum of {clients:.3g} "
            f"reports can be, over all rounds {lasting:.2g} times: expect nothing to be learnt. Few clients can hide "
            "their records: RecordNoise (--config algorithms/record_noise.yaml)"
        )

    def _how(self) -> str:
        assert self._planned is not None
        deviation = self._planned.noise_multiplier * self.bound
        return f"each report clipped to {self.bound:g}, noise of standard deviation {deviation:.4g} on each sum"


def _kind(sampler: Sampler, clients: int) -> Releases:
    """One release under the sampler, with a noise multiplier of 1."""
    if isinstance(sampler, SecretCohorts):
        return _kind(sampler.of, clients)
    if isinstance(sampler, Everyone):
        return Releases(1.0)
    if isinstance(sampler, FixedSize):
        return Releases(1.0, 1, "fixed", sampler.rate(clients), clients)
    if isinstance(sampler, Poisson):
        return Releases(1.0, 1, "poisson", sampler.rate(clients))
    raise UserError(
        f"the cohorts of {type(sampler).__name__} have no accountant: take everyone, a fixed size "
        "(data.clients_per_round) or Poisson; for clients in turn there is CorrelatedNoise"
    )


def _refuse_empty_cohorts(kind: Releases, plan: Plan, delta: float) -> None:
    """A round that nobody takes part in releases nothing, and so tells that nobody took part."""
    if kind.sampling == "poisson" and (1 - kind.rate) ** plan.clients * plan.exchanges > delta / 100:
        raise UserError(
            f"Poisson's probability {kind.rate:g} leaves a round of {plan.clients} clients empty too often for delta "
            f"{delta:g}: raise it"
        )
