"""What a private data set has paid: one file, to which every release is written before it is made.

A line is one JSON object. ``budget`` says what may be spent; ``begin`` what a run plans; ``release`` that it is about
to make one; ``end`` that it makes no more. A run's price is that of its plan until it ends, and never less than that of
its releases: a run that was killed, and repeats a round, pays twice for it.

Every line ends in a digest of itself and of the line before: SHA-256, or HMAC-SHA-256 where the data's owner has a
key. So a changed or missing line is found. Of lines that are cut off at the end, or of the whole file, knows a second
file beside it, which holds the last line's digest; and the run that has written them, by its memory or its checkpoint.
"""

import contextlib
import hashlib
import hmac
import json
import math
import os
import platform
import secrets
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lit_epgan.lib.atomic import write_text
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.accountant import Relation, Releases, Spent, Unit, spent

EVERYONE = "all users"
FOLDER, KEY = "LIT_EPGAN_LEDGERS", "LIT_EPGAN_LEDGER_KEY"  # environment variables


def default_path(data: str, unit: Unit) -> Path:
    """The ledger of the data set that ``data`` describes, which begins with a word.

    There is one place for each user of the machine: what is spent on data does not depend on the folder of a run. Users
    and records do not add up, and have a file each. UserError: nothing can be kept there.
    """
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = Path(os.environ.get(FOLDER) or f"{state}/lit_epgan/ledgers").expanduser().absolute()
    digest = hmac.new(_secret(folder), data.encode(), "sha256").hexdigest()[:16]
    return folder / f"{data.split()[0]}-{digest}.{unit}s.jsonl"


def _secret(folder: Path) -> bytes:
    """This user's random bytes: without them a ledger's name, which is printed, tells nothing of the data."""
    path, own = folder / "secret", folder / f".secret.{uuid.uuid4().hex}"
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            own.touch(0o600)
            own.write_bytes(secrets.token_bytes(32))
            with contextlib.suppress(FileExistsError):  # another process was faster
                os.link(own, path)
            own.unlink()
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"no ledger can be kept in {folder} ({error.strerror or error}): name a folder by {FOLDER}, or a file by "
            "the mechanism's ledger"
        ) from error


def _key() -> bytes:
    """The owner's key, in the file that the environment names; empty where there is none. UserError: it cannot be
    read, or is empty."""
    path = os.environ.get(KEY)
    if not path:
        return b""
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise UserError(f"{KEY} names {path}, which cannot be read: {error.strerror or error}") from error
    if not key:
        raise UserError(f"{KEY} names {path}, which is empty: a key is some 32 random bytes")
    return key


