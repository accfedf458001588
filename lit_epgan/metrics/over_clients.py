"""How a metric differs between clients: its means, its spread, and whom the model serves worst."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lit_epgan.lib.text import csv_cell

if TYPE_CHECKING:
    import pandas as pd

MEAN, WEIGHTED, SPREAD = "mean_over_clients", "weighted_mean_over_clients", "std_over_clients"
WORST, WHO = "worst_client", "worst_client_index"
RECORDS, WORST_IN = "records", "worst_in"


def worst_client(values: Mapping[int, float], higher_is_better: bool) -> int:
    """The client with the worst value; NaN is worse than any number, and of equal values the first counts."""
    sign = 1 if higher_is_better else -1
    return min(values, key=lambda client: (not math.isnan(values[client]), sign * values[client]))


def over_clients(
    values: Mapping[int, float], records: Mapping[int, int], higher_is_better: bool | None
) -> dict[str, float]:
    """Numbers that say how a metric differs between clients.

    With v_k a client's value and n_k its records, over K clients:

        mean_over_clients           m = sum_k v_k / K, in which every client counts the same (the macro mean)
        weighted_mean_over_clients  sum_k n_k v_k / sum_k n_k, in which every record counts the same
        std_over_clients            sqrt(sum_k (v_k - m)^2 / K), the spread
        worst_client                the worst v_k
        worst_client_index          whose it is

    Args:
        values: v_k by client; at least one.
        records: n_k by client: records that the values were measured on.
        higher_is_better: which way is better; None: not known, and then there is no worst client.
    """
    mean = sum(values.values()) / len(values)
    total = sum(records[client] for client in values)
    weighted = sum(records[client] * value for client, value in values.items()) / total if total else math.nan
    spread = math.hypot(*(value - mean for value in values.values())) / math.sqrt(len(values))  # no square overflows
    found = {MEAN: mean, WEIGHTED: weighted, SPREAD: spread}
    if higher_is_better is not None:
        who = worst_client(values, higher_is_better)
        found |= {WORST: values[who], WHO: float(who)}
    return found


@dataclass
class ClientResults:
    """What one evaluation has measured at each client: values by metric and client's index, where a metric is defined;
    names and numbers of records by index; and ``higher_is_better`` by metric, None where it is not known."""

    names: list[str] = field(default_factory=list)
    records: dict[int, int] = field(default_factory=dict)
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    higher_is_better: dict[str, bool | None] = field(default_factory=dict)

    def worst(self) -> dict[str, int]:
        """The worst client's index of each metric whose direction is known."""
        directed = {name: way for name, way in self.higher_is_better.items() if way is not None}
        return {name: worst_client(self.values[name], way) for name, way in directed.items()}

    def table(self) -> "pd.DataFrame":
        """A row for each client: its ``records``, every metric, and ``worst_in``, the metrics in which it is worst."""
        import pandas as pd

        worst = self.worst()
        rows = [
            {
                RECORDS: n,
                **{name: values.get(client, math.nan) for name, values in self.values.items()},
                WORST_IN: " ".join(name for name, who in worst.items() if who == client),
            }
            for client, n in self.records.items()
        ]
        return pd.DataFrame(
            rows, index=pd.Index([csv_cell(self.names[k]) for k in self.records], name="client", dtype=object)
        )
