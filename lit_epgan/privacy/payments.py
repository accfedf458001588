"""What one run announces and pays in its data's ledger, and what its checkpoints remember of it."""

import json
import math
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lit_epgan.engine.collectives import gather_objects, rank
from lit_epgan.engine.mechanisms import Plan
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.accountant import Relation, Releases, Spent, Unit, spent
from lit_epgan.privacy.ledger import EVERYONE, Account, Budget, Ledger, default_path

HISTORY = "privacy.history.{unit}s"  # in the server's state
COPY = "releases.{unit}s.jsonl"  # in the run's folder
SLACK = 1.001  # of the noise multiplier that is found for a target
LARGEST_DELTA = 0.01


def warn_beyond_target(owner: str, epsilon: float, target: float | None) -> None:
    """Say that a run which goes on costs more, ``epsilon``, than was asked for: its noise was settled for fewer
    rounds."""
    if target is not None and epsilon > SLACK * target:
        warnings.warn(
            f"{owner}: all rounds together cost epsilon {epsilon:.3g}, and target_epsilon {target:g} is passed: a run "
            "that goes on keeps the noise that was settled when it began; take fewer rounds to stay below",
            stacklevel=2,
        )


def check_delta(owner: str, delta: float) -> None:
    """Refuse a delta that guarantees nothing: to publish every unit's data with a probability of delta is (0,
    delta)-private."""
    if not 0 < delta <= LARGEST_DELTA:
        raise UserError(
            f"{owner}'s delta is {delta:g}; it must lie between 0 and {LARGEST_DELTA:g}, and below one over the number "
            "of users or records: who publishes each one's data with a probability of delta keeps such a guarantee, too"
        )


def check_units(owner: str, delta: float, number: int, unit: Unit) -> None:
    """Refuse a delta at which one of so many units may be published: it must be below 1 / ``number``."""
    if delta * number >= 1:
        raise UserError(
            f"{owner}'s delta is {delta:g}, and there are {number} {unit}s: who publishes one of them at random keeps "
            f"such a guarantee, too; give less than {1 / number:.3g}"
        )


def check_settings(
    owner: str,
    bound: float,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    delta: float,
    relation: Relation,
    budget: float | None,
) -> None:
    """Refuse what no noise can be made with: a ``bound`` S, z or the epsilon that it is found for, delta, the relation
    of neighbours, and the largest epsilon that the ledger allows, if any. ``owner`` is the mechanism, for the
    message."""
    if not 0 < bound < math.inf:
        raise UserError(f"{owner}'s bound is {bound}; give a number above 0")
    if (noise_multiplier is None) == (target_epsilon is None):
        raise UserError(f"{owner} takes a noise_multiplier or a target_epsilon: give one of them")
    if noise_multiplier is not None and not 0 < noise_multiplier < math.inf:
        raise UserError(f"{owner}'s noise_multiplier is {noise_multiplier}; without noise nothing is private")
    check_delta(owner, delta)
    check_budget(owner, budget)
    spent([], delta, relation)  # refuses an unknown relation


def check_budget(owner: str, budget: float | None) -> None:
    """Refuse a budget that is no number above 0."""
    if budget is not None and not 0 < budget < math.inf:
        raise UserError(f"{owner}'s budget is {budget}; give an epsilon above 0")


