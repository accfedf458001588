"""What a private data set has paid: one file, to which every release is written before it is made.

A line is one JSON object. ``budget`` says what may be spent; ``begin`` what a run plans; ``release`` that it is about
to make one; ``end`` that it makes no more. A run's price is that of its plan until it ends, and never less than that of
its releases: a run that was killed, and repeats a round, pays twice for it."""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lit_epgan.errors import UserError
from lit_epgan.privacy.accountant import Relation, Releases, Spent, Unit, spent

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


try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]


class Ledger:
    """The file, which need not exist yet. Appends are atomic: under a lock that dies with its process, and on the disk
    before they count."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def read(self) -> Book:
        """All that stands in it. UserError: it cannot be read, or a line is not one of a ledger."""
        if not self.path.exists():
            return Book()
        with self._open("rb") as file:
            return self._book(file)

    def resumed(self, what: str) -> Account | None:
        """The newest account of a run that goes on; None if it has none."""
        return next((a for a in reversed(self.read().accounts.values()) if a.what == what), None)

    def resumed_groups(self, what: str) -> dict[str, Account]:
        """By group, the newest account of a run that goes on."""
        return {a.group: a for a in self.read().accounts.values() if a.what == what}

    def begin(
        self,
        what: str,
        planned: Releases,
        group: str = EVERYONE,
        budget: Budget | None = None,
        before: Account | None = None,
    ) -> str:
        """Announce releases, before any data are read; returns the account's id.

        Accounts of the same ``what`` that have not ended are ended: a run holds its folder, so their process is dead.

        Args:
            what: where the run is.
            planned: all that it will release.
            group: the users that it looks at.
            budget: what may be spent, where the ledger has none yet.
            before: the account that a resumed run goes on with, if its releases are of the same kind.

        Raises:
            UserError: the budget would be passed, or is another than the ledger's.
        """
        accounts = {} if before is None else {before.group: before}
        return self.begin_groups(what, {group: planned}, budget, accounts)[group]

    def begin_groups(
        self,
        what: str,
        planned: Mapping[str, Releases],
        budget: Budget | None = None,
        before: Mapping[str, Account] | None = None,
    ) -> dict[str, str]:
        """As ``begin``, for several groups at once; all or none of them.

        Args:
            what: where the run is.
            planned: by group, all that it will release about it.
            budget: what may be spent, where the ledger has none yet.
            before: by group, the account that a resumed run goes on with, if its releases are of the same kind.

        Returns:
            The accounts' ids, by group.

        Raises:
            UserError: the budget would be passed, or is another than the ledger's, or the ledger counts other units.
        """
        with self._open("a+b") as file:
            book = self._book(file)
            lines: list[dict[str, Any]] = []
            unit = next((each.unit for each in planned.values()), None)
            if book.unit not in (None, unit):
                raise UserError(
                    f"the ledger {self.path} is about {book.unit}s, and this is about {unit}s, which do not add up: "
                    "give it a ledger of its own"
                )
            if self._takes(book, budget):
                lines.append({"kind": "budget", **vars(book.budget)})
            for account in book.accounts.values():
                if account.what == what and not account.ended:
                    account.ended = True
                    lines.append({"kind": "end", "run": account.name})
            since, names = time.strftime("%Y-%m-%d %H:%M:%S"), {}
            for group, asked in planned.items():
                old = (before or {}).get(group)
                goes_on = old is not None and old.goes_on_with(asked, group)
                name = names[group] = old.name if old is not None and goes_on else uuid.uuid4().hex[:12]
                made = book.accounts[name].made if name in book.accounts else 0
                book.accounts[name] = Account(name, what, group, asked.times(made + asked.count), made, since=since)
                begin = {"kind": "begin", "run": name, "what": what, "group": group, "since": since}
                lines.append({**begin, "planned": book.accounts[name].planned.as_dict()})
            for group, name in names.items():
                self._refuse_more_than_the_budget(book, book.accounts[name].planned, group)
            self._append(file, lines)
        return names

    def refuse_beyond_budget(
        self, planned: Sequence[Releases], group: str = EVERYONE, budget: Budget | None = None
    ) -> None:
        """Look whether all ``planned`` together would pass the budget now.

        Nothing is written, and ``begin`` looks again. UserError: it would, or the budget is another than the ledger's.
        """
        book = self.read()
        self._takes(book, budget)
        for number, each in enumerate(planned):
            book.accounts[f"planned {number}"] = Account(f"planned {number}", "", group, each)
        self._refuse_more_than_the_budget(book, " and ".join(map(str, planned)), group)

    def release(self, name: str, count: int = 1) -> None:
        """Write that the account of that id is about to make ``count`` of the planned releases, which count from now
        on; 0 where it is covered by one before. UserError: more was made than planned, and the budget would be
        passed."""
        self.release_groups({name: count})

    def release_groups(self, counts: Mapping[str, int]) -> None:
        """As ``release``, of a number of its own for each account. UserError: more was made than planned, and the
        budget would be passed."""
        with self._open("a+b") as file:
            book = self._book(file)
            for name, count in counts.items():
                account = book.accounts[name]
                account.made += count
                if account.made > account.planned.count:
                    self._refuse_more_than_the_budget(book, account.planned.times(count), account.group)
            several = [{} if count == 1 else {"count": count} for count in counts.values()]
            self._append(file, [{"kind": "release", "run": n, **c} for n, c in zip(counts, several, strict=True)])

    def end(self, *names: str) -> None:
        """The accounts make no more releases: what they planned and did not make is free again."""
        with self._open("a+b") as file:
            book = self._book(file)
            self._append(file, [{"kind": "end", "run": name} for name in names if not book.accounts[name].ended])

    def _refuse_more_than_the_budget(self, book: Book, planned: Releases | str, group: str) -> None:
        if book.budget.epsilon is None:
            return
        with_it = book.spent(group) if group != EVERYONE else book.total()
        if with_it.epsilon > book.budget.epsilon:
            raise UserError(
                f"the ledger {self.path} allows epsilon {book.budget.epsilon:g} at delta {book.budget.delta:g}, and "
                f"with {planned} it would be {with_it.epsilon:.3g}: nothing was read; take more noise or fewer rounds, "
                f"or see what was spent: python -m lit_epgan privacy show {self.path}"
            )

    def _takes(self, book: Book, budget: Budget | None) -> bool:
        """Whether ``budget`` becomes the ledger's, which has none yet."""
        if budget is None:
            return False
        new = not book.accounts and book.budget == Budget()
        if new:
            book.budget = budget
        elif budget != book.budget:
            raise UserError(f"the ledger {self.path} has the budget {book.budget}, not {budget}: give that one")
        return new

    @contextlib.contextmanager
    def _open(self, mode: str) -> Iterator[IO[bytes]]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX if mode != "rb" else fcntl.LOCK_SH)
                file.seek(0)
                yield file
        except OSError as error:
            raise UserError(f"the ledger {self.path} cannot be used: {error.strerror or error}") from error

    def _append(self, file: IO[bytes], lines: Sequence[Mapping[str, Any]]) -> None:
        file.seek(0)
        torn = b"" if file.read()[-1:] in (b"", b"\n") else b"\n"  # a line whose process was killed as it wrote
        file.write(torn + b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())

    def _book(self, file: IO[bytes]) -> Book:
        book = Book()
        for number, raw in enumerate(file.read().split(b"\n"), start=1):
            try:
                book.take(raw)
            except UserError as error:
                raise UserError(
                    f"line {number} of {self.path} {error}: what was spent cannot be told, so nothing more is "
                    "released; restore the file"
                ) from error
        return book
