"""A ledger as it was read: who has announced what, what has been released, and what may be spent."""

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from lit_epgan.errors import UserError
from lit_epgan.privacy.accountant import Spent, spent
from lit_epgan.privacy.releases import Relation, Releases, Unit

EVERYONE = "all users"


@dataclass
class Account:
    """One run's, query's or rerun's lines.

    Attributes:
        name: its id.
        what: where it is, for people.
        group: the users that it looks at; disjoint groups have different names.
        planned: what it has announced.
        made: how many of these releases have been made.
        written: how often it has said that it is about to release, what is paid for already included.
        ended: whether it makes no more.
        since: when it began, in local time.
    """

    name: str
    what: str
    group: str
    planned: Releases
    made: int = 0
    ended: bool = False
    since: str = ""
    written: int = 0

    def goes_on_with(self, planned: Releases, group: str) -> bool:
        """Whether these are releases of the same kind, from the same users."""
        return self.planned.times(0) == planned.times(0) and self.group == group

    @property
    def releases(self) -> Releases:
        """What it has to pay for."""
        return self.planned.times(self.made if self.ended else max(self.made, self.planned.count))


@dataclass(frozen=True)
class Budget:
    """What may be spent on one user's data; ``epsilon`` None: no limit was set."""

    epsilon: float | None = None
    delta: float = 1e-5
    relation: Relation = "zero_out"

    def __str__(self) -> str:
        limit = "without a limit" if self.epsilon is None else f"epsilon {self.epsilon:g}"
        return f"{limit} at delta {self.delta:g}, {self.relation}"


@dataclass
class Book:
    """A ledger as it was read."""

    budget: Budget = field(default_factory=Budget)
    accounts: dict[str, Account] = field(default_factory=dict)

    @property
    def unit(self) -> Unit | None:
        """Whom the releases are about: users or records; None before any."""
        return next((account.planned.unit for account in self.accounts.values()), None)

    def earlier(self, what: str, present: Collection[str]) -> list[Account]:
        """A run's accounts that have released something, without those that it is using at ``present``, by name."""
        return [a for a in self.accounts.values() if a.what == what and a.name not in present and a.releases.count]

    def groups(self) -> list[str]:
        """Groups of users that somebody has looked at."""
        named = sorted({a.group for a in self.accounts.values()} - {EVERYONE})
        return named or [EVERYONE]

    def spent(self, group: str = EVERYONE) -> Spent:
        """What was spent on a user of ``group``: by runs on the group, and by runs on all users."""
        own = [a.releases for a in self.accounts.values() if a.group in (group, EVERYONE)]
        return spent(own, self.budget.delta, self.budget.relation)

    def total(self) -> Spent:
        """What was spent on the user who has paid most; groups are disjoint, and so do not add up."""
        return max((self.spent(group) for group in self.groups()), key=lambda each: each.epsilon)

    def take(self, raw: bytes) -> None:
        """Read one more line; one that is torn, as its process was killed while it wrote, is passed over. UserError: it
        is not one of a ledger."""
        if not raw.strip():
            return
        try:
            self._take(json.loads(raw))
        except (ValueError, KeyError, TypeError, UserError) as error:
            if raw.rstrip().endswith(b"}") and raw.count(b"{") == raw.count(b"}"):
                raise UserError(f"is not one of a ledger ({error})") from error

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind")
        if kind == "budget":
            self.budget = Budget(**line)
        elif kind == "begin":
            planned = Releases(**line.pop("planned"))
            name = line.pop("run")
            old = self.accounts.get(name, Account(name, "", "", planned))  # a resumed run's has made some
            self.accounts[name] = Account(name, planned=planned, made=old.made, written=old.written, **line)
        elif kind == "release":
            account = self.accounts[line["run"]]
            account.made, account.written = account.made + line.get("count", 1), account.written + 1
        elif kind == "end":
            self.accounts[line["run"]].ended = True
        else:
            raise ValueError(f"kind {kind!r}")
