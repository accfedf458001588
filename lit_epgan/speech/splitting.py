"""How mixtures grow: which get another Gaussian, and where it is put."""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

PERTURBATION, POWER, LEAST_COUNT = 0.01, 0.2, 20.0  # as in Kaldi's recipes


def split_targets(occupancy: Sequence[float], wanted: int) -> list[int]:
    """Gaussians of each mixture when all have ``wanted``: the next one goes where occupancy^.2 / Gaussians is highest.

    A mixture of which every Gaussian would have no more than 20 frames gets no further one, as in Kaldi; nor is there
    one to get when all are such.

    Args:
        occupancy: frames of each mixture.
        wanted: in all mixtures together.
    """
    targets = [1] * len(occupancy)
    queue = [(-(frames**POWER), j) for j, frames in enumerate(occupancy)]
    heapq.heapify(queue)
    total = len(targets)
    while total < wanted and queue:
        _, j = heapq.heappop(queue)
        if (targets[j] + 1) * LEAST_COUNT < occupancy[j]:
            targets[j] += 1
            total += 1
            heapq.heappush(queue, (-(occupancy[j] ** POWER) / targets[j], j))
    return targets


def split(mixture: Any, target: int, rng: np.random.Generator) -> None:
    """Halve the heaviest Gaussian until there are so many; its halves' means lie .01 r s to either side, r ~ N(0, I).

    Kaldi's own does this from a seed that is not ours to choose, and so no two alignments of a corpus would be alike.

    Args:
        mixture: Kaldi's; changed in place.
        target: Gaussians wanted, not fewer than there are.
        rng: what r is drawn from.
    """
    weights, means, inverse = (
        np.array(part, np.float64) for part in (mixture.weights, mixture.means, mixture.inv_vars)
    )
    while len(weights) < target:
        heaviest = int(weights.argmax())
        weights[heaviest] /= 2
        step = PERTURBATION * rng.standard_normal(means.shape[1]) / np.sqrt(inverse[heaviest])
        weights, inverse = np.append(weights, weights[heaviest]), np.vstack([inverse, inverse[heaviest]])
        means = np.vstack([means, means[heaviest] + step])
        means[heaviest] -= step
    mixture.resize(len(weights), means.shape[1])
    mixture.set_weights(weights.astype(np.float32))
    mixture.set_invvars_and_means(inverse.astype(np.float32), means.astype(np.float32))
    mixture.compute_gconsts()
