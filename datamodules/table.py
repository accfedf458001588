"""Any table whose rows belong to users, a client each: a CSV file with a column that says whose a row is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.base import ClientData, FederatedDataModule
from lit_epgan.datamodules.dealing import check_dealing, deal
from lit_epgan.errors import UserError
from lit_epgan.listing import few


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
        federated: ``batch_size``, ``local_steps``, ``local_epochs``, ``max_local_steps``, ``clients_per_round``,
            ``num_workers``, ``seed`` and ``collate_fn`` of FederatedDataModule.

    Raises:
        UserError: a number is out of its range.
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

    def load(self) -> ClientData:
        """Deal the users: features, float tensors (n, d), and labels, int64 tensors (n,).

        Raises:
            UserError: the file is missing, or not such a table.
        """
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

    def _read(self) -> pd.DataFrame:
        if not self.path.is_file():
            raise UserError(
                f"there is no table {self.path.absolute()}: place a CSV file with the columns {self.user!r} and "
                f"{self.label!r} there, or say by --data.path where it is"
            )
        try:
            table = pd.read_csv(self.path, dtype={self.user: "string", self.label: "string"})
        except (OSError, ValueError, pd.errors.ParserError) as error:
            raise UserError(
                f"{self.path} cannot be read as a CSV file ({str(error).splitlines()[0]}): mend it"
            ) from error
        wanted = [self.user, self.label, *(self.features or [])]
        if missing := [name for name in wanted if name not in table]:
            raise UserError(f"{self.path} has no column {few(missing)}: its columns are {few(list(map(str, table)))}")
        if not len(table):
            raise UserError(f"{self.path} has no rows")
        for name in (self.user, self.label):
            if table[name].isna().any():
                raise UserError(f"{self.path}, line {_line(table[name].isna())}: the column {name!r} is empty")
        return table

    def _features(self, table: pd.DataFrame) -> torch.Tensor:
        columns = self.features or [str(name) for name in table if name not in (self.user, self.label)]
        if not columns:
            raise UserError(f"{self.path} has no columns of features beside {self.user!r} and {self.label!r}")
        for name in columns:
            numbers = pd.to_numeric(table[name], errors="coerce").astype("float32")
            wrong = ~np.isfinite(numbers.to_numpy())
            if wrong.any():
                line = _line(pd.Series(wrong))
                found = table[name].iloc[line - 2]
                raise UserError(
                    f"{self.path}, line {line}: '{found}' in the column {name!r} is no number: mend it, or name the "
                    "columns of numbers by --data.features"
                )
            table[name] = numbers
        return torch.tensor(table[columns].to_numpy(np.float32))

    def _labels(self, table: pd.DataFrame) -> np.ndarray:
        self.numbers_own_classes = self.classes is None
        found = sorted(table[self.label].unique(), key=_numbers_first)
        classes = [str(name) for name in self.classes] if self.classes is not None else found
        if unknown := [name for name in found if name not in classes]:
            raise UserError(f"{self.path} has rows of the class {few(unknown)}, which data.classes does not name")
        return pd.Categorical(table[self.label], categories=classes).codes.astype(np.int64)


def _line(wrong: pd.Series) -> int:
    """The line of the file in which the first such row stands; the names are line 1."""
    return int(np.flatnonzero(wrong.to_numpy())[0]) + 2


def _numbers_first(label: str) -> tuple[int, int, str]:
    """Sorts 2 before 10, and numbers before words."""
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)
