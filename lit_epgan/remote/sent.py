"""The list of what has left an institution, for whoever answers for its data."""

import csv
from pathlib import Path

from lit_epgan.engine.messages import Count, Report, Task, Term, Weighted, nbytes, norm, tensor_of

COLUMNS = ("round", "exchange", "question", "entry", "shape", "type", "norm", "weight", "bytes")


class Sent:
    """A CSV file with a row for each entry of each report, written before the report leaves.

    Args:
        path: the file; it goes on where it ends.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, task: Task, report: Report) -> None:
        """A report is about to leave.

        Args:
            task: what it answers.
            report: all that leaves.
        """
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