class Payments:
    """One run's accounts, by the groups of users or records that it looks at.

    Args:
        owner: the mechanism, for messages.
        path: the ledger's; None: the one of the data set, where the plan names the data.
        budget: what may be spent.
        unit: whom the noise hides.

    Attributes:
        ledger: None where there is none. It is written by one rank for all, or by each for its own.
        planned: by group, all that this run has released and is going to release of its present kind.
        earlier: by group, what it has released of other kinds, before it was resumed.
        others: by group, what other runs have to pay for.
    """

    def __init__(self, owner: str, path: str | None, budget: Budget, unit: Unit) -> None:
        self._owner, self._path, self._budget, self._unit = owner, path, budget, unit
        self.ledger: Ledger | None = None
        self._copy: Ledger | None = None  # of this run's releases
        self.accounts: dict[str, str] = {}  # their ids
        self.planned: dict[str, Releases] = {}
        self.earlier: dict[str, tuple[Releases, ...]] = {}
        self.others: dict[str, tuple[Releases, ...]] = {}
        self._made: dict[str, dict[str, Any]] = {}  # of this run's accounts, by id
        self._state: dict[str, Tensor] = {}
        self._history = HISTORY.format(unit=unit)

    def meet(self, plan: Plan) -> dict[str, Account]:
        """Find the ledger, and in it, by group, the accounts that a resumed run goes on with.

        The histories of releases in the checkpoint and in the run's folder are held against it, and the largest counts:
        the folder's knows of those that came after the checkpoint, too. UserError: there is a budget, and no ledger to
        keep it; or the delta is no guarantee for so many users.
        """
        numbers = [plan.clients] if self._unit == "user" else plan.local.records.values() if plan.local else []
        check_units(self._owner, self._budget.delta, max(numbers, default=0), self._unit)
        path = self._path or (plan.data and default_path(plan.data, self._unit))
        if path is None and self._budget.epsilon is not None:
            raise UserError(f"a budget needs a ledger: give {self._owner} ledger=FILE")
        self.ledger = Ledger(path) if path is not None else None
        self._what = str(plan.folder.resolve()) if plan.folder is not None else f"a run of process {os.getpid()}"
        self._state, self._resumed = plan.state, plan.resumed
        history = self._state.get(self._history)
        if self.ledger is not None and plan.folder is not None:
            self._copy = Ledger(plan.folder / COPY.format(unit=self._unit))
            if not plan.resumed and rank() == 0:
                self._copy.remove()  # of a run before this one
        if self.ledger is None or not plan.resumed:
            self._made = {}
            return {}
        self._made = {} if history is None else json.loads(bytes(history.tolist()))
        if rank() == 0:
            self._recover(self.ledger)
        return {a.group: a for a in self.ledger.read().of_run(self._what, self._made)}

    def _recover(self, ledger: Ledger) -> None:
        known = {name: _account(name, self._what, entry) for name, entry in self._made.items()}
        for account in [] if self._copy is None else self._copy.read().accounts.values():
            if account.made >= known.get(account.name, account).made:
                known[account.name] = replace(account, what=self._what)
        self._made = {name: _entry(account) for name, account in known.items()}
        before = {name: account.made for name, account in ledger.read().accounts.items()}
        behind = ledger.recover(list(known.values())) if known else []
        if behind:
            lost = sum(before.get(account.name, 0) for account in behind)
            warnings.warn(
                f"the checkpoint, or the run's folder, knows of {sum(a.made for a in behind)} releases of this run, "
                f"and the ledger {ledger.path} of {lost} of them: it was lost, moved or cut off. The larger counts: "
                "the ledger is written anew from what they know",
                stacklevel=2,
            )

    def announce(self, planned: Mapping[str, Releases], before: Mapping[str, Account]) -> None:
        """Reserve what is planned, by group; on rank 0, which then tells the others by ``share``. UserError: the
        ledger's budget would be passed."""
        self.planned, self.earlier, self.others, self.accounts = dict(planned), {}, {}, {}
        if self.ledger is None:
            return
        self.accounts = self.ledger.begin_groups(self._what, self.planned, self._budget, before)
        book = self.ledger.read()
        self.planned = {group: book.accounts[name].planned for group, name in self.accounts.items()}
        own = book.of_run(self._what, self._made) if self._resumed else []
        own = [account for account in own if account.made]
        for account in own:
            if account.name not in self.accounts.values():
                self.earlier[account.group] = (*self.earlier.get(account.group, ()), account.releases)
        mine = {account.name for account in own} | set(self.accounts.values())
        elsewhere = [a for a in book.accounts.values() if a.name not in mine and a.releases.count]
        if elsewhere:
            groups = {*self.planned, *self.earlier}
            self.others = {group: _paid(elsewhere, group, self._budget) for group in groups}
        self._made = {account.name: _entry(account) for account in own}

    def share(self) -> None:
        """Let every rank know what rank 0 has announced."""
        names = ("ledger", "planned", "earlier", "others", "accounts", "_made")
        for name, value in zip(names, gather_objects([getattr(self, n) for n in names])[0], strict=True):
            setattr(self, name, value)
        self._remember()

    def pay(self, counts: Mapping[str, int], own: Collection[str]) -> None:
        """Before releases are made: write how many, by group. UserError: the ledger's budget would be passed, or the
        ledger cannot be written.

        Args:
            counts: how many.
            own: the groups of which this rank writes them to the ledger; the checkpoint remembers all.
        """
        if self.ledger is None:
            if self._path is not None:
                raise UserError(f"{self._owner} has a ledger, and nobody has said what is planned: call begin first")
            return
        written = {self.accounts[group]: n for group, n in counts.items() if group in own}
        if written:
            made = self.ledger.release_groups(written)
            if self._copy is not None:
                self._copy.recover(made)
        for group, n in counts.items():
            name, planned = self.accounts[group], self.planned[group]
            entry = self._made.setdefault(name, {"group": group, "planned": planned.times(0).as_dict()})
            entry["planned"]["count"] += n
        self._remember()

    def _remember(self) -> None:
        if self._made:
            told = torch.tensor(list(json.dumps(self._made).encode()), dtype=torch.uint8)
            self._state[self._history] = told

    def end(self) -> None:
        """Nothing more is released: what was planned and not made is free again."""
        if rank() == 0 and self.ledger is not None:
            self.ledger.end(*self.accounts.values())

    def everything(self, group: str) -> tuple[Releases, ...]:
        """What the users of ``group`` pay for in all: to this run, and to others."""
        own = (self.planned[group],) if group in self.planned else ()
        return (*self.others.get(group, ()), *self.earlier.get(group, ()), *own)

    def told(self, delta: float, relation: Relation) -> str:
        """Where the ledger is, and what it has of the group that has paid most, other runs included, as sentences."""
        if self.ledger is None:
            return ""
        where = f" The ledger is {self.ledger.path}."
        if not any(self.others.values()):
            return where
        most = dearest({group: self.everything(group) for group in self.others}, delta, relation)[1]
        return f"{where} With what other runs have released, or reserved, of these data it is {most}."


