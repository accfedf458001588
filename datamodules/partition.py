"""Who holds what: from labels and a generator to one index tensor per client; and which users take part.

Every kind is a pure function of its arguments: the same generator state gives the same clients, and the global random
streams are left alone. No record is given out twice.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.class_splits import Split
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

if TYPE_CHECKING:
    import pandas as pd

PartitionKind = Literal["iid", "one_class", "dirichlet", "natural"]
DIRICHLET_DRAWS = 1000


def partition(
    labels: Tensor, kind: str, clients: int, generator: torch.Generator, beta: float = 0.5, groups: Tensor | None = None
) -> list[Tensor]:
    """Deal records to clients.

    Args:
        labels: int64 tensor (n,), the class of every record.
        kind: ``iid``, ``one_class``, ``dirichlet`` or ``natural``; see the function of that name.
        clients: number of clients K.
        generator: the only source of randomness.
        beta: concentration of ``dirichlet``.
        groups: int64 tensor (n,), the group (writer, site, device) of every record, for ``natural``.

    Returns:
        K disjoint, non-empty int64 tensors of record indices. Together they hold every record once; only ``one_class``
        and ``natural`` with fewer clients than labels or groups leave the records of the others to nobody.

    Raises:
        UserError: if the kind is unknown, an argument is out of range or a client would be empty.
    """
    if clients < 1:
        raise UserError(f"A partition needs at least one client, not {clients}: set --data.clients to 1 or more.")
    if kind == "iid":
        parts = iid(labels, clients, generator)
    elif kind == "one_class":
        parts = one_class(labels, clients, generator)
    elif kind == "dirichlet":
        parts = dirichlet(labels, clients, generator, beta)
    elif kind == "natural":
        parts = natural(labels, groups, clients)
    else:
        raise UserError(f"There is no partition {kind!r}: choose one of iid, one_class, dirichlet, natural.")
    refuse_empty({str(k): part for k, part in enumerate(parts)}, kind)
    return parts


def named(parts: Sequence[Tensor]) -> dict[str, Tensor]:
    """The clients' names, numbers of as many digits, with their parts."""
    digits = len(str(len(parts) - 1))
    return {f"client-{k:0{digits}d}": part for k, part in enumerate(parts)}


