"""The embedded wine data as sites, of which the last ones have hardly any wine of one grower."""

from collections.abc import Sequence
from typing import Any

import torch

from lit_epgan.datamodules.scarce_tables import ScarceTables
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.datamodules.site_splits import alike
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


class WineDataModule(ScarceTables):
    """178 wines of three growers with 13 measurements each (Forina et al. 1991; embedded in scikit-learn).

    By default six sites, of which the last three keep a tenth of the third grower's wines for training, but at least
    one: the scarce data of GRAFFL, section 4.4, with wine for vehicles.

    Args:
        sites: as for ``ScarceTables``.
        losing: as for ``ScarceTables``.
        kept: as for ``ScarceTables``.
        options: as for ``ScarceTables``.
    """

    def __init__(
        self, sites: int = 6, losing: int = 3, kept: float | Sequence[float] = (1.0, 1.0, 0.1), **options: Any
    ) -> None:
        super().__init__(sites, losing, kept, **options)

    def read(self) -> dict[str, SiteRows]:
        """scikit-learn's table, dealt to sites that are alike.

        Raises:
            UserError: there are more sites than wines.
        """
        from sklearn.datasets import load_wine  # other data sets do without it

        wine = load_wine()
        self.columns, self.label_names = list(wine.feature_names), ["grower 1", "grower 2", "grower 3"]
        table = SiteRows.complete(torch.from_numpy(wine.data), torch.from_numpy(wine.target).long())
        if self.sites > len(table):
            raise UserError(f"data.sites is {self.sites}, but there are only {len(table)} wines: ask for fewer")
        parts = alike(table.labels, self.sites, generator_for(self.split_seed, "sites"))
        return {f"site-{k}": table.at(rows) for k, rows in enumerate(parts, start=1)}
