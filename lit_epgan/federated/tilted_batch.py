"""A minibatch of the tilted distribution: own data for the likelihood, samples of the cavity for the others' sites."""

from typing import Any

import torch
from torch import Tensor


def batch_rows(batch: Any) -> Tensor:
    """The data (batch, *data_shape) of a batch: the batch itself, or its first entry."""
    rows: Tensor = batch if isinstance(batch, Tensor) else batch[0]
    return rows


def tilted_batch(own: Tensor, replay: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
    """A batch (x, y, weight) that weighs own rows ``share`` in all and the cavity's samples the rest.

    Args:
        own: rows of the client's own data (o, *data_shape).
        replay: samples of the other clients' sites (r, *data_shape).
        share: the client's share of all records, n_k / n.

    Returns:
        The rows (o + r, *data_shape), labels of -1 (none), and the rows' weights, which sum to one.
    """
    weight = own.new_empty(len(own) + len(replay))
    weight[: len(own)] = share / len(own)
    weight[len(own) :] = (1 - share) / len(replay)
    unlabelled = torch.full((len(weight),), -1, device=own.device)
    return torch.cat([own, replay.to(own)]), unlabelled, weight
