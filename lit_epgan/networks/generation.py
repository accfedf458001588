"""What a language model makes: sequences drawn from it, and those to which it gives the highest joint probability."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lit_epgan.networks.language import CIFGLanguageNetwork, State


def log_probabilities(network: CIFGLanguageNetwork, symbols: Tensor, mask: Tensor) -> Tensor:
    """log p(x_1, ..., x_T) = sum_t log p(x_t | x_1, ..., x_{t-1}): Augenstein et al. 2020, equation 1.

    Args:
        network: the model.
        symbols: int64 (batch, T), each row from its begin to its end.
        mask: bool (batch, T), where there is something.

    Returns:
        Float (batch,).
    """
    logs = network(symbols[:, :-1]).log_softmax(-1).gather(2, symbols[:, 1:, None])[..., 0]
    return (logs * mask[:, 1:]).sum(1)


@torch.no_grad()
def sampled(
    network: CIFGLanguageNetwork, count: int, longest: int, generator: torch.Generator | None = None
) -> list[list[int]]:
    """``count`` sequences drawn from the model, without their ends, cut after ``longest`` symbols.

    Args:
        network: the model.
        count: how many.
        longest: symbols of each, at most.
        generator: what draws.
    """
    device = network.output.weight.device
    symbol = torch.full((count, 1), network.begin, device=device)
    states: list[State] | None = None
    drawn = []
    for _ in range(longest):
        scores, states = network.following(symbol, states)
        scores[:, -1, network.begin] = -torch.inf  # nothing begins twice
        symbol = torch.multinomial(scores[:, -1].softmax(1), 1, generator=generator)
        drawn.append(symbol)
    rows = torch.cat(drawn, 1).tolist()
    return [row[: row.index(network.end)] if network.end in row else row for row in rows]


@dataclass(frozen=True)
class Ranked:
    """The sequences with the highest joint probability, the first first.

    Attributes:
        sequences: without their ends.
        probabilities: their joint probabilities, ends included.
        exact: whether no other sequence of at most the same length can be more probable than the last of them.
    """

    sequences: list[list[int]]
    probabilities: list[float]
    exact: bool


@torch.no_grad()
def most_probable(network: CIFGLanguageNetwork, count: int, longest: int, width: int = 4096) -> Ranked:
    """The ``count`` most probable sequences of at most ``longest`` symbols, by their joint probability (equation 1).

    Goes through the tree of prefixes level by level and keeps the ``width`` most probable of a level. A sequence is
    never more probable than its prefixes. So a prefix less probable than ``count`` sequences found is dropped for good,
    and where no more probable one was dropped the result is exact.

    Args:
        network: the model.
        count: how many.
        longest: symbols of each, at most.
        width: prefixes that are kept.
    """
    device = network.output.weight.device
    prefixes = torch.empty(1, 0, dtype=torch.int64, device=device)
    log = torch.zeros(1, device=device)
    symbol, states = torch.full((1, 1), network.begin, device=device), None
    found: list[tuple[float, list[int]]] = []
    dropped = -torch.inf
    for depth in range(longest + 1):
        scores, after = network.following(symbol, states)
        logs = log[:, None] + scores[:, -1].log_softmax(1)
        found = _best(found, logs[:, network.end], prefixes, count)
        if depth == longest:
            break
        bound = found[-1][0] if len(found) == count else -torch.inf
        open_ = logs[:, : network.begin].flatten()
        log, place = open_.topk(min(width + 1, len(open_)))
        if len(log) > width:
            dropped = max(dropped, float(log[-1]))
        alive = log[:width] > bound
        log, place = log[:width][alive], place[:width][alive]
        if not len(log):
            break
        parent, symbol = place // network.begin, (place % network.begin)[:, None]
        prefixes, states = torch.cat([prefixes[parent], symbol], 1), _of(after, parent)
    exact = dropped <= (found[-1][0] if len(found) == count else -torch.inf)
    return Ranked([row for _, row in found], torch.tensor([log for log, _ in found]).exp().tolist(), exact)


def _best(
    found: list[tuple[float, list[int]]], logs: Tensor, prefixes: Tensor, count: int
) -> list[tuple[float, list[int]]]:
    """The best ``count`` of what was found and of what ends here."""
    values, rows = logs.topk(min(count, len(logs)))
    new = zip(values.tolist(), prefixes[rows].tolist(), strict=True)
    return sorted([*found, *new], key=lambda each: -each[0])[:count]


def _of(states: Sequence[State], rows: Tensor) -> list[State]:
    return [(h[rows], c[rows]) for h, c in states]
