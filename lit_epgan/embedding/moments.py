"""First and second moments of features, normalised: what DP-MEPF releases in place of random Fourier features."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NormalisedMoments(nn.Module):
    """phi(h) = [h / ||h||, h^2 / ||h^2||] / sqrt(2), the square by entries (Harder et al. 2023, section 3).

    The paper releases the two means apart, each with noise of its own; one vector of both under one Gaussian mechanism
    is the same release at equal noise. Each half has norm 1 / sqrt(2), so ||phi(h)|| = 1: adding or removing one record
    moves a sum of phi by one, whatever the record. A record without any feature (h = 0)
    moves nothing, nor does one whose numbers overflow.

    Unlike a kernel's, equal means of phi do not make distributions equal: h must be features in whose means one sees
    what matters, as those of a large network that was trained on public images.
    """

    def forward(self, h: Tensor) -> Tensor:
        """phi (n, 2 d) of features h (n, d)."""
        first = F.normalize(h, dim=1)
        return torch.cat([first, F.normalize(first.square(), dim=1)], 1) / math.sqrt(2)
