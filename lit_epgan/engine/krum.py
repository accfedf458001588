"""Krum: the changes that stand closest to each other."""

import torch
from torch import Tensor

from lit_epgan.engine.aggregation import Robust
from lit_epgan.errors import UserError


class Krum(Robust):
    """The mean of the ``kept`` changes with the lowest scores (Blanchard et al. 2017, section 4).

        score(k) = sum of || x_k - x_j ||^2 over the n - wrong - 2 changes x_j nearest to x_k

    It bounds what ``wrong`` clients can do together where n >= 2 wrong + 3 and honest clients' changes are alike. Where
    honest clients differ, as hospitals do, it leaves out the unusual ones, wrong or not; and a change that is close to
    others in most coordinates and wrong in few passes. Every entry of a report is judged by itself.

    Args:
        wrong: clients of a round that may be wrong, at most.
        kept: changes of which the mean is taken; 1 is Krum, more Multi-Krum.

    Raises:
        UserError: a number out of its range; in a round, too few clients.
    """

    def __init__(self, wrong: int = 1, kept: int = 1) -> None:
        super().__init__()
        if wrong < 0 or kept < 1:
            raise UserError(f"Krum's wrong is {wrong} and kept {kept}; they must be at least 0 and 1")
        self.wrong, self.kept = wrong, kept

    def centre(self, changes: Tensor) -> Tensor:
        """The mean (d,) of the chosen of changes (clients, d)."""
        clients = len(changes)
        if clients < max(2 * self.wrong + 3, self.kept):
            raise UserError(
                f"Krum with wrong {self.wrong} and kept {self.kept} needs at least "
                f"{max(2 * self.wrong + 3, self.kept)} clients, and a round has {clients}: ask more, or lower them"
            )
        distances = torch.cdist(changes, changes, compute_mode="donot_use_mm_for_euclid_dist").double().square()
        nearest = distances.sort(dim=1).values[:, 1 : clients - self.wrong - 1]  # the first is its own, 0
        chosen = nearest.sum(1).sort(stable=True).indices[: self.kept]
        return changes[chosen.sort().values].mean(0)
