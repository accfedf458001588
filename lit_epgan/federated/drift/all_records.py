"""How many records all clients hold together, for algorithms whose server sums over everybody and asks a few."""

from typing import Any

from torch import Tensor

from lit_epgan.engine import Message, Server, merged, scalar

KNOWN, WEIGHT, CLIENTS = "known", "known_weight", "all_clients"


class Counted(Message):
    """A report, theta_k - theta (d,), by which a client presents itself, once: whether it is new, and n_k if it is."""

    change: Tensor = merged("mean", like="parameters")
    new: float = merged("count")
    new_records: float = merged("records")


def begin_counting(server: Server) -> None:
    for name in (KNOWN, WEIGHT):
        server.state.setdefault(name, scalar(0))


def count(server: Server, report: Any) -> None:
    for name, new in ((KNOWN, report.new), (WEIGHT, report.new_records)):
        known = server.state[name]
        server.state[name] = known + new.to(known.device)
    server.state[CLIENTS] = scalar(server.clients)


def all_records(server: Server) -> float:
    """sum n_k over all clients; who is not known yet is taken to hold as many records as those known, on average.

    It is 1 as long as nobody has any. A client that is new in a training that goes on counts from ``count`` on.
    """
    known, weight = float(server.state[KNOWN]), float(server.state[WEIGHT])
    return weight * float(server.state.get(CLIENTS, scalar(server.clients))) / known if weight > 0 else 1.0
