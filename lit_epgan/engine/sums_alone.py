"""What a server that sees sums alone cannot do: look at single reports."""

from collections.abc import Mapping

from lit_epgan.engine.aggregation import Aggregator
from lit_epgan.errors import UserError


def refuse_seen_reports(owner: object, named: Mapping[str, Aggregator], changes: Aggregator | None) -> None:
    """Refuse aggregators that secure aggregation does not admit.

    Args:
        owner: the algorithm, for the message.
        named: the aggregators of single entries.
        changes: that of all other changes; None for the sum.

    Raises:
        UserError: naming the aggregator, or the algorithm and the entry.
    """
    if changes is not None and not changes.secure:
        raise UserError(
            f"{type(changes).__name__} looks at every client's report by itself, which secure aggregation hides: leave "
            "the aggregator out, or secure aggregation"
        )
    seen = [name for name, each in named.items() if not each.secure]
    if seen:
        raise UserError(
            f"{type(owner).__name__} wants every client's {seen[0]!r} by itself, which secure aggregation hides: take "
            "an algorithm whose reports sum, such as FedAvg (for GANs FedAvgGAN, EmbeddingSites or EmbeddingOnServer; "
            "where it is a buffer, set federation.buffers exclude), or leave secure aggregation out"
        )
