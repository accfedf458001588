"""Sites of which the last ones have lost training records."""

from collections.abc import Sequence
from typing import Any

from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.datamodules.site_splits import depleted
from lit_epgan.datamodules.site_tables import SiteTables
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


class ScarceTables(SiteTables):
    """Sites of a similar composition, of which the last ones have lost training records (GRAFFL, section 4.4).

    Test data stay whole, so that what a site cannot learn is seen. Subclasses override ``read``.

    Args:
        sites: how many there are.
        losing: how many of them, the last ones, have lost records.
        kept: share of its training records that such a site keeps, for each class or for all; at least one record of
            each class is kept.
        options: ``features``, ``test_fraction``, ``location``, ``scale``, ``doubtful`` and ``split_seed`` of
            ``SiteTables``, and the settings of ``FederatedDataModule``; ``split_seed`` decides what is lost, too.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(self, sites: int = 6, losing: int = 3, kept: float | Sequence[float] = 0.1, **options: Any) -> None:
        super().__init__(**options)
        if sites < 1:
            raise UserError(f"data.sites is {sites}; it must be at least 1")
        if not 0 <= losing <= sites:
            raise UserError(f"data.losing is {losing}; it must lie between 0 and the number of sites, {sites}")
        shares = [kept] if isinstance(kept, int | float) else list(kept)
        if not shares or not all(0 <= share <= 1 for share in shares):
            raise UserError(f"data.kept is {kept}; give shares of the records, from 0 to 1")
        self.sites, self.losing, self.kept = sites, losing, shares

    def training(self, site: int, table: SiteRows) -> SiteRows:
        """What a site is left with.

        Raises:
            UserError: there are not as many shares as classes.
        """
        if site < self.sites - self.losing:
            return table
        classes = len(self.label_names)
        if len(self.kept) not in (1, classes):
            raise UserError(f"data.kept has {len(self.kept)} shares for {classes} classes: give one for each, or one")
        shares = self.kept if len(self.kept) == classes else self.kept * classes
        return table.at(depleted(table.labels, shares, generator_for(self.split_seed, site, "kept")))
