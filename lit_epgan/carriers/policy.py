"""What an institution lets happen to its data, checked where they are, and the list of all that has left."""

import csv
import math
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from lit_epgan.engine.messages import Count, Report, Task, Term, Weighted, nbytes, norm, tensor_of
from lit_epgan.engine.wire import halved
from lit_epgan.lib.errors import UserError

KINDS = {**dict.fromkeys(("algorithms", "mechanisms", "entries"), "a list"), "secure": "true or false"}
OF_KIND: dict[str, Any] = {"a list": list, "true or false": bool, "a number": int | float}
COLUMNS = ("round", "exchange", "question", "entry", "shape", "type", "norm", "weight", "bytes")


@dataclass(frozen=True)
class Policy:
    """An institution's rules. Each that is None lets everything pass; a check raises a UserError that names the rule.

    Attributes:
        algorithms: names of the algorithms that may work on its data.
        mechanisms: names of the mechanisms of which one must be at work.
        epsilon: the most that all planned steps may cost by the institution's own noise (RecordNoise), with what all
            trainings before them have cost. Noise that the server adds is not the institution's to vouch for: such a
            mechanism is refused under this rule.
        delta: for which epsilon is meant, whatever delta the mechanism has.
        cohort: the fewest clients of a round, as the server says how many there are.
        entries: patterns of names (``*``) of what may leave in a report.
        secure: whether reports may leave under secure aggregation alone; ``cohort`` then is the fewest of a sum.
    """

    algorithms: list[str] | None = None
    mechanisms: list[str] | None = None
    epsilon: float | None = None
    delta: float = 1e-5
    cohort: int | None = None
    entries: list[str] | None = None
    secure: bool | None = None

    @classmethod
    def of(cls, rules: Any, where: str) -> "Policy":
        """The policy that the file ``where`` holds. UserError: it has a rule that there is not, or one of another
        kind."""
        known = {field.name for field in fields(cls)}
        if not isinstance(rules, dict) or not set(rules) <= known:
            strange = f"{rules!r}" if not isinstance(rules, dict) else ", ".join(sorted(map(str, set(rules) - known)))
            raise UserError(f"the policy {where}: {strange} is no rule; there are {', '.join(sorted(known))}")
        for name, value in rules.items():
            kind = KINDS.get(name, "a number")
            right = isinstance(value, OF_KIND[kind]) and isinstance(value, bool) == (OF_KIND[kind] is bool)
            if value is not None and not right:
                raise UserError(f"the policy {where}: {name} is {value!r}; give {kind}")
        policy = cls(**{name: value for name, value in rules.items() if value is not None})
        allowed = {"epsilon": (0, math.inf), "delta": (0, 0.01), "cohort": (0, math.inf)}
        for name, (low, high) in allowed.items():
            value = getattr(policy, name)
            if value is not None and not low < value < high:
                raise UserError(f"the policy {where}: {name} is {value}; it must lie between {low:g} and {high:g}")
        return policy

    def check_plan(self, algorithm: str, mechanism: str | None, epsilon: float | None, seeded: bool = False) -> None:
        """Refuse a training before it begins.

        Args:
            algorithm: its name.
            mechanism: its name; None for none.
            epsilon: what the institution's own noise makes of all planned steps, at the policy's ``delta``; None where
                it adds none.
            seeded: whether the noise repeats, so that whoever knows its seed can take it off.
        """
        allowed = self.algorithms is None or algorithm in self.algorithms
        self._check("algorithms", allowed, f"{algorithm} is none of them")
        at_work = "none is at work" if mechanism is None else f"{mechanism} is none of them"
        self._check("mechanisms", self.mechanisms is None or mechanism in self.mechanisms, at_work)
        for rule in ("mechanisms", "epsilon"):
            given = getattr(self, rule) is not None
            self._check(rule, not (given and seeded), "noise_seed is set: whoever knows it can take the noise off")
        if self.epsilon is not None:
            self._check("epsilon", epsilon is not None, "no noise of this institution's own is planned (RecordNoise)")
            assert epsilon is not None
            self._check("epsilon", epsilon > 0, "0 is planned, for which no step can be taken")
            self._check("epsilon", epsilon <= self.epsilon, f"{epsilon:.3g} is planned at delta {self.delta:g}")

    def check_cohort(self, clients: int) -> None:
        """Refuse a round of too few."""
        self._check("cohort", self.cohort is None or clients >= self.cohort, f"the round has {clients}")

    def check_secure(self, secure: bool) -> None:
        """Refuse a federation whose server sees single reports."""
        self._check("secure", secure or not self.secure, "the federation's server sees every report by itself")

    def check_report(self, report: Report) -> None:
        """Refuse what may not leave, by the entry's name."""
        for name in report:
            allowed = self.entries is None or any(fnmatchcase(name, pattern) for pattern in self.entries)
            self._check("entries", allowed, f"{name!r} is none of them")

    def _check(self, rule: str, kept: bool, why: str) -> None:
        if not kept:
            raise UserError(
                f"the institution's policy does not allow this: {rule} is {getattr(self, rule)}, and {why}. It was not "
                "sent. Settle with the federation what is trained, or change the policy"
            )


class ReportFilter:
    """Every report passes here before it leaves.

    Args:
        policy: the institution's.
        path: a CSV file with a row for each entry of each report; it goes on where it ends.
        dry: whether the first report is listed and not sent.
    """

    def __init__(self, policy: Policy, path: Path, dry: bool = False) -> None:
        self.policy, self._path, self._dry = policy, path, dry

    def passes(self, task: Task, report: Report, half: bool = False) -> None:
        """A report is about to leave, with ``half`` its large tensors as bfloat16. UserError: the policy does not allow
        it, or nothing is to be sent."""
        self.policy.check_report(report)
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if new:
                rows.writerow(COLUMNS)
            at = [task.round, task.exchange, task.question]
            rows.writerows([*at, name, *_told(term, half)] for name, term in report.items())
        if self._dry:
            raise UserError(f"this is a dry run: nothing was sent. {self._path} lists what would have left")


def _told(term: Term, half: bool) -> list[object]:
    """Shape, type, norm, weight and bytes of an entry."""
    if isinstance(term, Count):
        return ["", "number", f"{term.number:g}", "", 8]
    weight = f"{term.weight:g}" if isinstance(term, Weighted) else ""
    tensor = tensor_of(term)
    tensor = halved({"": tensor}).get("", tensor) if half else tensor
    shape = " x ".join(map(str, tensor.shape))
    return [shape, str(tensor.dtype).removeprefix("torch."), f"{norm({'': tensor}):.6g}", weight, nbytes({"": tensor})]
