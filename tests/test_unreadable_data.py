"""Data that cannot be read are told by client and record, and many clients are not all named."""

import warnings
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError
from tests.federations import client_sets, fit
from tests.modules import Regression
from tests.test_institutions import Institution, institutions

BAD = 11  # a record of the client of 34


class Torn(Dataset[Any]):
    """Raises at one record."""

    def __init__(self, data: TensorDataset, bad: int | None) -> None:
        self.data, self.bad = data, bad

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            raise ValueError("not a number: 'n/a'")
        return self.data[index]


def torn(bad: int | None = BAD, **options: Any) -> FederatedDataModule:
    sets = {f"ward-{k}": Torn(data, bad if k == 2 else None) for k, data in enumerate(client_sets())}
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_cannot_be_read_is_named_with_its_client(workers: int) -> None:
    with pytest.raises(UserError) as told:
        fit(Regression(), torn(num_workers=workers, local_steps=6))
    assert str(told.value) == (
        "client 'ward-2': record 11 cannot be read: ValueError: not a number: 'n/a'. Mend the data, or leave them out."
    )
    assert isinstance(told.value.__cause__, ValueError)


def test_records_that_do_not_fit_together_are_named() -> None:
    def refuses(records: list[Any]) -> list[Tensor]:
        raise TypeError("no batch")

    with pytest.raises(
        UserError, match=r"client 'ward-\d': a batch of the records .* and 3 more cannot be read: TypeE"
    ):
        fit(Regression(), torn(None, collate_fn=refuses))


def test_an_institutions_loader_that_raises_is_named() -> None:
    class Raising(Institution):
        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Torn(client_sets()[self.k], BAD if self.k == 2 else None), batch_size=5)

    with pytest.raises(UserError, match="a batch cannot be read: ValueError: not a number"):
        fit(Regression(), institutions(Raising))


@pytest.mark.slow
def test_many_small_clients_do_not_make_a_long_warning() -> None:
    one = client_sets((1,))[0]
    data = FederatedDataModule.from_datasets({f"client-{k:05d}": one for k in range(10_000)}, batch_size=8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        data.setup("fit")
    (said,) = [str(w.message) for w in seen if "fewer records" in str(w.message)]
    assert said.endswith("client-00000, client-00001, client-00002, client-00003, client-00004 and 9995 more")
