"""What stands between an institution's data and the server: its policy, and the list of all that has left."""

import csv
from pathlib import Path

from lit_epgan.engine.messages import Count, Report, Task, Term, Weighted, nbytes, norm, tensor_of
from lit_epgan.errors import UserError
from lit_epgan.remote.policy import Policy

COLUMNS = ("round", "exchange", "question", "entry", "shape", "type", "norm", "weight", "bytes")


class Gate:
    """Every report passes here before it leaves.

    Args:
        policy: the institution's.
        path: a CSV file with a row for each entry of each report; it goes on where it ends.
        dry: whether the first report is listed and not sent.
    """

    def __init__(self, policy: Policy, path: Path, dry: bool = False) -> None:
        self.policy, self._path, self._dry = policy, path, dry

    def passes(self, task: Task, report: Report) -> None:
        """A report is about to leave.

        Args:
            task: what it answers.
            report: all that leaves.

        Raises:
            UserError: the policy does not allow it, or nothing is to be sent.
        """
        self.policy.check_report(report)
        self._list(task, report)
        if self._dry:
            raise UserError(f"this is a dry run: nothing was sent. {self._path} lists what would have left")

    def _list(self, task: Task, report: Report) -> None:
        new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if new:
                rows.writerow(COLUMNS)
            rows.writerows([task.round, task.exchange, task.question, name, *_told(t)] for name, t in report.items())


def _told(term: Term) -> list[object]:
    """Shape, type, norm, weight and bytes of an entry."""
    if isinstance(term, Count):
        return ["", "number", f"{term.number:g}", "", 8]
    weight = f"{term.weight:g}" if isinstance(term, Weighted) else ""
    tensor = tensor_of(term)
    shape = " x ".join(map(str, tensor.shape))
    return [shape, str(tensor.dtype).removeprefix("torch."), f"{norm({'': tensor}):.6g}", weight, nbytes({"": tensor})]
