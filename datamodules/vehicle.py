"""Vehicles that drive past microphones and seismometers, a sensor for a site."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_epgan.datamodules.scarce_tables import ScarceTables
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.errors import UserError

SOURCE = "https://github.com/litian96/fair_flearn, data/vehicle/README.md"


class VehicleDataModule(ScarceTables):
    """23 sensors that tell one kind of vehicle from another by 100 acoustic and seismic features (Duarte and Hu 2004).

    Reads ``vehicle.mat`` as published with MOCHA (Smith et al. 2017): cell arrays ``X`` and ``Y`` with a cell for each
    sensor, X_k of shape (n_k, 100) and Y_k of shape (n_k, 1) in {-1, 1}. The first six sensors are the paper's sites
    (GRAFFL, section 4.4). Its cut-offs (4/5, 20/21, 41/42) say that a site with n % of its samples had one of the
    negative class left: for n = 10 that is ``kept`` of 0 and 0.1.

    Args:
        data_dir: the folder of ``vehicle.mat``.
        sites: how many sensors take part, from the first.
        losing: as for ``ScarceTables``.
        kept: as for ``ScarceTables``; the classes are -1 and 1 in this order.
        doubtful: as for ``SiteTables``; by default a warning, since a site that has lost its samples is doubtful.
        options: as for ``ScarceTables``.
    """

    def __init__(
        self,
        data_dir: str = "data",
        sites: int = 6,
        losing: int = 3,
        kept: float | Sequence[float] = 0.1,
        doubtful: Literal["refuse", "warn"] = "warn",
        **options: Any,
    ) -> None:
        super().__init__(sites, losing, kept, doubtful=doubtful, **options)
        self.path = Path(data_dir).expanduser() / "vehicle.mat"

    def read(self) -> dict[str, SiteRows]:
        """The first sensors' samples.

        Raises:
            UserError: the file is missing, or not as it was published.
        """
        features, labels = self._cells()
        if self.sites > len(features):
            raise UserError(f"data.sites is {self.sites}, but {self.path} has {len(features)} sensors: ask for fewer")
        pairs = zip(features[: self.sites], labels[: self.sites], strict=True)
        sites = {f"sensor-{k}": self._site(k, x, y) for k, (x, y) in enumerate(pairs, start=1)}
        widths = {table.features.shape[1] for table in sites.values()}
        if len(widths) > 1:
            raise UserError(f"{self.path}: the sensors have {sorted(widths)} features; place the published file anew")
        self.columns, self.label_names = [str(column) for column in range(widths.pop())], ["-1", "1"]
        return sites

    def _cells(self) -> tuple[np.ndarray, np.ndarray]:
        from scipy.io import loadmat  # other data sets do without it

        if not self.path.is_file():
            raise UserError(
                f"there is no {self.path.absolute()}: place vehicle.mat (from {SOURCE}) there, or say by "
                "--data.data_dir which folder holds it"
            )
        try:
            content = loadmat(self.path, variable_names=["X", "Y"])
        except NotImplementedError as error:
            raise UserError(f"{self.path} is in MATLAB's format 7.3: save it anew with save(..., '-v7')") from error
        except Exception as error:  # whatever the reader trips over in a damaged file
            raise UserError(f"{self.path} is no whole MATLAB file ({error}); place it anew") from error
        cells = [np.ravel(content.get(name, 0.0)) for name in ("X", "Y")]
        if any(cell.dtype != object for cell in cells) or len(cells[0]) != len(cells[1]):
            raise UserError(f"{self.path} has no cell arrays X and Y of one length; place the published file anew")
        return cells[0], cells[1]

    def _site(self, sensor: int, x: np.ndarray, y: np.ndarray) -> SiteRows:
        where = f"{self.path}, sensor {sensor}"
        if not isinstance(x, np.ndarray) or x.ndim != 2 or x.dtype.kind not in "fiu" or y.shape != (len(x), 1):
            raise UserError(f"{where}: X is {x.shape} and Y {y.shape} instead of numbers (n, d) and (n, 1)")
        if y.dtype.kind not in "fi" or not np.isin(y, (-1, 1)).all():
            raise UserError(f"{where}: Y holds other labels than -1 and 1; place the published file anew")
        features = torch.from_numpy(x.astype(np.float64))
        return SiteRows.complete(features, torch.from_numpy((y.ravel() > 0).astype(np.int64)))
