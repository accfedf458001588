"""How many records all clients hold together, for algorithms whose server sums over everybody and asks a few."""

from lit_epgan.engine import Count, Report, Server, Total, scalar

KNOWN, WEIGHT = "known", "known_weight"


def begin_counting(server: Server) -> None:
    """Nobody is known yet."""
    for name in (KNOWN, WEIGHT):
        server.state.setdefault(name, scalar(0))


def presented(weight: float, is_new: bool) -> Report:
    """The entries of a report by which a client presents itself, once.

    Args:
        weight: n_k.
        is_new: whether it has not done so before.
    """
    return {KNOWN: Count(is_new), WEIGHT: Count(weight * is_new, True)}


def count(server: Server, total: Total) -> None:
    """Take in who has presented themselves."""
    for name in (KNOWN, WEIGHT):
        known = server.state[name]
        server.state[name] = known + total[name].to(known.device)


def all_records(server: Server) -> float:
    """sum n_k over all clients; who is not known yet is taken to hold as many records as those known, on average.

    It is 1 as long as nobody has any.
    """
    known, weight = float(server.state[KNOWN]), float(server.state[WEIGHT])
    return weight * server.clients / known if weight > 0 else 1.0