def _digest(key: bytes, before: str, body: bytes) -> str:
    message = before.encode() + body
    return hmac.new(key, message, "sha256").hexdigest() if key else hashlib.sha256(message).hexdigest()


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
        process: which process began it, and on which machine.
    """

    name: str
    what: str
    group: str
    planned: Releases
    made: int = 0
    ended: bool = False
    since: str = ""
    written: int = 0
    process: str = ""

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


DIGEST = b', "digest": '


@dataclass
class LedgerState:
    """A ledger as it was read.

    Attributes:
        budget: what may be spent.
        accounts: by their names, in the order in which they were begun.
        last, digests: the last line's digest, and all lines'.
    """

    budget: Budget = field(default_factory=Budget)
    accounts: dict[str, Account] = field(default_factory=dict)
    last: str = ""
    digests: set[str] = field(default_factory=set)

    @property
    def unit(self) -> Unit | None:
        """Whom the releases are about: users or records; None before any."""
        return next((account.planned.unit for account in self.accounts.values()), None)

    def of_run(self, what: str, names: Collection[str] = ()) -> list[Account]:
        """The accounts of the run at ``what``, from the first of these names on, and those of these names, wherever
        they were begun."""
        every = list(self.accounts.values())
        first = next((number for number, account in enumerate(every) if account.name in names), 0)
        return [account for account in every[first:] if account.what == what or account.name in names]

    def groups(self) -> list[str]:
        """Groups of users that somebody has looked at."""
        named = sorted({a.group for a in self.accounts.values()} - {EVERYONE})
        return named or [EVERYONE]

    def releases(self, group: str = EVERYONE) -> tuple[Releases, ...]:
        """What a user of ``group`` has to pay for: by runs on the group, and by runs on all users."""
        return tuple(a.releases for a in self.accounts.values() if a.group in (group, EVERYONE))

    def spent(self, group: str = EVERYONE) -> Spent:
        """What was spent on a user of ``group``."""
        return spent(self.releases(group), self.budget.delta, self.budget.relation)

    def total(self) -> Spent:
        """What was spent on the user who has paid most; groups are disjoint, and so do not add up."""
        return max((self.spent(group) for group in self.groups()), key=lambda each: each.epsilon)

    def take(self, raw: bytes, key: bytes) -> None:
        """Read one more line. UserError: it is none of a ledger's, or does not follow the one before."""
        body, found, told = raw.rpartition(DIGEST)
        if not found or told != f'"{_digest(key, self.last, body)}"}}'.encode():
            why = f", or it was written with another key than {KEY} names" if not self.digests else ""
            raise UserError(f"is not as it was written, or a line before it is missing{why}")
        try:
            self._take(json.loads(body + b"}"))
        except (ValueError, KeyError, TypeError, UserError) as error:
            raise UserError(f"is not one of a ledger ({error})") from error
        self.last = told[1:-2].decode()
        self.digests.add(self.last)

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
            account.made += line.get("count", 1)
            account.written += line.get("written", 1)
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
        self._last = self.path.with_name(f"{self.path.name}.last")  # the last line's digest
        self._seen = ""  # the digest of the last line that was written here

    def read(self) -> LedgerState:
        """All that stands in it. UserError: it cannot be read, or is not as it was written."""
        if not self.path.exists() and not self._seen:
            return LedgerState()
        with self._open("rb") as file:
            return self._book(file)

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
            budget: what may be spent, where the ledger has no limit yet.
            before: the account that a resumed run goes on with, if its releases are of the same kind.

        Raises:
            UserError: the budget would be passed, or is another than the ledger's, or no epsilon would be finite.
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
            budget: what may be spent, where the ledger has no limit yet.
            before: by group, the account that a resumed run goes on with, if its releases are of the same kind.

        Returns:
            The accounts' ids, by group.

        Raises:
            UserError: the budget would be passed, or is another than the ledger's, or the ledger counts other units, or
                has lost its last lines.
        """
        with self._open("a+b") as file:
            book = self._book(file)
            self._refuse_lost_lines(book)
            lines: list[dict[str, Any]] = []
            unit = next((each.unit for each in planned.values()), None)
            if book.unit not in (None, unit):
                raise UserError(
                    f"the ledger {self.path} is about {book.unit}s, and this is about {unit}s, which do not add up: "
                    "give it a ledger of its own"
                )
            if self._takes(book, budget):
                lines.append({"kind": "budget", **vars(book.budget)})
            ids = [account.name for account in (before or {}).values()]
            for account in book.of_run(what, ids):
                if not account.ended:
                    account.ended = True
                    lines.append({"kind": "end", "run": account.name})
            since, names = time.strftime("%Y-%m-%d %H:%M:%S"), {}
            for group, asked in planned.items():
                old = (before or {}).get(group)
                goes_on = old is not None and old.goes_on_with(asked, group)
                name = names[group] = old.name if old is not None and goes_on else uuid.uuid4().hex[:12]
                made = book.accounts[name].made if name in book.accounts else 0
                whole = asked.times(made + asked.count)
                book.accounts[name] = Account(name, what, group, whole, made, since=since, process=_this_process())
                lines.append(_begin(book.accounts[name]))
            for group, name in names.items():
                self._refuse_more_than_the_budget(book, book.accounts[name].planned, group)
            self._append(file, book, lines)
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

    def release_groups(self, counts: Mapping[str, int]) -> list[Account]:
        """As ``release``, of a number of its own for each account; returns them. UserError: the budget would be passed,
        as more was made than planned, or somebody has given back what was reserved; the ledger is not the one that has
        the accounts."""
        with self._open("a+b") as file:
            book = self._book(file)
            for name, count in counts.items():
                if (account := book.accounts.get(name)) is None:
                    raise UserError(self._lost())
                account.made, account.written = account.made + count, account.written + 1
                if account.ended or account.made > account.planned.count:
                    self._refuse_more_than_the_budget(book, account.planned.times(count), account.group)
            several = [{} if count == 1 else {"count": count} for count in counts.values()]
            lines = [{"kind": "release", "run": n, **c} for n, c in zip(counts, several, strict=True)]
            self._append(file, book, lines)
        return [book.accounts[name] for name in counts]

    def recover(self, known: Sequence[Account]) -> list[Account]:
        """Write what somebody else knows of accounts and the ledger does not: which has lost it, or is another one.

        Returns:
            The accounts that were behind, as they are now; a line was written for each.

        Raises:
            UserError: the ledger is known to have lost its last lines.
        """
        with self._open("a+b") as file:
            book = self._book(file)
            self._refuse_lost_lines(book)  # others' among them, of which ``known`` has nothing
            behind, lines = [], list[dict[str, Any]]()
            for account in known:
                if (old := book.accounts.get(account.name)) is None:
                    lines += [_begin(account), {"kind": "end", "run": account.name}]
                made, written = (0, 0) if old is None else (old.made, old.written)
                if old is None or made < account.made or written < account.written:
                    more = {"count": max(0, account.made - made), "written": max(0, account.written - written)}
                    lines.append({"kind": "release", "run": account.name, **more})
                    behind.append(account)
            self._append(file, book, lines)
        return behind

    def end(self, *names: str) -> None:
        """The accounts make no more releases: what they planned and did not make is free again."""
        with self._open("a+b") as file:
            book = self._book(file)
            going = [name for name in names if name in book.accounts and not book.accounts[name].ended]
            self._append(file, book, [{"kind": "end", "run": name} for name in going])

    def give_back(self) -> list[Account]:
        """Free what was reserved by processes that are dead, and never released. Nobody has seen anything of it.

        A process on another machine may be alive, and keeps what it has reserved. Were one alive all the same, each of
        its releases would have to be within the budget by itself.

        Returns:
            The accounts as they were.
        """
        with self._open("a+b") as file:
            book = self._book(file)
            idle = [a for a in book.accounts.values() if not a.ended and a.made < a.planned.count and _is_dead(a)]
            self._append(file, book, [{"kind": "end", "run": account.name} for account in idle])
        return idle

    def _refuse_more_than_the_budget(self, book: LedgerState, planned: Releases | str, group: str) -> None:
        limit, delta = book.budget.epsilon, book.budget.delta
        if limit is None and not any(each.delta for each in book.releases(group)):
            return
        with_it = book.spent(group) if group != EVERYONE else book.total()
        if with_it.epsilon == math.inf:
            raise UserError(
                f"the ledger {self.path} is kept at delta {delta:g}, and with {planned} no epsilon would be finite: "
                f"{with_it.accountant}. Nothing was read; give this one a smaller delta, so that all together stay "
                "below the ledger's"
            )
        if limit is not None and with_it.epsilon > limit:
            raise UserError(
                f"the ledger {self.path} allows epsilon {limit:g} at delta {delta:g}, and "
                f"with {planned} it would be {with_it.epsilon:.3g}: nothing was read; take more noise or fewer rounds, "
                f"or see what was spent: python -m lit_epgan privacy show {self.path}"
            )

    def _takes(self, book: LedgerState, budget: Budget | None) -> bool:
        """Whether ``budget`` becomes the ledger's, which has no limit yet."""
        limited = book.budget.epsilon is not None
        if budget is None or (budget.epsilon is None and (limited or book.accounts)):
            return False
        if limited and budget != book.budget:
            raise UserError(f"the ledger {self.path} has the budget {book.budget}, not {budget}: give that one")
        new, book.budget = budget != book.budget, budget
        return new

    @contextlib.contextmanager
    def _open(self, mode: str) -> Iterator[IO[bytes]]:
        try:
            if not self.path.exists() and self._seen:
                raise UserError(self._lost())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open(mode) as file:
                if fcntl is not None:
                    fcntl.lockf(file, fcntl.LOCK_EX if mode != "rb" else fcntl.LOCK_SH)
                yield file
        except OSError as error:
            raise UserError(f"the ledger {self.path} cannot be used: {error.strerror or error}") from error

    def _append(self, file: IO[bytes], book: LedgerState, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        file.seek(0)
        data = file.read()
        torn = _lines(data)[1]
        file.truncate(len(data) - len(torn))  # a line whose process was killed as it wrote
        key, written = _key(), b"" if torn or data[-1:] in (b"", b"\n") else b"\n"
        for line in lines:
            body = json.dumps(line).encode()[:-1]
            book.last = _digest(key, book.last, body)
            written += body + DIGEST + f'"{book.last}"}}\n'.encode()
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
        write_text(self._last, book.last, durable=True)
        self._seen = book.last

    def _book(self, file: IO[bytes]) -> LedgerState:
        file.seek(0)
        book, key = LedgerState(), _key()
        for number, raw in enumerate(_lines(file.read())[0], start=1):
            try:
                book.take(raw, key)
            except UserError as error:
                raise UserError(
                    f"line {number} of {self.path} {error}: what was spent cannot be told, so nothing more is "
                    "released; restore the file"
                ) from error
        if self._seen and self._seen not in book.digests:
            raise UserError(self._lost())
        return book

    def remove(self) -> None:
        """Let there be none, and nothing that knows of one."""
        for path in (self._last, self.path):
            path.unlink(missing_ok=True)

    def _refuse_lost_lines(self, book: LedgerState) -> None:
        if self._last.exists() and self._last.read_text() not in book.digests:
            raise UserError(
                f"the ledger {self.path} has lost its last lines, or all: {self._last.name} beside it knows of more. "
                "What was spent cannot be told, so nothing more is released: restore the file; or, if nothing else was "
                f"released of these data, remove {self._last.name}: a run that goes on still counts its own releases"
            )

    def _lost(self) -> str:
        return (
            f"the ledger {self.path} has lost lines that this run has written: it was emptied, cut off, replaced or "
            "put away. What was spent cannot be told, so nothing more is released; restore the file"
        )


def _lines(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of a file, and one at its end that is cut off."""
    *lines, last = data.split(b"\n")
    try:
        json.JSONDecoder().raw_decode(last.decode(errors="replace"))
    except ValueError:
        return lines, last
    return [*lines, last], b""


def _begin(account: Account) -> dict[str, Any]:
    told = {"what": account.what, "group": account.group, "since": account.since, "process": account.process}
    return {"kind": "begin", "run": account.name, **told, "planned": account.planned.as_dict()}


def _this_process() -> str:
    return f"{os.getpid()} on {platform.node()}"


def _is_dead(account: Account) -> bool:
    """Whether the process that began it is known to be dead."""
    number, _, machine = account.process.partition(" on ")
    if fcntl is None or machine != platform.node() or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except OSError:  # somebody else's
        return False
    return False
