"""A site's classifier and its help from outside, against scikit-learn; the table that a fit leaves behind."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from imblearn.over_sampling import SMOTE
from lightning.pytorch import LightningModule, Trainer
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score, roc_curve
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lit_epgan.bayes import boosting
from lit_epgan.bayes.boosting import METHODS, Logistic, Site, area, averaged, balanced, cutoff, fitted, lacking, scores
from lit_epgan.callbacks import BoostedClassifiers
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvg
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.privacy import CentralNoise
from tests.federations import fit, plain_trainer
from tests.refusals import assert_refused

MEANS = np.array([[0.0, 0.0, 0.0], [1.5, 1.0, 0.0], [-1.0, 2.0, 1.0]])


def drawn(counts: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.permutation(np.repeat(np.arange(len(counts)), counts))
    return MEANS[y] + random.standard_normal((len(y), 3)), y


def site(counts: list[int], **options) -> Site:
    return Site(*drawn(counts), *drawn([150] * len(counts), seed=9), **options)


def test_what_the_classes_lack_and_never_saw():
    y = np.array([0, 0, 0, 0, 1, 2, 2])
    assert lacking(y, 4) == {1: 3, 2: 2, 3: 4}
    assert lacking(np.array([0, 1, 1, 0]), 2) == {}
    x, y = drawn([30, 20])
    wide = fitted(x, 2 * y, 3).probabilities(x)
    np.testing.assert_allclose(wide[:, [0, 2]], fitted(x, y, 2).probabilities(x))
    assert not wide[:, 1].any()


def test_samples_level_the_classes_and_no_more():
    """Of classes with 4, 1 and 2 records: 3 and 2 samples are added, the first ones; class 0's are not looked at."""
    x, y = np.arange(14.0).reshape(7, 2), np.array([0, 0, 0, 0, 1, 2, 2])
    samples = {k: 100.0 * (k + 1) + np.arange(20.0).reshape(10, 2) for k in range(3)}
    more_x, more_y = balanced(x, y, samples)
    assert more_y.tolist() == [0, 0, 0, 0, 1, 2, 2, 1, 1, 1, 2, 2]
    assert np.array_equal(more_x, np.concatenate([x, samples[1][:3], samples[2][:2]]))
    x, y = balanced(np.zeros((3, 2)), np.zeros(3, int), {1: np.ones((5, 2))})
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    assert x[:, 0].tolist() == y.tolist()
    x, y = drawn([5, 2, 1])
    assert balanced(x, y, {1: np.zeros((3, 3))})[1].tolist() == [*y, 1, 1, 1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [({1: np.zeros((2, 3))}, "class 1 lacks 3 records, and there are 2"), ({1: np.zeros((9, 4))}, "shape .4,., the")],
)
def test_samples_that_do_not_do_are_refused(samples, message):
    assert_refused(message, balanced, *drawn([5, 2]), samples)


@pytest.mark.parametrize("counts", [[30, 20], [30, 20, 10]])
def test_the_probabilities_are_scikit_learns(counts):
    x, y = drawn(counts)
    expected = LogisticRegression(max_iter=1000).fit(x, y).predict_proba(x)
    np.testing.assert_allclose(fitted(x, y, len(counts)).probabilities(x), expected, rtol=1e-6)


