"""The embedded breast cancer data as hospitals of imbalanced classes."""

from collections.abc import Sequence
from typing import Any

import torch

from lit_epgan.datamodules.dealt_table import DealtKind, DealtTable
from lit_epgan.datamodules.site_rows import SiteRows


class BreastCancerDataModule(DealtTable):
    """569 tumours with 30 measurements each (Street, Wolberg and Mangasarian 1993; embedded in scikit-learn).

    By default three sites with 5, 5 and 6 benign tumours for a malignant one, as the paper splits PhysioNet 2012
    (GRAFFL, section 4.3 and table 2). The classes are told apart so easily that a random third does it, too; the
    default partition therefore shifts them. On all sites' test data a logistic regression then has an AUC of .995 when
    fitted to all training data, and of .95, .94 and .82 when fitted to one site's (F1 of the malignant: .97; .68, .76,
    .62; means over ten seeds). Label 1 is malignant, 0 benign.

    Args:
        sites: as for ``DealtTable``.
        partition: as for ``DealtTable``.
        beta: as for ``DealtTable``.
        ratio: as for ``DealtTable``.
        options: as for ``DealtTable``.
    """

    def __init__(
        self,
        sites: int = 3,
        partition: DealtKind = "shifted",
        beta: float = 0.5,
        ratio: float | Sequence[float] | None = (5.0, 5.0, 6.0),
        **options: Any,
    ) -> None:
        super().__init__(sites, partition, beta, ratio, **options)

    def whole(self) -> SiteRows:
        """scikit-learn's table."""
        from sklearn.datasets import load_breast_cancer  # other data sets do without it

        table = load_breast_cancer()
        self.columns, self.label_names = [str(name) for name in table.feature_names], ["benign", "malignant"]
        return SiteRows.complete(torch.from_numpy(table.data), 1 - torch.from_numpy(table.target).long())
