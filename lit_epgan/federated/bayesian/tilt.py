"""What tilts the components of a prior: a function f of features, and the components' weights."""

import torch
from torch import Tensor, nn

from lit_epgan.inference.tilted_mixture import gumbel_softmax


class Tilt(nn.Module):
    """f (rows, J) of features (rows, width), and log weights (J,) of the components, both learned.

    Args:
        width: number of features.
        hidden: width of f's hidden layer; 0 is a linear f.
        components: J.
        temperature: of the weights' Gumbel-softmax.
    """

    def __init__(self, width: int, hidden: int, components: int, temperature: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.outer = nn.Linear(hidden or width, components)
        self.temperature = temperature
        # one component needs no weights, and draws no noise for them
        self.logits = nn.Parameter(torch.zeros(components)) if components > 1 else None

    def forward(self, features: Tensor) -> Tensor:
        """f (rows, J) of features (rows, width)."""
        f: Tensor = self.outer(self.inner(features.to(self.outer.weight.dtype)))
        return f

    def log_weights(self) -> Tensor:
        """log pi (J,): a draw of the relaxed weights."""
        if self.logits is None:
            return torch.zeros_like(self.outer.bias)
        return gumbel_softmax(self.logits, self.temperature)
