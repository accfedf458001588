"""The client at work at a seat, and what it keeps when it is done."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from lit_epgan.engine.messages import Report, Task, is_finite
from lit_epgan.engine.private import Private
from lit_epgan.engine.work import Client, Work


@dataclass
class AtWork:
    """The client at work.

    Attributes:
        task: what it is asked.
        client: what its works see of it.
        works: what it does.
        start: the flat vector (d,) that it starts from; None for the module's own.
        private: what it keeps, which its works change.
        before: what it kept before, where a report that is not finite passes as one that is; otherwise None.
        hooks: of a step, by name: the works that have one.
        ended: local steps that the works know to be over.
    """

    task: Task
    client: Client
    works: list[Work]
    start: Tensor | None
    private: Private
    before: Private | None = None
    hooks: dict[str, list[Work]] = field(default_factory=dict)
    ended: int = 0

    def end_step(self) -> None:
        """Tell the works, once, that the step begun last is over."""
        if self.client.step > self.ended:
            self.ended = self.client.step
            for work in self.hooks["after_local_step"]:
                if not work.rests:
                    work.after_local_step()

    def kept(self, report: Report) -> Private:
        """What the client keeps; where ``report`` counts as zero, what it learnt is as little its own."""
        if self.before is None or is_finite(report):
            return self.private
        return replace(self.before, released=self.private.released, delivered=self.private.delivered)