def dearest(releases: Mapping[str, tuple[Releases, ...]], delta: float, relation: Relation) -> tuple[str, Spent]:
    """The group that pays most, and what."""
    kinds = undominated(list(releases.values()))
    prices = {kind: spent(kind, delta, relation) for kind in kinds}
    most = max(prices, key=lambda kind: prices[kind].epsilon)
    return next(name for name, kind in releases.items() if kind == most), prices[most]


def _paid(accounts: Sequence[Account], group: str, budget: Budget) -> tuple[Releases, ...]:
    """What a user of ``group`` has paid by these accounts; groups that are a part of all users are disjoint."""
    parts = {each.group for each in accounts} - {EVERYONE} if group == EVERYONE else {group}
    paid = {g: tuple(a.releases for a in accounts if a.group in (g, EVERYONE)) for g in parts or {EVERYONE}}
    return paid[dearest(paid, budget.delta, budget.relation)[0]] if len(paid) > 1 else next(iter(paid.values()))


def _entry(account: Account) -> dict[str, Any]:
    return {"group": account.group, "planned": account.planned.times(account.made).as_dict()}


def _account(name: str, what: str, entry: Mapping[str, Any]) -> Account:
    releases = Releases(**entry["planned"])
    return Account(name, what, entry["group"], releases, releases.count, since="before it was lost")


def undominated(kinds: list[tuple[Releases, ...]]) -> list[tuple[Releases, ...]]:
    """What clients release, without those that another client surpasses in both rate and number."""
    found: list[tuple[Releases, ...]] = []
    for kind in sorted(set(kinds), key=lambda each: [(-part.rate, -part.count) for part in each]):
        if not any(_surpasses(other, kind) for other in found):
            found.append(kind)
    return found


def _surpasses(dear: tuple[Releases, ...], cheap: tuple[Releases, ...]) -> bool:
    """Whether, one by one, the same noise is on as many releases or more, at a rate as high or higher."""
    return len(dear) == len(cheap) and all(
        a.noise_multiplier == b.noise_multiplier and a.rate >= b.rate and a.count >= b.count
        for a, b in zip(dear, cheap, strict=True)
    )
