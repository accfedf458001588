"""Any table whose rows belong to users, a client each: a CSV file with a column that says whose a row is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.client_data import ClientData, numbers_first
from lit_epgan.datamodules.partition import check_dealing, deal
from lit_epgan.lib.csv_table import read_csv_table
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

if TYPE_CHECKING:
    import pandas as pd


class TableDataModule(FederatedDataModule):
    """Rows of a CSV file by user: numeric features and a class.

    Features are taken as they are: scale them in the file, by numbers that are known without the users' data.

    Args:
        path: of the file, with a line of column names.
        user: the column of users' names.
        label: the column of classes.
        features: the columns of numbers; by default all others.
        classes: the classes in the order of their indices; by default those of the file, sorted.
        clients: how many users take part, drawn at random; by default all.
        held_out: share of all users who take part in nothing, and whose rows are the validation and test data.
        split_seed: decides who is held out and who takes part.
        federated: settings of ``FederatedDataModule``.

    Attributes:
        label_names: the name of label 0, 1, ..., known once the data are loaded.
    """

    def __init__(
        self,
        path: str = "table.csv",
        user: str = "user",
        label: str = "label",
        features: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        clients: int | None = None,
        held_out: float = 0.2,
        split_seed: int = 7,
        **federated: Any,
    ) -> None:
        super().__init__(**federated)
        check_dealing(clients, held_out)
        self.path, self.user, self.label, self.features = Path(path).expanduser(), user, label, features
        self.classes, self.clients_wanted, self.held_out, self.split_seed = classes, clients, held_out, split_seed
        self.label_names: list[str] = []

    def load(self) -> ClientData:
        """Deal the users: features, float tensors (n, d), and labels, int64 tensors (n,). UserError: the file is
        missing, or not such a table."""
        table = self._read()
        features = self._features(table)
        labels = torch.from_numpy(self._labels(table))
        rows = {str(name): torch.from_numpy(each) for name, each in table.groupby(self.user).indices.items()}
        names, others = deal(sorted(rows), self.held_out, self.clients_wanted, self.split_seed)
        sets = {name: TensorDataset(features[own], labels[own]) for name, own in rows.items()}
        held = torch.cat([rows[name] for name in others]) if others else None
        held_out = None if held is None else TensorDataset(features[held], labels[held])
        return ClientData(
            train={name: sets[name] for name in names},
            val=held_out,
            test=held_out,
            labels={name: labels[rows[name]] for name in names},
        )

    def _read(self) -> "pd.DataFrame":
        import pandas as pd

        if not self.path.is_file():
            raise UserError(
                f"there is no table {self.path.absolute()}: place a CSV file with the columns {self.user!r} and "
                f"{self.label!r} there, or say by --data.path where it is"
            )
        found = read_csv_table(self.path, [self.user, self.label, *(self.features or [])])
        if not found.rows:
            raise UserError(f"{self.path} has no rows")
        table = pd.DataFrame(found.rows, columns=found.columns, index=found.lines, dtype=str)
        for name in (self.user, self.label):
            for line in table.index[table[name] == ""]:
                raise UserError(f"{self.path}, line {line}: the column {name!r} is empty")
        return table

    def _features(self, table: "pd.DataFrame") -> torch.Tensor:
        columns = list(self.features or [str(name) for name in table if name not in (self.user, self.label)])
        if not columns:
            raise UserError(f"{self.path} has no columns of features beside {self.user!r} and {self.label!r}")
        if "" in columns:
            raise UserError(
                f"{self.path}: the first line gives column {list(table).index('') + 1} no name: name or remove it, or "
                "name the columns of numbers by --data.features"
            )
        return torch.stack([self._numbers(name, table[name]) for name in columns], 1)

    def _numbers(self, name: str, column: "pd.Series") -> torch.Tensor:
        import pandas as pd

        numbers = pd.to_numeric(column, errors="coerce").to_numpy(np.float32)
        for line in column.index[~np.isfinite(numbers)]:
            raise UserError(
                f"{self.path}, line {line}: '{column[line]}' in the column {name!r} is no number: mend it, or name the "
                "columns of numbers by --data.features"
            )
        return torch.from_numpy(numbers)

    def _labels(self, table: "pd.DataFrame") -> np.ndarray:
        import pandas as pd

        self.numbers_own_classes = self.classes is None
        found = sorted(table[self.label].unique(), key=numbers_first)
        self.label_names = [str(name) for name in self.classes] if self.classes is not None else found
        if unknown := [name for name in found if name not in self.label_names]:
            raise UserError(f"{self.path} has rows of the class {few(unknown)}, which data.classes does not name")
        return pd.Categorical(table[self.label], categories=self.label_names).codes.astype(np.int64)
