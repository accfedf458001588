"""What a client's data look like to the module: batches as the data set gives them, the module's own hooks."""

import copy
import warnings
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.clients import BatchDataset
from lit_epgan.lib.errors import UserError
from tests.federations import client_sets, federation, fit, plain_trainer
from tests.modules import Regression
from tests.notes import Notes
from tests.plain_loop import PlainLoop, assert_plain, own_batches
from tests.refusals import assert_refused
from tests.test_federation import assert_same, plain_batches
from tests.test_policies import sgd


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Rows(Dataset):
    def __init__(self, k: int, structure) -> None:
        self.x, self.y = client_sets()[k].tensors
        self.structure = structure

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return self.structure(self.x[i], self.y[i])


class Witness(Regression):
    batches = Notes()
    indices = Notes()

    def training_step(self, batch, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        self.indices.append(batch_idx)
        return self.body(torch.ones(1, 3, dtype=torch.float64)).sum() * 0


STRUCTURES = {
    "tuple": lambda x, y: (x, y),
    "dictionary": lambda x, y: {"image": x, "label": y, "name": "scan"},
    "named tuple": Pair,
    "nested": lambda x, y: [x, {"deep": (y, 3)}],
    "bare": lambda x, y: x,
}


def assert_equal_batches(ours, theirs) -> None:
    assert type(ours) is type(theirs)
    if isinstance(ours, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for key in ours:
            assert_equal_batches(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        for a, b in zip(ours, theirs, strict=True):
            assert_equal_batches(a, b)
    else:
        assert ours == theirs


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_a_batch_is_exactly_what_the_data_set_gives(structure):
    module, sets = Witness(), [Rows(k, structure) for k in range(4)]
    fit(module, FederatedDataModule.from_datasets(sets, batch_size=8), rounds=1)
    index = [Rows(k, lambda x, y: (x, y)) for k in range(4)]
    expected = []
    for k, dataset in enumerate(index):
        plain = TensorDataset(torch.arange(len(dataset)))
        expected += [default_collate([sets[k][int(i)] for i in b[0]]) for b in plain_batches(plain, None, 0, k)]
    for ours, theirs in zip(module.batches, expected, strict=True):
        assert_equal_batches(ours, theirs)
    assert module.indices == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]  # each client counts its own


def test_a_tensor_data_set_gives_what_its_slow_way_would():
    """It is read a whole batch at a time; a subclass, which may do anything, is not."""

    class Own(TensorDataset):
        pass

    fast, slow = Witness(), Witness()
    fit(fast, federation(), rounds=2)
    own = FederatedDataModule.from_datasets([Own(*s.tensors) for s in client_sets()], batch_size=8)
    fit(slow, own, rounds=2)
    assert_equal_batches(fast.batches, slow.batches)


def test_fetch_reads_a_whole_batch():
    class Fetching(Rows, BatchDataset):
        fetched = 0

        def fetch(self, indices: list[int]):
            self.fetched += 1
            return [self.x[indices], self.y[indices]]

    sets = [Fetching(k, Pair) for k in range(4)]
    module = Witness()
    fit(module, FederatedDataModule.from_datasets(sets, batch_size=8), rounds=1)
    plain = Witness()
    fit(plain, federation(), rounds=1)
    assert [s.fetched for s in sets] == [3, 1, 5, 2]
    assert_equal_batches(module.batches, plain.batches)


def test_a_collate_function_and_workers_are_used():
    module = Witness()
    data = FederatedDataModule.from_datasets(client_sets(), batch_size=8, collate_fn=len)
    fit(module, data, rounds=1)
    assert module.batches == [8, 8, 4, 7, 8, 8, 8, 8, 2, 8, 4]
    alone, helped = Witness(), Witness()
    fit(alone, federation(local_steps=2), rounds=2)
    fit(helped, federation(local_steps=2, num_workers=1), rounds=2)
    assert_equal_batches(alone.batches, helped.batches)


class Noisy(Rows):
    def __init__(self, k: int) -> None:
        super().__init__(k, lambda x, y: (x + 0.1 * torch.randn(3, dtype=torch.float64), y))


def test_augmentation_depends_on_seed_round_and_client_alone():
    """The same client in the same round sees the same rows, whoever was there before; and dropout is not disturbed."""

    def rows(sets, seed: int):
        module = Witness()
        fit(module, FederatedDataModule.from_datasets(sets, batch_size=8, local_steps=1, seed=seed), rounds=2)
        return module.batches

    four = rows([Noisy(k) for k in range(4)], 0)
    two = rows([Noisy(k) for k in range(2)], 0)
    assert_equal_batches(two, [four[0], four[1], four[4], four[5]])
    assert not torch.equal(four[0][0], rows([Noisy(k) for k in range(4)], 1)[0][0])
    quiet, noisy = Regression(dropout=0.5), Regression(dropout=0.5)
    noisy.load_state_dict(quiet.state_dict())
    fit(quiet, federation(), rounds=2)
    still = [Rows(k, lambda x, y: (x + 0 * torch.randn(3, dtype=torch.float64), y)) for k in range(4)]
    fit(noisy, FederatedDataModule.from_datasets(still, batch_size=8), rounds=2)
    assert_same(noisy, quiet, tolerance=0.0)


class Hooked(Regression):
    def on_after_batch_transfer(self, batch, dataloader_idx: int):
        return [2 * batch[0], batch[1]]

    def on_train_batch_end(self, outputs, batch, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


def test_the_modules_own_hooks_are_honoured():
    """Also on the last batch of a client: what it does there belongs to the client's report."""

    def work(local, batches, client: int, round_: int) -> None:
        optimizer = local.configure_optimizers()
        for x, y in batches:
            optimizer.zero_grad()
            local.loss((2 * x, y)).backward()
            optimizer.step()
            local.on_train_batch_end(None, None, 0)

    module = Hooked()
    assert_plain(module, PlainLoop(work), 3, federation())
    module = Hooked()
    held_out = client_sets((6,))[0]
    trainer = fit(module, federation(val_dataset=held_out), rounds=1)
    x, y = held_out.tensors
    expected = float(module.eval().loss((2 * x, y)))
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-6)


class Stream(IterableDataset):
    def __init__(self, k: int, rows: int | None = None) -> None:
        self.x, self.y = client_sets()[k].tensors
        self.rows = len(self.x) if rows is None else rows

    def __iter__(self):
        return zip(self.x[: self.rows], self.y[: self.rows], strict=True)


def test_iterable_clients_weigh_as_many_rows_as_they_gave_and_sit_out_when_they_run_dry():
    def eights(client: int, round_: int):
        return list(zip(*(tensor.split(8) for tensor in client_sets()[client].tensors), strict=True))

    module = Regression(dropout=0.1)
    loop = PlainLoop(sgd, batches=eights)
    assert_plain(module, loop, 3, FederatedDataModule.from_datasets([Stream(k) for k in range(4)], batch_size=8))
    module = Regression()
    reference = PlainLoop(sgd, cohort=lambda r: [0, 3], batches=eights).run(module, 2)
    sets = [Stream(0), Stream(1, rows=0), Stream(2, rows=0), Stream(3)]
    fit(module, FederatedDataModule.from_datasets(sets, batch_size=8), rounds=2)
    assert_same(module, reference)


def test_bad_input_is_named():
    assert_refused(r"data\.local_steps is 0; it must be at least 1", federation, local_steps=0)
    with pytest.raises(UserError, match="client 'client-1' holds a int, which is no data set"):
        FederatedDataModule.from_datasets([client_sets()[0], 3], batch_size=8).setup("fit")
    assert_refused("4 data sets need as many different client names", federation, client_names=["a", "b", "a", "c"])
    with pytest.raises(UserError, match="held-out data of clients that do not exist: nobody"):
        federation(val_dataset={"nobody": client_sets()[0]})
    with pytest.raises(UserError, match="test_dataset has held-out data of clients that do not exist: nobody; the c"):
        federation(test_dataset={"client-1": client_sets()[0], "nobody": client_sets()[0]})
    assert_refused("has no data of its own", FederatedDataModule().setup, "fit")


def test_names_and_warm_up():
    module = Witness()
    data = FederatedDataModule.from_datasets(
        dict(zip("abcd", client_sets(), strict=True)), batch_size=8, local_steps=2, warmup_steps=5
    )
    fit(module, data, rounds=2)
    assert data.client_names == list("abcd")
    assert len(module.batches) == 4 * 5 + 4 * 2
    assert own_batches(5)(0, 0)[4][0].tolist() == module.batches[4][0].tolist()


def test_training_without_the_callback_sees_every_client_in_one_epoch():
    module = Regression()
    central = copy.deepcopy(module).double()
    optimizer = central.configure_optimizers()
    for client in range(4):
        for batch in own_batches()(client, 0):
            optimizer.zero_grad()
            central.loss(batch).backward()
            optimizer.step()
    trainer = plain_trainer(max_epochs=1)
    with pytest.raises(UserError, match=r"trains no federation by itself.*add FederationCallback\(\) to the Trainer"):
        trainer.fit(copy.deepcopy(module), datamodule=federation())
    data = federation()
    data.unfederated = True
    plain_trainer(max_epochs=1).fit(module, datamodule=data)
    assert_same(module, central)


BAD = 11  # a record of the client of 34


class Torn(Dataset):
    def __init__(self, data: TensorDataset, bad: int | None) -> None:
        self.data, self.bad = data, bad

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int):
        if index == self.bad:
            raise ValueError("not a number: 'n/a'")
        return self.data[index]


def torn(bad: int | None = BAD, **options) -> FederatedDataModule:
    sets = {f"ward-{k}": Torn(data, bad if k == 2 else None) for k, data in enumerate(client_sets())}
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_cannot_be_read_is_named_with_its_client(workers):
    with pytest.raises(UserError) as told:
        fit(Regression(), torn(num_workers=workers, local_steps=6))
    assert str(told.value) == (
        "client 'ward-2': record 11 cannot be read: ValueError: not a number: 'n/a'. Mend the data, or leave them out."
    )
    assert isinstance(told.value.__cause__, ValueError)


def test_records_that_do_not_fit_together_are_named():
    def refuses(records) -> list[Tensor]:
        raise TypeError("no batch")

    with pytest.raises(
        UserError, match=r"client 'ward-\d': a batch of the records .* and 3 more cannot be read: TypeE"
    ):
        fit(Regression(), torn(None, collate_fn=refuses))


@pytest.mark.slow
def test_many_small_clients_do_not_make_a_long_warning():
    one = client_sets((1,))[0]
    data = FederatedDataModule.from_datasets({f"client-{k:05d}": one for k in range(10_000)}, batch_size=8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        data.setup("fit")
        data.train_dataloader()
    (said,) = [str(w.message) for w in seen if "fewer records" in str(w.message)]
    assert said.endswith("client-00000, client-00001, client-00002, client-00003, client-00004 and 9995 more")