@pytest.mark.parametrize("counts", [[40, 12], [30, 25, 9]])
def test_fedavg_at_one_site_is_the_fit_in_one_place(counts):
    x, y = drawn(counts)
    own = averaged([(x, y)], len(counts), rounds=1000)
    exact = LogisticRegression(tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(own.probabilities(x), exact.predict_proba(x), atol=1e-6)


def test_fedavg_of_one_step_is_gradient_descent_on_all_records():
    """Sites of unlike sizes, one without class 1: with one local step the average is the step on the pooled loss."""
    (a, b), (c, d) = drawn([40, 12]), drawn([7, 0], seed=3)
    own = averaged([(a, b), (c, d)], 2, rounds=6000, steps=1)
    x, y = np.concatenate([a, c]), np.concatenate([b, d])
    exact = LogisticRegression(tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(own.probabilities(x), exact.predict_proba(x), atol=1e-6)


def test_the_area_is_scikit_learns():
    x, y = drawn([60, 30])
    probabilities = fitted(x, y, 2).probabilities(x)
    assert area(y, probabilities) == pytest.approx(roc_auc_score(y, probabilities[:, 1]))
    x, y = drawn([60, 30, 20])
    probabilities = fitted(x, y, 3).probabilities(x)
    assert area(y, probabilities) == pytest.approx(roc_auc_score(y, probabilities, multi_class="ovr"))
    assert np.isnan(area(np.zeros(4, int), np.full((4, 2), 0.5)))


def test_the_cut_off_has_youdens_greatest_index():
    x, y = drawn([80, 40])
    probability = fitted(x, y, 2).probabilities(x)[:, 1]
    false, true, _ = roc_curve(y, probability, drop_intermediate=False)
    predicted = probability >= cutoff(y, probability)
    assert predicted[y == 1].mean() - predicted[y == 0].mean() == pytest.approx((true - false).max())
    again = np.concatenate([np.arange(len(y)), *[np.flatnonzero(y)] * 3])
    assert cutoff(y[again], probability[again]) == cutoff(y, probability)
    # 0.35 misses nothing and errs once in three; 0.6 misses one of two: 1 + 2/3 against 1/2 + 1
    assert cutoff(np.array([0, 0, 1, 0, 1]), np.array([0.1, 0.3, 0.4, 0.5, 0.7])) == pytest.approx(0.35)
    for label in (0, 1):
        assert cutoff(np.full(3, label), np.array([0.1, 0.2, 0.3])) == 0.5


def test_predictions_are_by_the_training_records_cut_off_or_the_most_probable():
    """The test records alone would have another: training says 0.5, so of the positives 0.4 and 0.9 one is found."""
    logit = np.log([[0.2 / 0.8], [0.8 / 0.2]]), np.log([[0.4 / 0.6], [0.9 / 0.1], [0.1 / 0.9]])
    model = Logistic(np.array([[0.0, 1.0]]), np.zeros(2))
    result = scores(model, (logit[0], np.array([0, 1])), (logit[1], np.array([1, 1, 0])))
    assert result == pytest.approx((1.0, 2 / 3, 0.5))
    train, test = drawn([60, 30, 20]), drawn([50, 50, 50], seed=4)
    model = fitted(*train, 3)
    result = scores(model, train, test)
    assert result.f1 == pytest.approx(f1_score(test[1], model.probabilities(test[0]).argmax(1), average="macro"))
    assert np.isnan(result.cutoff)


def test_smote_is_imbalanced_learns(monkeypatch):
    own = site([40, 9], seed=3)
    x, y = SMOTE(k_neighbors=5, random_state=3).fit_resample(own.x, own.y)
    assert np.bincount(y).tolist() == [40, 40]
    assert METHODS["smote"](own) == pytest.approx(scores(fitted(x, y, 2), (x, y), (own.test_x, own.test_y)))
    assert METHODS["smote"](own) != pytest.approx(METHODS["oversampled"](own))
    few, one = site([40, 3]), site([40, 1])
    x, y = SMOTE(k_neighbors=2, random_state=0).fit_resample(few.x, few.y)
    assert METHODS["smote"](few) == pytest.approx(scores(fitted(x, y, 2), (x, y), (few.test_x, few.test_y)))
    assert METHODS["smote"](one) == METHODS["oversampled"](one)
    monkeypatch.setitem(sys.modules, "imblearn", None)
    assert_refused(r"pip install lit_epgan\[graffl\]", METHODS["smote"], site([40, 9]))


def test_oversampling_repeats_the_sites_own_records():
    own = site([40, 9])
    x, y = boosting._repeated(own)
    assert np.bincount(y).tolist() == [40, 40]
    assert np.array_equal(x[:49], own.x)
    assert {tuple(row) for row in x[49:]} <= {tuple(row) for row in own.x[own.y == 1]}
    assert len({tuple(row) for row in x[49:]}) > 5
    again, other = boosting._repeated(own)[0], boosting._repeated(own._replace(seed=1))[0]
    assert np.array_equal(x, again)
    assert not np.array_equal(x, other)


def test_the_bounds_of_the_paper():
    """A site without class 1 tells nothing apart; samples of the truth bring it to the pooled bound."""
    samples = {1: drawn([0, 200], seed=5)[0]}
    own = site([60, 0], samples=samples)
    own = own._replace(federation=[(own.x, own.y), drawn([100, 100], seed=6)])
    results = {name: method(own) for name, method in METHODS.items()}
    for name in ("raw", "oversampled", "smote"):
        assert results[name] == (0.5, 0.0, 0.5)
    x, y = (np.concatenate(parts) for parts in zip(*own.federation, strict=True))
    best = LogisticRegression().fit(x, y).predict_proba(own.test_x)[:, 1]
    assert results["pooled"].auc == pytest.approx(roc_auc_score(own.test_y, best))
    assert results["boosted"].auc == pytest.approx(results["pooled"].auc, abs=0.01)
    assert results["boosted"].f1 > 0.75
    assert results["fedavg"].auc == pytest.approx(results["pooled"].auc, abs=0.01)


def test_every_method_takes_several_classes_of_which_the_site_lacks_one():
    others = drawn([40, 40, 40], seed=6)
    own = site([50, 8, 0], samples={k: drawn([60] * 3, seed=5)[0][:50] for k in (1, 2)})
    own = own._replace(test_x=drawn([50] * 3, seed=7)[0], test_y=drawn([50] * 3, seed=7)[1])
    own = own._replace(federation=[(own.x, own.y), others])
    results = {name: method(own) for name, method in METHODS.items()}
    assert all(0.3 < result.auc <= 1 and 0 <= result.f1 <= 1 for result in results.values())
    assert results["pooled"].auc > results["raw"].auc


COUNTS = {"=north": (30, 4), "south": (9, 25), "west": (20, 0)}
CENTRES = torch.tensor([[0.0, 0.0], [1.5, 1.0]], dtype=torch.float64)


class Summarising(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.other = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.scales: list[float] = []
        self.asked: list[tuple[int, int]] = []
        self.sampled_with: list[float] = []

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return (self.scale - batch[0].mean()).square().sum() + self.other.square().sum()

    def validation_step(self, batch, batch_idx: int) -> None:
        self.log("mean", batch[0].mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @torch.no_grad()
    def summarise(self, x: Tensor) -> Tensor:
        self.scales.append(self.scale.item())
        return self.scale * x


class Fitted(Summarising):
    def sample_class(self, label: int, n: int, generator: torch.Generator) -> Tensor:
        self.asked.append((label, n))
        self.sampled_with.append(self.scale.item())
        return self.scale.detach() * (CENTRES[label] + torch.randn(n, 2, generator=generator, dtype=torch.float64))


def records(counts: tuple[int, ...], seed: int) -> TensorDataset:
    y = torch.arange(2).repeat_interleave(torch.tensor(counts))
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(CENTRES[y] + torch.randn(len(y), 2, generator=generator, dtype=torch.float64), y)


def data(held=None, **options) -> FederatedDataModule:
    sets = {name: records(counts, k) for k, (name, counts) in enumerate(COUNTS.items())}
    tests = {name: records((40, 40), 10 + k) for k, name in enumerate(COUNTS)} if held is None else held
    return FederatedDataModule.from_datasets(sets, batch_size=16, test_dataset=tests, **options)


def boost(folder, callback, datamodule=None, **options):
    module = Fitted()
    options = {"rounds": 2, "algorithm": FedAvg()} | options
    trainer = fit(module, datamodule or data(), folder=folder, callbacks=[callback], **options)
    return trainer, module


def by_hand(module: Fitted, name: str, repeat: int, seed: int = 0) -> Site:
    datamodule = data()
    train, test = datamodule.data.train, datamodule.data.test
    assert isinstance(test, dict)
    sets = [train[name], test[name], *train.values()]
    own, held, *all_ = [(module.summarise(d.tensors[0]).numpy(), d.tensors[1].numpy()) for d in sets]
    streams = {k: generator_for(seed, "boost", name, repeat, k) for k in range(2)}
    samples = {k: module.sample_class(k, n, streams[k]).numpy() for k, n in lacking(own[1], 2).items()}
    return Site(*own, *held, samples, all_, seed + repeat)


def test_the_table_is_what_the_methods_give_by_hand(tmp_path):
    trainer, module = boost(tmp_path, BoostedClassifiers(repeats=3))
    table = pd.read_csv(tmp_path / "boost.csv")
    assert table["site"].unique().tolist() == ["'=north", "south", "west"]  # no formula for a spreadsheet
    assert table["method"].tolist() == list(METHODS) * 3
    rows = table.set_index(["site", "method"])
    for name, method in ((n, m) for n in COUNTS for m in METHODS):
        repeats = 3 if method in ("boosted", "oversampled", "smote") else 1
        values = np.array([METHODS[method](by_hand(module, name, k)) for k in range(repeats)])
        row = rows.loc["'=north" if name == "=north" else name, method]
        assert row[["auc", "f1", "cutoff"]].to_numpy() == pytest.approx(values.mean(0))
        assert row[["auc_sd", "f1_sd"]].to_numpy() == pytest.approx(values.std(0)[:2])
    for score in ("auc", "f1"):
        mean = table[table["method"] == "boosted"][score].mean()
        assert float(trainer.callback_metrics[f"boost/{score}/boosted"]) == pytest.approx(mean, rel=1e-6)
    with Image.open(tmp_path / "pictures" / "boost.png") as picture:
        assert picture.width > 400


def test_samples_help_the_site_that_lacks_a_class_and_depend_on_the_seed(tmp_path):
    trainer, module = boost(tmp_path, BoostedClassifiers(repeats=2))
    rows = pd.read_csv(tmp_path / "boost.csv").set_index(["site", "method"])
    assert tuple(rows.loc[("west", "raw"), ["auc", "f1"]]) == (0.5, 0.0)
    assert rows.loc[("west", "boosted"), "auc"] > 0.8
    assert module.asked == [(1, 26)] * 2 + [(0, 16)] * 2 + [(1, 20)] * 2  # as many as level the classes
    assert trainer.callback_metrics["boost/auc/boosted"] > trainer.callback_metrics["boost/auc/raw"]
    tables = []
    for k, seed in enumerate((0, 0, 1)):
        boost(tmp_path / str(k), BoostedClassifiers(["boosted"], repeats=1, seed=seed))
        tables.append((tmp_path / str(k) / "boost.csv").read_text())
    assert tables[0] == tables[1] != tables[2]


@pytest.mark.parametrize("validated", [True, False])
def test_it_looks_once_after_the_last_round_at_the_servers_model(tmp_path, validated, monkeypatch):
    seen = []
    original = BoostedClassifiers.evaluate

    def evaluate(self, trainer: Trainer, module: LightningModule) -> None:
        before = torch.get_rng_state()
        seen.append((trainer.current_epoch, module.scale.item()))
        original(self, trainer, module)
        assert torch.equal(before, torch.get_rng_state())

    monkeypatch.setattr(BoostedClassifiers, "evaluate", evaluate)
    held = {"val_dataset": {"south": records((5, 5), 3)}} if validated else {}
    _, module = boost(tmp_path, BoostedClassifiers(["raw"]), data(**held), rounds=3)
    assert seen == [(2, module.scale.item())]


def test_a_site_with_an_encoder_of_its_own_is_summarised_by_it(tmp_path):
    """Training records, then test records of each site in batches of 16; the shared parameter is another."""
    _, module = boost(tmp_path, BoostedClassifiers(["raw", "boosted"], repeats=1), local=["scale"])
    batches = [-(-sum(counts) // 16) + 5 for counts in COUNTS.values()]
    own = [set(part) for part in np.split(module.scales, np.cumsum(batches)[:-1])]
    assert [len(scales) for scales in own] == [1, 1, 1]
    assert len(set.union(*own)) == 3
    assert module.sampled_with == [1.0] * 3  # the server's again


def test_one_test_set_for_all_or_the_validation_data_in_its_place(tmp_path):
    common = records((40, 40), 10)
    for k, options in enumerate(({"held": common}, {"held": {}, "val_dataset": common})):
        datamodule = data(**options)
        if k:
            datamodule.data.test = None
        boost(tmp_path / str(k), BoostedClassifiers(["raw", "pooled"]), datamodule)
    tables = [(tmp_path / str(k) / "boost.csv").read_text() for k in range(2)]
    assert tables[0] == tables[1]
    pooled = pd.read_csv(tmp_path / "0" / "boost.csv").query("method == 'pooled'")
    assert pooled["auc"].nunique() == 1


def test_sites_without_test_records_help_the_others_and_have_no_row(tmp_path):
    boost(tmp_path, BoostedClassifiers(["pooled"]), data({"south": records((40, 40), 11)}))
    table = pd.read_csv(tmp_path / "boost.csv")
    assert table["site"].tolist() == ["south"]
    boost(tmp_path / "all", BoostedClassifiers(["pooled"]))
    every = pd.read_csv(tmp_path / "all" / "boost.csv").set_index("site")
    assert table["auc"][0] == every.loc["south", "auc"]


def unlabelled() -> dict[str, Dataset]:
    return {"a": TensorDataset(torch.randn(9, 2, dtype=torch.float64), torch.randn(9, dtype=torch.float64))}


@pytest.mark.parametrize(
    ("datamodule", "message"),
    [
        (lambda: FederatedDataModule.from_datasets(unlabelled(), 4, test_dataset=unlabelled()), "'a' have no labels"),
        (lambda: data({}), "nothing to test on"),
    ],
)
def test_data_that_do_not_do_are_refused(tmp_path, datamodule, message):
    assert_refused(message, boost, tmp_path, BoostedClassifiers(["raw"]), datamodule())


class Plain(Summarising):
    def on_train_start(self) -> None:
        raise AssertionError("nothing must be trained")


def test_a_module_without_classes_or_smote_without_its_package_is_refused_before_it_trains(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"Plain has no sample_class: .* sample_class\(label, n, generator\)"):
        fit(Plain(), data(), folder=tmp_path, callbacks=[BoostedClassifiers()])
    monkeypatch.setitem(sys.modules, "imblearn", None)
    assert_refused(r"lit_epgan\[graffl\], or leave smote out", boost, tmp_path, BoostedClassifiers())
    boost(tmp_path, BoostedClassifiers(["raw"]))
    assert (tmp_path / "boost.csv").is_file()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"methods": ["raw", "bagged"]}, "no method bagged: choose of raw,"), ({"repeats": 0}, "repeats is 0")],
)
def test_impossible_settings_are_refused(options, message):
    assert_refused(message, BoostedClassifiers, **options)


def test_testing_writes_the_table_too_and_a_private_run_leaves_it_out(tmp_path):
    trainer, _ = boost(tmp_path, BoostedClassifiers(), mechanism=CentralNoise(0.5, 1.0))
    assert not [name for name in trainer.callback_metrics if name.startswith("boost")]
    assert not list(tmp_path.rglob("boost*"))
    trainer = plain_trainer(callbacks=[BoostedClassifiers(["raw"])], default_root_dir=tmp_path)
    module = Fitted()
    module.test_step = module.validation_step
    trainer.test(module, datamodule=data(), verbose=False)
    assert len(pd.read_csv(tmp_path / "boost.csv")) == 3
