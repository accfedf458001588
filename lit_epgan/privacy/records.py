"""Differential privacy for single records around any algorithm: every client's local steps are DP-SGD's."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from lit_epgan.engine.algorithm import Algorithm
from lit_epgan.engine.client import Client, StepHooks
from lit_epgan.engine.collectives import rank, ranks
from lit_epgan.engine.mechanisms import LocalPlan, Mechanism, Plan
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, secure_normal
from lit_epgan.privacy.accountant import Relation, Releases, Spent, noise_multiplier_for, spent
from lit_epgan.privacy.ledger import Account, Budget
from lit_epgan.privacy.noisy_steps import NoisySteps
from lit_epgan.privacy.payments import Payments, check_settings, dearest, undominated, warn_beyond_target


class RecordNoise(Mechanism):
    """DP-SGD at every client: whatever a client sends hides each of its records, from the server, too.

        records   each by a coin of its own, of probability q_k = b_k / n_k
        gradient  (sum_i g_i min(1, C / ||g_i||) + N(0, (z C)^2 I)) / b_k
        cost      of client k: all its local steps, at the rate q_k; the guarantee is that of the client who pays most

    g_i is the gradient of record i's own loss, b_k the data module's batch size (or n_k, where that is smaller), n_k
    the client's number of records, which is public. Clients hold different records, so that their costs do not add up.
    Coins and noise come from the operating system's secure source. All that follows from the noised gradients costs
    nothing more: the algorithm's states, optimizers, personal layers, and a GAN's generator, which sees the
    discriminator alone. What else would look at records is refused. A round's steps are written to the ledger before
    the first of them, so that a killed run that repeats a round pays for both.

    Abadi et al. 2016, algorithm 1; for GANs Xie, Lin, Wang, Wang and Zhou 2018.

    Args:
        bound: C, the largest norm of a record's gradient.
        noise_multiplier: z; give it or ``target_epsilon``.
        target_epsilon: the smallest z is taken at which all planned steps cost at most this.
        delta: for which epsilon is stated; below one over the number of records.
        relation: which data sets are neighbours: ``zero_out`` sets one record's gradients to zero, ``replace_one``
            replaces the record.
        ledger: the data set's own file, which all runs on it share; by default one for each data set and user of the
            machine (``$LIT_EPGAN_LEDGERS``).
        budget: the largest epsilon that the ledger allows; None for no limit.
        at_once: of so many records gradients are in memory at the same time.
        noise_seed: makes a study repeatable, and coins and noise predictable to whoever knows it: then there is no
            guarantee in real use.
    """

    by_record = True

    def __init__(
        self,
        bound: float = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        delta: float = 1e-5,
        relation: Relation = "zero_out",
        ledger: str | None = None,
        budget: float | None = None,
        at_once: int = 256,
        noise_seed: int | None = None,
    ) -> None:
        check_settings("RecordNoise", bound, noise_multiplier, target_epsilon, delta, relation, budget)
        at_least(1, self, at_once=at_once)
        self.bound, self.noise_multiplier, self.target_epsilon = bound, noise_multiplier, target_epsilon
        self.delta, self.relation, self.budget = delta, relation, budget
        self.at_once, self.noise_seed = at_once, noise_seed
        self._payments = Payments("RecordNoise", ledger, Budget(budget, delta, relation), "record")
        self._made: dict[str, int] = {}
        self._local: LocalPlan | None = None
        self._round = -1
        self._checked = False

    # Before the training ----------------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Settle z, and announce every client's steps in the ledger; before any client's data are read. UserError: the
        ledger's budget would be passed, or there is no ledger to keep it, or nobody knows how many steps there will
        be."""
        if plan.local is None:
            raise UserError("RecordNoise has to know each client's records and steps: train by the FederationCallback")
        self._local, self._made, self._round, self._checked = plan.local, {}, -1, False
        kinds = _kinds(plan.local, plan.rounds)
        before = self._payments.meet(plan)
        if rank() == 0:
            self._announce(kinds, before)
        self._payments.share()

    def _announce(self, kinds: dict[str, Releases], before: Mapping[str, Account]) -> None:
        z = self.noise_multiplier
        if z is None and before:
            z = next(iter(before.values())).planned.noise_multiplier  # as it was settled for the whole run
        if z is None:
            z = self._calibrated(list(kinds.values()))
        self._payments.announce({name: kind.with_noise(z, kind.count) for name, kind in kinds.items()}, before)
        if self._payments.planned:
            price = dearest(self._released(), self.delta, self.relation)[1]
            warn_beyond_target("RecordNoise", price.epsilon, self.target_epsilon)

    def _calibrated(self, kinds: list[Releases]) -> float:
        """The smallest z at which no client pays more than ``target_epsilon``."""
        asked, delta, relation = self.target_epsilon, self.delta, self.relation
        assert asked is not None
        found = 0.0
        dear = [kind for (kind,) in undominated([(kind,) for kind in kinds])]
        for kind in sorted(dear, key=lambda each: -each.rate * each.count**0.5):  # the dearest first

            def all_steps(z: float, kind: Releases = kind) -> list[Releases]:
                return [kind.with_noise(z, kind.count)]

            if found == 0 or spent(all_steps(found), delta, relation).epsilon > asked:
                found = noise_multiplier_for(asked, delta, all_steps, relation)
        return found

    # At the client ----------------------------------------------------------------------------------------------------

    def around(self, client: Client, algorithm: Algorithm, training: bool) -> Client:
        """The client with steps of DP-SGD; its records are to be had in no other way. UserError: later, where the
        algorithm reads the records."""
        name = type(algorithm).__name__

        def refuse() -> NoReturn:
            raise UserError(
                f"{name} looks at a client's records outside its local steps, which the noise on gradients does "
                "not cover: take FedAvg, FedProx, SCAFFOLD (control: path) or ExpectationPropagation"
            )

        client = replace(client, data=refuse, gradient=refuse, loss=refuse)
        if not training:
            return client
        assert self._local is not None, "begin comes first"
        expected = min(self._local.batch_size, self._local.records[client.index])
        deviation = self._payments.planned[client.name].noise_multiplier * self.bound
        check, self._checked = not self._checked, True
        steps = NoisySteps(
            client.module,
            name,
            self.bound,
            deviation,
            expected,
            self._normal(client),
            self.at_once,
            partial(self._pay, client.round),
            check,
        )
        return client.told(batch=steps.batch, within=lambda: steps)

    def check_steps(self, hooks: StepHooks, algorithm: Algorithm) -> None:
        """Refuse a loss that is no record's."""
        if hooks.loss:
            raise UserError(
                f"{type(algorithm).__name__} adds a term of its own to a client's loss, which is no record's: take "
                "FedAvg, FedProx, SCAFFOLD (control: path) or ExpectationPropagation"
            )

    def _pay(self, round_: int) -> None:
        """Write this rank's steps of a round to the ledger, before the first of them is noised."""
        if round_ == self._round:
            return
        assert self._local is not None
        self._round = round_
        steps = {self._local.names[k]: n for k, n in self._local.steps(round_).items()}
        own = {self._local.names[k] for k in self._local.records if k % ranks() == rank()}
        self._payments.pay(steps, own)
        for name, n in steps.items():
            if name in own:
                self._made[name] = self._made.get(name, 0) + n

    def _normal(self, client: Client) -> Any:
        if self.noise_seed is None:
            return secure_normal
        generator = generator_for(self.noise_seed, "record noise", client.round, client.index)
        return lambda n: torch.randn(n, generator=generator, dtype=torch.float64)

    # After it ---------------------------------------------------------------------------------------------------------

    def end(self) -> None:
        self._payments.end()

    def spent(self) -> Spent:
        """What this rank's clients have released since the run began or was resumed: of who has paid most."""
        made = {name: (self._payments.planned[name].times(count),) for name, count in self._made.items()}
        return dearest(made, self.delta, self.relation)[1] if made else spent([], self.delta, self.relation)

    def _released(self) -> dict[str, tuple[Releases, ...]]:
        """By client, what it has released and is going to release; one who takes part no more is among them."""
        planned, earlier = self._payments.planned, self._payments.earlier
        return earlier | {name: (*earlier.get(name, ()), releases) for name, releases in planned.items()}

    def own_epsilon(self, delta: float | None = None) -> float | None:
        """What the clients' records pay at ``delta``, by default the mechanism's, to all runs in the ledger."""
        every = {name: self._payments.everything(name) for name in self._released()}
        return dearest(every, delta or self.delta, self.relation)[1].epsilon if every else None

    def guarantee(self) -> str | None:
        """What all planned steps guarantee together, for all that a client sends."""
        if not self._payments.planned:
            return None
        every = self._released()
        name, price = dearest(every, self.delta, self.relation)
        seeded = (
            " Coins and noise are a study's: whoever knows noise_seed can take them off."
            if self.noise_seed is not None
            else ""
        )
        where = self._payments.told(self.delta, self.relation)
        z = next(iter(self._payments.planned.values())).noise_multiplier
        return (
            f"all that the clients send, and so the model after all rounds, has {price}: client {name!r} pays most, "
            f"{' and '.join(map(str, every[name]))}, each record's gradient clipped to {self.bound:g}, noise of "
            f"standard deviation {z * self.bound:.4g} on their sum. Numbers of records, and what is measured on "
            f"validation data, are public.{where}{seeded}"
        )


def _kinds(local: LocalPlan, rounds: range) -> dict[str, Releases]:
    """By client, its steps to come as releases with a noise multiplier of 1."""
    count = dict.fromkeys(local.records, 0)
    for number in rounds:
        for client, steps in local.steps(number).items():
            count[client] += steps
    kinds = {}
    for client, records in local.records.items():
        rate = min(1.0, local.batch_size / records)
        sampling: Any = "poisson" if rate < 1 else "everyone"
        kinds[local.names[client]] = Releases(1.0, count[client], sampling, rate, unit="record")
    return kinds
