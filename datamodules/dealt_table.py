"""One table, dealt to sites whose classes are imbalanced."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lit_epgan.datamodules.partition import dirichlet
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.datamodules.site_splits import alike, shifted, thinned
from lit_epgan.datamodules.site_tables import SiteTables
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for

DealtKind = Literal["iid", "shifted", "dirichlet"]


class DealtTable(SiteTables):
    """One table, dealt to sites and thinned there to a ratio of the classes (GRAFFL, section 4.3).

    Subclasses override ``whole``.

    Args:
        sites: how many there are.
        partition: ``iid``: at random, alike in their classes; ``shifted``: the classes are dealt along one direction,
            one part apart, so that the table is classified well as a whole, but not by what one site learns;
            ``dirichlet``: mostly one class for a small ``beta``.
        beta: concentration of ``dirichlet``.
        ratio: records of a site's most frequent class for one of its rarest, for each site or for all; null leaves
            the classes as they are dealt.
        options: ``features``, ``test_fraction``, ``location``, ``scale``, ``doubtful`` and ``split_seed`` of
            ``SiteTables``, and the settings of ``FederatedDataModule``; ``split_seed`` decides who holds what, too.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(
        self,
        sites: int = 3,
        partition: DealtKind = "iid",
        beta: float = 0.5,
        ratio: float | Sequence[float] | None = (5.0, 5.0, 6.0),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if sites < 1:
            raise UserError(f"data.sites is {sites}; it must be at least 1")
        if partition not in ("iid", "shifted", "dirichlet"):
            raise UserError(f"data.partition is {partition!r}: choose iid, shifted or dirichlet")
        ratios = [ratio] * sites if ratio is None or isinstance(ratio, int | float) else list(ratio)
        if len(ratios) != sites:
            raise UserError(
                f"data.ratio has {len(ratios)} numbers for {sites} sites: give one for each, or one for all"
            )
        if any(each is not None and not each >= 1 for each in ratios):
            raise UserError(f"data.ratio is {ratio}: the frequent class stands to the rare one as at least 1")
        self.sites, self.partition, self.beta, self.ratios = sites, partition, beta, ratios

    def whole(self) -> SiteRows:
        """The table that is dealt; sets ``columns`` and ``label_names``."""
        raise NotImplementedError

    def read(self) -> dict[str, SiteRows]:
        """The sites' rows.

        Raises:
            UserError: there are not enough rows for so many sites.
        """
        table = self.whole()
        if self.sites > len(table):
            raise UserError(f"data.sites is {self.sites}, but there are only {len(table)} rows: ask for fewer")
        dealt = zip(self._dealt(table), self.ratios, strict=True)
        return {f"site-{k}": self._thinned(table.at(rows), ratio, k) for k, (rows, ratio) in enumerate(dealt, start=1)}

    def _dealt(self, table: SiteRows) -> list[Tensor]:
        generator = generator_for(self.split_seed, "sites")
        if self.partition == "iid":
            return alike(table.labels, self.sites, generator)
        if self.partition == "dirichlet":
            return self._dirichlet(table.labels, generator)
        if table.features.shape[1] < 2:
            raise UserError("data.partition is 'shifted', which needs at least two columns: choose iid or dirichlet")
        return shifted(table.features, table.labels, self.sites)

    def _dirichlet(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        try:
            return dirichlet(labels, self.sites, generator, self.beta)
        except UserError as error:
            raise UserError(
                f"dirichlet with data.beta {self.beta} does not give all {self.sites} sites a row: set --data.beta to "
                "a greater positive number, or --data.sites to a smaller one"
            ) from error

    def _thinned(self, table: SiteRows, ratio: float | None, site: int) -> SiteRows:
        if ratio is None:
            return table
        return table.at(thinned(table.labels, ratio, generator_for(self.split_seed, site, "ratio")))
