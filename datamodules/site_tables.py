"""Sites that hold rows of one table: split, checked and standardised without a row leaving its site."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.pooled_scaling import pooled_location, pooled_scale
from lit_epgan.datamodules.site_checks import check_numbers, check_sites
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.datamodules.site_splits import stratified
from lit_epgan.errors import UserError
from lit_epgan.listing import few
from lit_epgan.randomness import generator_for

ROUNDING = 1e-12  # a spread so small beside the mean is that of a constant


class SiteTables(FederatedDataModule):
    """Tables by site, whose rows are split into training and test data at the site, stratified by class.

    Features are standardised. By default the numbers are the mean and the standard deviation of all sites' training
    rows together. Each site releases two sums of each column for them, and the server learns every site's mean and
    variance: aggregates to which no noise is added, and which say much where a site has few rows. Give ``location``
    and ``scale`` where a guarantee of privacy is to cover everything that leaves a site: public numbers reveal nothing.

    Subclasses override ``read``.

    Args:
        features: names of the columns to use; by default all.
        test_fraction: share of each class of each site that is test data; validation data are the same.
        location, scale: public numbers m and s, one for each column or one for all: a feature x becomes (x - m) / s.
        doubtful: what happens to a site with one class, with a constant column, or with no more training records than
            columns: ``refuse`` or ``warn``.
        split_seed: decides which rows are test data; null takes ``seed``, so that each seed has its own.
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``max_local_steps``, ``clients_per_round``,
            ``num_workers``, ``seed`` and ``collate_fn`` of FederatedDataModule.

    Attributes:
        columns: names of the columns, known once the data are loaded, as the following are.
        label_names: the classes in the order of their indices.
        observed: by site a bool tensor (d,): False for a column that is filled by 0, in standardised units.

    Raises:
        UserError: a number is out of its range.
    """

    def __init__(
        self,
        features: Sequence[str] | None = None,
        test_fraction: float = 0.3,
        location: float | Sequence[float] | None = None,
        scale: float | Sequence[float] | None = None,
        doubtful: Literal["refuse", "warn"] = "refuse",
        split_seed: int | None = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        if not 0 <= test_fraction < 1:
            raise UserError(f"data.test_fraction is {test_fraction}; it is a share of the rows, from 0 to below 1")
        if (location is None) != (scale is None):
            raise UserError("data.location and data.scale belong together: give both, or none for pooled statistics")
        self.features, self.test_fraction = features, test_fraction
        self.split_seed = self.seed if split_seed is None else split_seed
        self.location, self.scale, self.doubtful = location, scale, doubtful
        self.columns: list[str] = []
        self.label_names: list[str] = []
        self.observed: dict[str, Tensor] = {}

    def read(self) -> dict[str, SiteRows]:
        """Every site's rows; sets ``columns`` and ``label_names``."""
        raise NotImplementedError

    def load(self) -> ClientData:
        """Every site's training and test data: float32 tensors (n, d) and int64 tensors (n,).

        Raises:
            UserError: names the site, the column and the remedy.
        """
        tables = self._selected(self.read())
        check_numbers(tables, self.columns)
        splits = {name: self._split(name, table) for name, table in tables.items()}
        train = {name: kept for name, (kept, _) in splits.items()}
        check_sites(train, self.columns, self.label_names, self.doubtful)
        location, scale = self._scaling(train)
        self.observed = {name: table.observed for name, table in train.items()}
        test = {name: _dataset(out, location, scale) for name, (_, out) in splits.items() if len(out.labels)}
        return ClientData(
            train={name: _dataset(table, location, scale) for name, table in train.items()},
            val=test or None,
            test=test or None,
            labels={name: table.labels for name, table in train.items()},
        )

    def _selected(self, tables: dict[str, SiteRows]) -> dict[str, SiteRows]:
        if self.features is None:
            return tables
        if unknown := [name for name in self.features if name not in self.columns]:
            raise UserError(f"data.features names {few(unknown)}, but the columns are {few(self.columns)}")
        chosen = [self.columns.index(name) for name in self.features]
        self.columns = list(self.features)
        return {name: table.only(chosen) for name, table in tables.items()}

    def _split(self, name: str, table: SiteRows) -> tuple[SiteRows, SiteRows]:
        generator = generator_for(self.split_seed, name, "test")
        kept, out = stratified(table.labels, self.test_fraction, generator)
        return table.at(kept), table.at(out)

    def _scaling(self, train: Mapping[str, SiteRows]) -> tuple[Tensor, Tensor]:
        if self.location is not None and self.scale is not None:
            return self._public("location", self.location), self._public("scale", self.scale)
        rows = [table.features for table in train.values()]
        location = pooled_location(rows)
        scale = pooled_scale(rows, location)
        return location, torch.where(scale > ROUNDING * location.abs(), scale, 1.0)

    def _public(self, what: str, numbers: float | Sequence[float]) -> Tensor:
        given = torch.as_tensor(numbers, dtype=torch.float64)
        if given.ndim and len(given) != len(self.columns):
            raise UserError(f"data.{what} has {len(given)} numbers for {len(self.columns)} columns: give one for each")
        if not given.isfinite().all() or (what == "scale" and not (given > 0).all()):
            raise UserError(f"data.{what} must be finite" + (" and above 0" if what == "scale" else ""))
        return given


def _dataset(table: SiteRows, location: Tensor, scale: Tensor) -> TensorDataset:
    standardised = torch.where(table.observed, (table.features - location) / scale, 0.0)
    return TensorDataset(standardised.float(), table.labels)
