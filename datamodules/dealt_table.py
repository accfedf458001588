"""One table, dealt to clients whose classes are imbalanced; the embedded breast cancer data as hospitals."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from lit_epgan.datamodules.client_tables import ClientTables, shuffled_classes
from lit_epgan.datamodules.partition import dirichlet
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

if TYPE_CHECKING:
    import pandas as pd


class DealtTable(ClientTables):
    """One table, dealt to clients and thinned there to a ratio of the classes (GRAFFL, section 4.3).

    Subclasses override ``whole``.

    Args:
        sites: how many clients there are.
        partition: ``iid``: at random, alike in their classes; ``shifted``: the classes are dealt along one direction,
            one part apart, so that the table is classified well as a whole, but not by what one client learns;
            ``dirichlet``: mostly one class for a small ``beta``.
        beta: concentration of ``dirichlet``.
        ratio: records of a client's most frequent class for one of its rarest, for each client or for all; null leaves
            the classes as they are dealt.
        options: settings of ``ClientTables`` and of ``FederatedDataModule``; ``split_seed`` decides who holds what,
            too.
    """

    def __init__(
        self,
        sites: int = 3,
        partition: Literal["iid", "shifted", "dirichlet"] = "shifted",
        beta: float = 0.5,
        ratio: float | Sequence[float] | None = (5.0, 5.0, 6.0),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        at_least(1, "data", sites=sites)
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

    def whole(self) -> "pd.DataFrame":
        """The table that is dealt: numbers, and the column ``label`` of classes."""
        raise NotImplementedError

    def read(self) -> "dict[str, pd.DataFrame]":
        """The clients' tables. UserError: there are not enough rows for so many clients."""
        import pandas as pd

        table = self.whole()
        if self.sites > len(table):
            raise UserError(f"data.sites is {self.sites}, but there are only {len(table)} rows: ask for fewer")
        codes = torch.from_numpy(pd.factorize(table[self.label], sort=True)[0])
        dealt = enumerate(zip(self._dealt(table, codes), self.ratios, strict=True), start=1)
        rows = {f"site-{k}": own[self._thinned(codes[own], ratio, k)] for k, (own, ratio) in dealt}
        return {name: table.iloc[own.numpy()].map(str).astype(object) for name, own in rows.items()}

    def _dealt(self, table: "pd.DataFrame", labels: Tensor) -> list[Tensor]:
        generator = generator_for(self.split_seed, "sites")
        if self.partition == "iid":
            return alike(labels, self.sites, generator)
        if self.partition == "dirichlet":
            return self._dirichlet(labels, generator)
        features = torch.tensor(table.drop(columns=self.label).to_numpy(float))
        if features.shape[1] < 2:
            raise UserError("data.partition is 'shifted', which needs at least two columns: choose iid or dirichlet")
        return shifted(features, labels, self.sites)

    def _dirichlet(self, labels: Tensor, generator: torch.Generator) -> list[Tensor]:
        try:
            return dirichlet(labels, self.sites, generator, self.beta)
        except UserError as error:
            raise UserError(
                f"dirichlet with data.beta {self.beta} does not give all {self.sites} sites a row: set --data.beta to "
                "a greater positive number, or --data.sites to a smaller one"
            ) from error

    def _thinned(self, labels: Tensor, ratio: float | None, client: int) -> Tensor:
        if ratio is None:
            return torch.arange(len(labels))
        return thinned(labels, ratio, generator_for(self.split_seed, client, "ratio"))


class BreastCancerDataModule(DealtTable):
    """569 tumours with 30 measurements each (Street, Wolberg and Mangasarian 1993; embedded in scikit-learn).

    By default three clients with 5, 5 and 6 benign tumours for a malignant one, as the paper splits PhysioNet 2012
    (GRAFFL, section 4.3 and table 2). The classes are told apart so easily that a random third does it, too; the
    default partition therefore shifts them. On all clients' test data a logistic regression then has an AUC of .995
    when fitted to all training data, and of .95, .94 and .82 when fitted to one client's (F1 of the malignant: .97;
    .68, .76, .62; means over ten seeds). Label 1 is malignant, 0 benign. Settings are those of ``DealtTable``.
    """

    def __init__(self, held_out: float = 0.3, **options: Any) -> None:
        super().__init__(held_out=held_out, **options)

    def whole(self) -> "pd.DataFrame":
        import pandas as pd
        from sklearn.datasets import load_breast_cancer  # other data sets do without it

        table = load_breast_cancer()
        names = np.array(["malignant", "benign"])[table.target]
        return pd.DataFrame(table.data, columns=[str(name) for name in table.feature_names]).assign(label=names)


def alike(labels: Tensor, clients: int, generator: torch.Generator) -> list[Tensor]:
    """Deal the rows so that the clients' counts of each class (and of all) differ by at most one."""
    order = torch.cat(shuffled_classes(labels, generator))
    return [order[client::clients] for client in range(clients)]


def shifted(features: Tensor, labels: Tensor, clients: int) -> list[Tensor]:
    """Deal the classes along one direction, one part apart, so that a client alone learns a difference of its own.

    Every class is ordered by the second principal component of the standardised features (n, d), d of at least 2, and
    cut into K parts. Client k receives the k-th part of the most frequent class and the next one, cyclically, of each
    other class. At every client the classes thus differ along that component, which says little about them where all
    rows are together.
    """
    score = _second_component(features)
    majority = labels.bincount().argmax()
    dealt: list[list[Tensor]] = [[] for _ in range(clients)]
    for label in labels.unique():
        rows = torch.nonzero(labels == label).flatten()
        parts = rows[score[rows].argsort(stable=True)].tensor_split(clients)
        for client in range(clients):
            dealt[client].append(parts[client if label == majority else (client + 1) % clients])
    return [torch.cat(own) for own in dealt]


def _second_component(features: Tensor) -> Tensor:
    """Each row's score (n,), with a positive greatest loading."""
    spread = features.std(0)
    standardised = (features - features.mean(0)) / torch.where(spread > 0, spread, 1.0)
    direction = torch.linalg.svd(standardised, full_matrices=False).Vh[1]
    return standardised @ direction * direction[direction.abs().argmax()].sign()


def thinned(labels: Tensor, ratio: float, generator: torch.Generator) -> Tensor:
    """Rows that remain when the most frequent and the rarest class stand as ``ratio`` to 1, one of each at least. Rows
    of the rarest class are lost at random where it is too frequent, those of the most frequent one where it is not
    frequent enough."""
    classes = sorted(shuffled_classes(labels, generator), key=len)
    rare, common = len(classes[0]), len(classes[-1])
    if common > ratio * rare:
        classes[-1] = classes[-1][: max(1, round(ratio * rare))]
    elif len(classes) > 1:
        classes[0] = classes[0][: max(1, round(common / ratio))]
    return torch.cat(classes)
