"""What the federation merges by itself at the end of a round's exchanges, whatever the algorithm does."""

import warnings

from lit_epgan.engine.aggregation import Total
from lit_epgan.engine.federation import Federation
from lit_epgan.engine.module_state import PREFIX
from lit_epgan.engine.networks import NAME as NETWORKS
from lit_epgan.engine.seat import WEIGHT


class Merging:
    """Buffers, frozen parameters that moved, the algorithm's networks: gathered over the exchanges of one round.

    Args:
        federation: the server's side.
        number: of the round, from 0.
    """

    def __init__(self, federation: Federation, number: int) -> None:
        self._federation, self._number = federation, number
        self._waiting = Total()

    @property
    def waits(self) -> bool:
        """Whether an exchange has brought something that is not merged yet."""
        return WEIGHT in self._waiting

    def take(self, total: Total, now: bool) -> None:
        """Take what is merged out of an exchange's total; ``now``: whether to merge it, with all that waits."""
        federation, waiting = self._federation, self._waiting
        for name in [n for n in total.sums if n in (WEIGHT, NETWORKS) or n.startswith(PREFIX)]:
            value = total.sums.pop(name)
            waiting.sums[name] = waiting.sums[name] + value if name in waiting else value
        for name in [n for n in total.each if n.startswith(PREFIX)]:
            waiting.each.setdefault(name, {}).update(total.each.pop(name))
        if not now or not self.waits:
            return
        self._waiting = Total()
        weight = waiting.sums.pop(WEIGHT)
        for name in federation.tensors.apply(waiting, weight, self._number):
            warnings.warn(
                f"round {self._number}: the buffer {name!r} has different shapes at different clients and stays the "
                "server's: keep it local, or let it have one shape",
                stacklevel=2,
            )
        if NETWORKS in waiting:
            federation.networks.apply(waiting.sums.pop(NETWORKS) / weight)
