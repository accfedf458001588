"""Tables dealt to sites: who holds what, how they are standardised, and what is refused."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from lit_epgan.datamodules import BreastCancerDataModule
from lit_epgan.datamodules.client_tables import stratified
from lit_epgan.datamodules.dealt_table import DealtTable, alike, shifted, thinned
from lit_epgan.lib.errors import UserError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def counts(labels):
    return labels.bincount().tolist()


def tensors(data, part):
    return {name: own.tensors for name, own in getattr(data, part).items()}


def joined(sites):
    features, labels = zip(*sites.values(), strict=True)
    return torch.cat(features).numpy(), torch.cat(labels).numpy()


def public(means, sds, columns=None):
    columns = load_breast_cancer().feature_names if columns is None else columns
    features = [
        {"name": str(name), "kind": "number", "mean": float(mean), "sd": float(sd)}
        for name, mean, sd in zip(columns, *(np.broadcast_to(each, len(columns)) for each in (means, sds)), strict=True)
    ]
    return {"features": features, "target": {"name": "label", "classes": ["benign", "malignant"]}}


def test_stratified_and_alike_splits():
    labels = torch.tensor([0] * 10 + [1] * 5 + [2])
    kept, out = stratified(labels, 0.3, generator())
    assert counts(labels[out]) == [3, 2]  # round(3), round(1.5), and of a single row none
    assert sorted([*kept.tolist(), *out.tolist()]) == list(range(16))
    kept, out = stratified(torch.tensor([0, 0]), 0.9, generator())
    assert (len(kept), len(out)) == (1, 1)
    labels = torch.tensor([0] * 10 + [1] * 7 + [2] * 4)
    parts = alike(labels, 4, generator())
    assert sorted(torch.cat(parts).tolist()) == list(range(21))
    table = np.array([labels[part].bincount(minlength=3).tolist() for part in parts])
    assert (np.ptp(table, 0) <= 1).all()
    assert np.ptp(table.sum(1)) <= 1


def test_the_other_classes_are_shifted_by_a_part():
    """The rows spread far along (1, 1), which is the first component; what is across is the second one."""
    along, across = torch.tensor([10.0, -10, -10, 10]).repeat(3), torch.tensor([-3.0, -2, -1, 1, 2, 3])
    across = across.repeat_interleave(2)
    features = torch.stack([along + across, along - across], 1).double()
    labels = torch.tensor([0, 1]).repeat(6)
    first, second, third = shifted(features, labels, 3)
    thirds = [set(range(4)), set(range(4, 8)), set(range(8, 12))]
    low, middle, high = thirds if int(first[0]) < 4 else thirds[::-1]  # a component has two directions
    for part, zeros, ones in ((first, low, middle), (second, middle, high), (third, high, low)):
        assert {int(r) for r in part if labels[r] == 0} == {r for r in zeros if r % 2 == 0}
        assert {int(r) for r in part if labels[r] == 1} == {r for r in ones if r % 2 == 1}


@pytest.mark.parametrize(("ratio", "left"), [(5, [20, 4]), (1, [8, 8]), (2.5, [20, 8]), (2, [16, 8]), (100, [20, 1])])
def test_classes_are_thinned_to_a_ratio(ratio, left):
    labels = torch.tensor([0] * 20 + [1] * 8)
    rows = thinned(labels, ratio, generator())
    assert counts(labels[rows]) == left
    assert len(set(rows.tolist())) == len(rows)
    assert len(thinned(torch.zeros(7, dtype=torch.int64), 5, generator())) == 7


def test_breast_cancer_has_the_papers_ratios_and_every_row_once():
    data = BreastCancerDataModule(batch_size=16).load()
    train, test = tensors(data, "train"), tensors(data, "test")
    assert list(train) == list(test) == ["site-1", "site-2", "site-3"]
    both = {name: counts(torch.cat([train[name][1], test[name][1]])) for name in train}
    assert both == {"site-1": [119, 24], "site-2": [119, 24], "site-3": [119, 20]}
    held_out = {name: counts(y) for name, (_, y) in test.items()}
    assert held_out == {"site-1": [36, 7], "site-2": [36, 7], "site-3": [36, 6]}
    assert all(torch.equal(data.labels[name], y) for name, (_, y) in train.items())
    rows = np.concatenate([joined(train)[0], joined(test)[0]])
    assert len(np.unique(rows, axis=0)) == len(rows) == 68 + 3 * 119


def test_sites_hold_the_tables_rows_standardised_by_the_pooled_training_rows():
    module = BreastCancerDataModule(batch_size=16)
    train, test = tensors(module.data, "train"), tensors(module.data, "test")
    features, labels = joined(train)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(features.std(0), 1, atol=1e-5)
    table = load_breast_cancer()
    raw = BreastCancerDataModule(batch_size=16, preparation=public(0, 1)).load()
    raws, _ = joined(tensors(raw, "train"))
    published = {tuple(row): label for row, label in zip(table.data.astype(np.float32), 1 - table.target, strict=True)}
    assert [published[tuple(row)] for row in raws] == labels.tolist()
    tests, raw_tests = joined(test)[0], joined(tensors(raw, "test"))[0]
    np.testing.assert_allclose(tests, (raw_tests - raws.mean(0)) / raws.std(0), rtol=1e-3, atol=1e-3)
    assert module.preparation.inputs == list(table.feature_names)


def test_public_numbers_take_the_place_of_pooled_statistics():
    columns = ["mean radius", "worst texture"]
    raw = BreastCancerDataModule(batch_size=16, preparation=public(0, 1, columns)).load()
    data = BreastCancerDataModule(batch_size=16, preparation=public([10, 20], [2, 4], columns)).load()
    raws, table = joined(tensors(raw, "train"))[0], load_breast_cancer()
    published = table.data[:, [list(table.feature_names).index(name) for name in columns]].astype(np.float32)
    assert set(map(tuple, raws)) <= set(map(tuple, published))
    expected = (raws - [10, 20]) / [2, 4]
    np.testing.assert_allclose(joined(tensors(data, "train"))[0], expected, atol=1e-6)


def test_the_table_is_classified_well_as_a_whole_but_not_by_what_a_site_learns():
    data = BreastCancerDataModule(batch_size=16).load()
    train, (x, y) = tensors(data, "train"), joined(tensors(data, "test"))

    def auc(features: Any, labels: Any) -> float:
        fitted = LogisticRegression(max_iter=2000).fit(np.asarray(features), np.asarray(labels))
        return float(roc_auc_score(y, fitted.decision_function(x)))

    assert auc(*joined(train)) > 0.985
    assert all(auc(*own) < 0.98 for own in train.values())
    assert min(auc(*own) for own in train.values()) < 0.9


@pytest.mark.parametrize("partition", ["iid", "shifted", "dirichlet"])
def test_the_seed_alone_decides_who_holds_what(partition):
    before = torch.get_rng_state()
    options: dict[str, Any] = {"partition": partition, "batch_size": 16}
    one, again, other = (BreastCancerDataModule(split_seed=s, **options).load() for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    first = joined(tensors(one, "train"))[0]
    np.testing.assert_array_equal(first, joined(tensors(again, "train"))[0])
    assert not np.array_equal(first, joined(tensors(other, "train"))[0])


def test_without_a_ratio_all_rows_are_dealt_and_the_sites_are_clients_of_a_round():
    data = BreastCancerDataModule(sites=4, partition="iid", ratio=None, batch_size=16, held_out=0.0).load()
    assert data.test is None
    assert np.bincount(joined(tensors(data, "train"))[1]).tolist() == [357, 212]
    module = BreastCancerDataModule(batch_size=16)
    module.setup("fit")
    assert module.client_names == ["site-1", "site-2", "site-3"]
    (x, y), *_ = module.clients[0].batches(1, 1, 0, 0, 0)
    assert (x.shape, x.dtype, y.dtype) == ((16, 30), torch.float32, torch.int64)
    assert sum(len(batch[1]) for batch in module.val_dataloader()) == 43 + 43 + 42


class Small(DealtTable):
    def whole(self) -> pd.DataFrame:
        return pd.DataFrame({"age": range(6), "label": ["a", "b"] * 3})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BreastCancerDataModule(sites=0), "data.sites is 0"),
        (lambda: BreastCancerDataModule(ratio=[5.0]), "data.ratio has 1 numbers for 3 sites"),
        (lambda: BreastCancerDataModule(ratio=0.5), "data.ratio is 0.5"),
        (lambda: BreastCancerDataModule(partition="none"), "data.partition is 'none'"),  # type: ignore[arg-type]
        (lambda: BreastCancerDataModule(partition="dirichlet", beta=-1).load(), "--data.beta to a greater positive"),
        (lambda: Small(sites=7, ratio=None).load(), "data.sites is 7, but there are only 6 rows"),
        (lambda: Small(partition="shifted", ratio=None).load(), "needs at least two columns"),
    ],
)
def test_wrong_settings_are_one_sentence(make, words):
    with pytest.raises(UserError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)
