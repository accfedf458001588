"""Powers of one variable."""

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError


class PolynomialFeatures(nn.Module):
    """x -> (x^degree, ..., x, 1); nothing to train.

    Args:
        degree: the highest power.

    Raises:
        UserError: if it is negative.
    """

    def __init__(self, degree: int = 3) -> None:
        super().__init__()
        if degree < 0:
            raise UserError(f"PolynomialFeatures' degree is {degree}; it must be 0 or more")
        self.degree = degree
        self.out_features = degree + 1

    def forward(self, x: Tensor) -> Tensor:
        """Features (rows, degree + 1) of x (rows, 1)."""
        return x ** torch.arange(self.degree, -1, -1, device=x.device)
