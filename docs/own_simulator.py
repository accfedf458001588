"""A user's own simulator: outbreaks in hospital wards, of which a share is reported. Its likelihood is intractable.

python -m lit_epgan fit --config graffl_toy.yaml --model.simulator own_simulator.WardOutbreaks --data DATA, in the
folder of this file, with a record of DATA the reported cases of one ward's outbreak in each week.
"""

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Beta, LogNormal

from lit_epgan.bayes import Independent


class WardOutbreaks(Independent):
    """A chain-binomial epidemic in a ward of ``beds``: one is ill at first; new cases are counted by week."""

    def __init__(self, beds: int = 20, weeks: int = 6) -> None:
        priors = {"infection": LogNormal(0.0, 0.5), "recovery": Beta(2.0, 2.0), "reported": Beta(4.0, 2.0)}
        super().__init__(priors, dimensions=weeks)
        self.beds = beds

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        rng = np.random.default_rng(int(torch.randint(2**62, (1,), generator=generator)))
        infection, recovery, reported = (values[name].numpy()[:, None] for name in self.priors)
        ill = np.ones((len(infection), records), dtype=int)
        well, seen = self.beds - ill, []
        for _ in range(self.dimensions):
            new = rng.binomial(well, 1 - np.exp(-infection * ill / self.beds))
            well, ill = well - new, ill + new - rng.binomial(ill, recovery)
            seen.append(rng.binomial(new, reported))
        return torch.from_numpy(np.stack(seen, -1)).float()
