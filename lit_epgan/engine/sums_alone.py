"""What cannot be done where reports must sum: look at single ones."""

from collections.abc import Mapping
from typing import NamedTuple

from lit_epgan.engine.aggregation import Aggregator
from lit_epgan.errors import UserError


class Veil(NamedTuple):
    """Why single reports are not to be seen.

    Attributes:
        admits: the attribute of an aggregator that says whether it may be used.
        why: said of a single report.
        name: what to leave out otherwise.
    """

    admits: str
    why: str
    name: str


NOISE = Veil("private", "which no noise on a sum covers", "the private mechanism")
MASKS = Veil("secure", "which secure aggregation hides", "secure aggregation")


def refuse_single_reports(
    owner: object, named: Mapping[str, Aggregator], changes: Aggregator | None, veil: Veil
) -> None:
    """Refuse aggregators that look at single reports.

    Args:
        owner: the algorithm, for the message.
        named: the aggregators of single entries.
        changes: that of all other changes; None for the sum.
        veil: why.

    Raises:
        UserError: naming the aggregator, or the algorithm and the entry.
    """
    if changes is not None and not getattr(changes, veil.admits):
        raise UserError(
            f"{type(changes).__name__} looks at every client's report by itself, {veil.why}: leave the aggregator out, "
            f"or {veil.name}"
        )
    seen = [name for name, each in named.items() if not getattr(each, veil.admits)]
    if seen:
        raise UserError(
            f"{type(owner).__name__} wants every client's {seen[0]!r} by itself, {veil.why}: take an algorithm whose "
            "reports sum, such as FedAvg (for GANs FedAvgGAN, EmbeddingSites or EmbeddingOnServer; of a buffer, set "
            f"federation.buffers exclude), or leave {veil.name} out"
        )
