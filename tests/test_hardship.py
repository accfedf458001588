"""Few records, unequal sizes, wrong labels; clients that join late or leave."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule, ImageDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.hardship import Hardship, mistaken
from lit_epgan.engine import ComingAndGoing, EveryoneAtFirst, FixedSize, Sampler
from lit_epgan.errors import UserError


def data(clients: int = 4, n: int = 30) -> ClientData:
    """Client k holds n records k, k + .01, ... of the classes 0, 5 and 7 in turn."""
    labels = torch.tensor([0, 5, 7]).repeat(n // 3)
    values = [k + torch.arange(n) / 100 for k in range(clients)]
    train = {f"client-{k}": TensorDataset(value, labels) for k, value in enumerate(values)}
    return ClientData(train, labels=dict.fromkeys(train, labels))


class Listed(torch.utils.data.Dataset[Any]):
    """A data set that reads one record at a time."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def held(hard: ClientData, name: str) -> list[Tensor]:
    """All records of a client, by its loader in one batch."""
    module = FederatedDataModule.from_datasets(hard.train, batch_size=100)
    module.setup()
    (batch,) = module.clients[module.client_names.index(name)].batches(None, 1, 0, 0, 0)
    return list(batch)


def test_a_client_keeps_at_most_so_many_of_its_records() -> None:
    hard = Hardship(most_records=20).on(data(), seed=0)
    for k, name in enumerate(hard.train):
        values, labels = held(hard, name)
        assert len(values) == 20 == len(hard.labels[name])  # type: ignore[index]
        places = ((values - k) * 100).round().long()
        assert len(places.unique()) == 20
        assert torch.equal(labels, torch.tensor([0, 5, 7])[places % 3])
    other = Hardship(most_records=20).on(data(), seed=1)
    assert not torch.equal(other.train["client-0"].rows, hard.train["client-0"].rows)  # type: ignore[attr-defined]


def test_sizes_follow_the_power_of_ranks_that_are_drawn() -> None:
    hard = Hardship(size_power=1.5).on(data(6), seed=3)
    sizes = [len(dataset) for dataset in hard.train.values()]  # type: ignore[arg-type]
    assert sorted(sizes, reverse=True) == [round(30 * r**-1.5) for r in range(1, 7)]
    assert sizes != sorted(sizes, reverse=True)
    assert min(len(d) for d in Hardship(size_power=9).on(data(6), 0).train.values()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("batched", [True, False])
def test_a_share_of_a_clients_labels_is_wrong(batched: bool) -> None:
    clean = data()
    if not batched:
        clean.train = {name: Listed(dataset) for name, dataset in clean.train.items()}  # type: ignore[arg-type]
    hard = Hardship(wrong_labels={"client-2": 0.4}).on(clean, seed=0)
    for k, name in enumerate(hard.train):
        values, labels = held(hard, name)
        right = torch.tensor([0, 5, 7])[((values - k) * 100).round().long() % 3]
        assert (labels != right).sum() == (12 if k == 2 else 0)
        assert set(labels.tolist()) <= {0, 5, 7}
        assert sorted(hard.labels[name].tolist()) == sorted(labels.tolist())  # type: ignore[index]


def test_a_wrong_label_is_any_other_with_the_same_probability() -> None:
    labels, classes = torch.full((9000,), 5), torch.tensor([0, 5, 7, 9])
    wrong = mistaken(labels, 1.0, classes, torch.Generator().manual_seed(0))
    counts = [(wrong == c).sum().item() for c in (0, 5, 7, 9)]
    assert counts[1] == 0
    assert all(abs(count - 3000) < 5 * 45 for count in (counts[0], *counts[2:]))  # five standard deviations


@pytest.mark.parametrize(
    ("hardship", "said"),
    [
        (Hardship(most_records=0), "most_records is 0; it must be at least 1"),
        (Hardship(size_power=0.0), "size_power is 0.0; it must be above 0"),
        (Hardship(wrong_labels={"ward": 0.5}), "wrong_labels names ward, but the clients are client-0"),
        (Hardship(wrong_labels={"client-1": 1.5}), "wrong_labels of client-1 is 1.5; it is a share"),
    ],
)
def test_settings_out_of_their_range_are_refused(hardship: Hardship, said: str) -> None:
    with pytest.raises(UserError, match=said):
        hardship.on(data(), 0)


def test_wrong_labels_need_labels() -> None:
    without = data()
    without.labels = None
    with pytest.raises(UserError, match="needs data whose labels are classes"):
        Hardship(wrong_labels={"client-1": 0.5}).on(without, 0)


def test_a_data_module_puts_it_on_what_it_loads() -> None:
    module = ImageDataModule(clients=10, seed=4, hardship=Hardship(most_records=20))
    module.setup()
    assert [client.records for client in module.clients] == [20] * 10
    assert len(module.data.test) > 300  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------- coming and going


def there(sampler: Sampler, round_: int, clients: int = 10) -> set[int]:
    return {k for chain in sampler.draw(list(range(clients)), 0, round_) for k in chain}


def test_late_clients_join_and_others_leave() -> None:
    sampler = ComingAndGoing(late=0.3, joins=2, leaving=0.2, leaves=4)
    rounds = [there(sampler, r) for r in range(6)]
    assert [len(each) for each in rounds] == [7, 7, 10, 10, 8, 8]
    late, gone = rounds[2] - rounds[1], rounds[3] - rounds[4]
    assert rounds[0] == rounds[1]
    assert rounds[4] == rounds[5]
    assert (len(late), len(gone), late & gone) == (3, 2, set())


def test_a_cohort_is_drawn_among_those_who_are_there() -> None:
    sampler = ComingAndGoing(late=0.5, joins=3, of=FixedSize(4))
    present = there(ComingAndGoing(late=0.5, joins=3), 0)
    cohorts = [there(sampler, r) for r in range(3)]
    assert all(len(cohort) == 4 and cohort <= present for cohort in cohorts)
    assert len(set(map(frozenset, cohorts))) > 1
    assert any(not there(sampler, r) <= present for r in range(3, 9))


def test_a_cohort_larger_than_those_who_are_there_is_refused() -> None:
    ComingAndGoing(late=0.3, joins=2, leaving=0.3, leaves=5, of=FixedSize(7)).check(10)
    with pytest.raises(UserError, match="only 4 clients"):
        ComingAndGoing(late=0.3, joins=5, leaving=0.3, leaves=2, of=FixedSize(7)).check(10)


def test_no_accountant_can_read_a_rate() -> None:
    with pytest.raises(UserError, match="has no rate that an accountant could read"):
        ComingAndGoing(late=0.3).rate(10)


def test_shares_that_leave_nobody_are_refused() -> None:
    with pytest.raises(UserError, match=r"late and leaving are 0.6 and 0.4"):
        ComingAndGoing(late=0.6, leaving=0.4)


def test_everyone_takes_part_at_first_and_cohorts_after_it() -> None:
    sampler, cohorts = EveryoneAtFirst(FixedSize(4)), FixedSize(4)
    assert there(sampler, 0) == set(range(10))
    assert [there(sampler, r) for r in range(1, 6)] == [there(cohorts, r) for r in range(1, 6)]


def test_everyone_at_first_is_checked_as_its_cohorts_and_has_no_rate() -> None:
    with pytest.raises(UserError, match="only 10 clients"):
        EveryoneAtFirst(FixedSize(11)).check(10)
    with pytest.raises(UserError, match="has no rate that an accountant could read"):
        EveryoneAtFirst(FixedSize(4)).rate(10)