def iid(labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Shuffle the records (n,) and cut them into K parts whose sizes differ by at most one."""
    _refuse_more_clients_than_records(clients, len(labels))
    return list(torch.randperm(len(labels), generator=generator).tensor_split(clients))


def one_class(labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Give client k records of the k-th smallest of L labels alone: all, or with more clients an equal share.

    Then label k mod L is client k's, and what the clients of a label hold differs by one record at most.
    """
    distinct = torch.unique(labels)
    if clients <= len(distinct):
        return _first_values(labels, clients, "one_class", "labels")
    dealt: dict[int, Tensor] = {}
    for first, label in enumerate(distinct):
        members, owners = torch.nonzero(labels == label).flatten(), range(first, clients, len(distinct))
        if len(owners) > len(members):
            raise UserError(
                f"{len(owners)} of {clients} clients cannot share the {len(members)} records of label {int(label)} in "
                "the partition 'one_class': set --data.clients to less."
            )
        shuffled = members[torch.randperm(len(members), generator=generator)]
        dealt |= dict(zip(owners, shuffled.tensor_split(len(owners)), strict=True))
    return [dealt[k] for k in range(clients)]


def natural(labels: Tensor, groups: Tensor | None, clients: int) -> list[Tensor]:
    """Give client k all records of the k-th smallest group id."""
    if groups is None:
        raise UserError(
            "The partition 'natural' needs a group for every record, and these data carry none: "
            "choose iid, one_class or dirichlet."
        )
    if groups.shape != labels.shape:
        raise UserError(f"Partition 'natural' got {len(groups)} groups for {len(labels)} records: give one for each.")
    return _first_values(groups, clients, "natural", "groups")


def dirichlet(labels: Tensor, clients: int, generator: torch.Generator, beta: float) -> list[Tensor]:
    """Share out every class c by its own draw of proportions: p_c ~ Dirichlet(beta, ..., beta) over the K clients.

    Proportions are drawn anew, at most ``DIRICHLET_DRAWS`` times, until no client is empty (Yurochkin et al. 2019; Hsu
    et al. 2019). Small beta: few classes per client; large beta: nearly i.i.d.
    """
    if not 0 < beta < float("inf"):
        raise UserError(f"The Dirichlet's beta must be a positive number, not {beta}: set --data.beta, e.g. to 0.5.")
    _refuse_more_clients_than_records(clients, len(labels))
    members = [torch.nonzero(labels == c).flatten() for c in torch.unique(labels)]
    counts = _dirichlet_counts([len(m) for m in members], clients, generator, beta)
    dealt: list[list[Tensor]] = [[] for _ in range(clients)]
    for member, row in zip(members, counts.tolist(), strict=True):
        shuffled = member[torch.randperm(len(member), generator=generator)]
        for client, piece in enumerate(torch.split(shuffled, row)):
            dealt[client].append(piece)
    return [torch.cat(pieces) for pieces in dealt]


def _dirichlet_counts(sizes: Sequence[int], clients: int, generator: torch.Generator, beta: float) -> np.ndarray:
    """Counts (classes, clients) whose rows sum to the class sizes and whose columns are not empty."""
    seed = int(torch.randint(2**63 - 1, (), generator=generator))
    numpy_generator = np.random.default_rng(seed)  # NumPy's Dirichlet neither underflows at small beta nor is private
    column = np.asarray(sizes)[:, None]
    for _ in range(DIRICHLET_DRAWS):
        shares = numpy_generator.dirichlet([beta] * clients, size=len(sizes))
        cuts = np.rint(shares.cumsum(axis=1) * column).astype(np.int64)
        cuts[:, -1] = column[:, 0]  # the cumulative sum of the shares is 1 only up to rounding
        counts = np.diff(cuts, axis=1, prepend=0)
        if counts.sum(axis=0).all():
            return counts
    empty = int(np.flatnonzero(counts.sum(axis=0) == 0)[0])
    raise UserError(
        f"None of {DIRICHLET_DRAWS} draws of dirichlet(beta={beta:g}) gave all {clients} clients a record "
        f"(in the last one client {empty} held none): use a larger --data.beta or fewer --data.clients."
    )


def _refuse_more_clients_than_records(clients: int, records: int) -> None:
    if clients > records:
        raise UserError(
            f"{clients} clients cannot share {records} records: client {records} would hold none; "
            f"set --data.clients to at most {records}."
        )


def _first_values(values: Tensor, clients: int, kind: str, noun: str) -> list[Tensor]:
    distinct = torch.unique(values)
    if clients > len(distinct):
        raise UserError(
            f"The partition '{kind}' of {clients} clients needs as many {noun}, and the data have {len(distinct)}: "
            f"client {len(distinct)} would hold no record; set --data.clients to at most {len(distinct)}."
        )
    return [torch.nonzero(values == value).flatten() for value in distinct[:clients]]


def refuse_empty(parts: Mapping[str, Tensor], what: str) -> None:
    """Raise a UserError that names the first client without a record."""
    for client, part in parts.items():
        if len(part) == 0:
            raise UserError(f"Client {client} of partition '{what}' holds no record: use fewer clients or more data.")


def hold_out(part: Tensor, fraction: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split one client's indices (n,) into (kept, held out): floor(fraction * n) are held out, so one is kept."""
    if not 0 <= fraction < 1:
        raise UserError(
            f"The validation fraction must lie in [0, 1), not {fraction}: set --data.val_fraction to 0.1, say."
        )
    shuffled = part[torch.randperm(len(part), generator=generator)]
    held = int(fraction * len(part))
    return shuffled[held:], shuffled[:held]


def partition_table(labels: Mapping[str, Tensor]) -> "pd.DataFrame":
    """Count the labels (n_k,), int64, by client (rows, in the given order) and class (columns, sorted)."""
    import pandas as pd

    classes = torch.unique(torch.cat(list(labels.values())))
    columns = {client: torch.searchsorted(classes, own) for client, own in labels.items()}
    counts = [torch.bincount(column, minlength=len(classes)).tolist() for column in columns.values()]
    index = pd.Index(list(labels), name="client", dtype=object)  # a folder's name need not be UTF-8
    return pd.DataFrame(counts, index=index, columns=pd.Index(classes.tolist(), name="class"), dtype="int64")


def check_dealing(clients: int | None, held_out: float) -> None:
    """Refuse to deal nobody (``clients``, None for all that are left), or to hold out everybody (``held_out``, a share
    in [0, 1))."""
    at_least(1, "data", clients=clients)
    if not 0 <= held_out < 1:
        raise UserError(f"data.held_out is {held_out}; it is a share of the users, from 0 to below 1")


def deal(
    names: list[str], held_out: float, clients: int | None, seed: int, split: Split = "fixed", own_seed: int = 0
) -> tuple[list[str], list[str]]:
    """The names of those who take part, in their order, and of those held out, a share of all, as ``seed`` permutes.

    ``tuning`` holds out others, as many, in the place of these; ``by_seed`` draws those held out anew among all but the
    ones of ``tuning``, by ``own_seed``.

    Raises:
        UserError: there are not as many users as are to take part, or nobody is left beside both who are held out.
    """
    order = [names[k] for k in torch.randperm(len(names), generator=generator_for(seed, "users")).tolist()]
    cut = round(held_out * len(names))
    others, left = order[:cut], order[cut:]
    if split != "fixed":
        tuned, left = left[:cut], left[cut:]
        if not left:
            raise UserError(f"data.held_out is {held_out}: the split {split!r} holds out twice as many; use less")
        if split == "tuning":
            others, left = tuned, others + left
        else:
            drawn = others + left
            drawn = [
                drawn[k] for k in torch.randperm(len(drawn), generator=generator_for(seed, own_seed, "users")).tolist()
            ]
            others, left = drawn[:cut], tuned + drawn[cut:]
    if clients is not None and clients > len(left):
        raise UserError(
            f"data.clients is {clients}, but only {len(left)} users are left of {len(names)}: ask for fewer"
        )
    return sorted(left[:clients]), sorted(others)
