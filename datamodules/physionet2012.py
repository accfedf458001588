"""Intensive care stays of the PhysioNet/CinC Challenge 2012 as hospitals of imbalanced classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from lit_epgan.datamodules.dealt_table import DealtTable
from lit_epgan.datamodules.physionet2012_parameters import DESCRIPTORS, ICU_TYPES, SERIES, Parameter
from lit_epgan.datamodules.site_rows import SiteRows
from lit_epgan.errors import UserError

if TYPE_CHECKING:
    import pandas as pd

SOURCE = "https://physionet.org/content/challenge-2012/1.0.0/"
STATISTICS = ("mean", "first", "last", "min", "max")


class PhysioNet2012DataModule(DealtTable):
    """4,000 stays of adults in intensive care and whether they died in hospital (Silva et al. 2012).

    Reads ``Outcomes-a.txt`` with the columns ``RecordID`` and ``In-hospital_death``, and for each record
    ``set-a/RECORD.txt`` with lines ``Time,Parameter,Value``. A stay's features are the descriptors at admission (the
    unit as an indicator for each of four) and of each of 37 time series its statistics over the first 48 hours.

    A value that was never measured, that is marked by -1, or that no living adult can have is filled by a public
    constant: the normal value of a healthy adult, in ``physionet2012_parameters.py``. So a test that was not made
    counts as one that nobody thought necessary, and no statistic of the stays is needed.

    Args:
        data_dir: the folder of ``set-a`` and ``Outcomes-a.txt``.
        statistics: of each time series, some of ``mean``, ``first``, ``last``, ``min`` and ``max``.
        options: as for ``DealtTable``, which splits the stays as the paper does (GRAFFL, section 4.3 and table 2).

    Raises:
        UserError: ``statistics`` are none, or unknown.
    """

    def __init__(
        self,
        data_dir: str = "data",
        statistics: Sequence[Literal["mean", "first", "last", "min", "max"]] = ("mean",),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not statistics or not set(statistics) <= set(STATISTICS):
            raise UserError(f"data.statistics is {list(statistics)}: choose some of {', '.join(STATISTICS)}")
        self.data_dir, self.statistics = Path(data_dir).expanduser(), list(statistics)

    def whole(self) -> SiteRows:
        """Every stay that has an outcome.

        Raises:
            UserError: a file is missing, or not as it was published.
        """
        import pandas as pd

        died = self._outcomes()
        stays = {record: _stay(self.data_dir / "set-a" / f"{record}.txt") for record in died.index}
        measured = pd.concat(stays, names=["Record"]).reset_index("Record")
        admission = _statistic(measured, "first", DESCRIPTORS, died.index)
        series = [_statistic(measured, name, SERIES, died.index).add_suffix(f" {name}") for name in self.statistics]
        table = pd.concat([_with_indicators(admission), *series], axis=1)
        self.columns, self.label_names = [str(name) for name in table], ["survived", "died"]
        features = torch.from_numpy(table.to_numpy(np.float64, copy=True))
        return SiteRows.complete(features, torch.from_numpy(died.to_numpy(np.int64, copy=True)))

    def _outcomes(self) -> "pd.Series":
        """0 or 1 by record."""
        path = self.data_dir / "Outcomes-a.txt"
        if not path.is_file() or not (self.data_dir / "set-a").is_dir():
            raise UserError(
                f"PhysioNet 2012 is not in {self.data_dir.absolute()}: place Outcomes-a.txt and the unpacked folder "
                f"set-a (from {SOURCE}) there, or say by --data.data_dir where they are"
            )
        table = _csv(path, ["RecordID", "In-hospital_death"])
        if table.empty or table["RecordID"].duplicated().any() or not table["In-hospital_death"].isin(["0", "1"]).all():
            raise UserError(f"{path} does not give every record once, with a death of 0 or 1; place the file anew")
        return table.set_index("RecordID")["In-hospital_death"].astype(int)


def _stay(path: Path) -> "pd.DataFrame":
    """A stay's measurements in the order of their times: strings in Parameter, numbers in Value."""
    import pandas as pd

    if not path.is_file():
        raise UserError(f"{path.absolute()} is missing, but Outcomes-a.txt names it: place the file (from {SOURCE})")
    table = _csv(path, ["Time", "Parameter", "Value"]).sort_values("Time", kind="stable")
    numbers = pd.to_numeric(table["Value"], errors="coerce")
    if numbers.isna().any():
        line = int(numbers.index[numbers.isna()].min()) + 2
        raise UserError(f"{path}, line {line}: the value is no number; place the file anew")
    return table.assign(Value=numbers)[["Parameter", "Value"]]


def _csv(path: Path, columns: list[str]) -> "pd.DataFrame":
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({str(error).splitlines()[0]}); place the file anew") from error
    if missing := [name for name in columns if name not in table]:
        raise UserError(f"{path} has no column {missing[0]!r}; place the file anew")
    return table


def _statistic(
    measured: "pd.DataFrame", statistic: str, parameters: Mapping[str, Parameter], records: "pd.Index"
) -> "pd.DataFrame":
    """A statistic of the possible values (records, parameters), and normal values where there are none."""
    import pandas as pd

    known = measured[measured["Parameter"].isin(list(parameters))]
    low, high = (known["Parameter"].map({k: getattr(p, end) for k, p in parameters.items()}) for end in ("low", "high"))
    possible = known[known["Value"].between(low, high)]
    table = possible.groupby(["Record", "Parameter"])["Value"].agg(statistic).unstack()
    whole = table.reindex(index=records, columns=pd.Index(parameters))
    return whole.fillna({name: parameter.normal for name, parameter in parameters.items()})


def _with_indicators(admission: "pd.DataFrame") -> "pd.DataFrame":
    """The descriptors with an indicator of each unit in place of its number."""
    units = {f"ICU {name}": (admission["ICUType"] == code).astype(float) for code, name in ICU_TYPES.items()}
    return admission.drop(columns="ICUType").assign(**units)
