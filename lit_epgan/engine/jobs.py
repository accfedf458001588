"""What a client does at a seat, and what comes of it."""

from dataclasses import dataclass
from typing import Any

from lit_epgan.engine.messages import Report, Task
from lit_epgan.engine.private import Private


@dataclass
class Job:
    """What one client is to do: its task, what it keeps (a copy of its own), its batches and n_k."""

    task: Task
    private: Private
    batches: list[Any]
    weight: float


@dataclass
class Answer:
    """What comes of a task: the report, the local steps behind it, and what the client keeps for itself."""

    report: Report
    private: Private
    steps: int = 0
