"""A site's classifier and its help from outside: counts by hand, scikit-learn and imbalanced-learn as oracles."""

import sys
from typing import Any

import numpy as np
import pytest
from imblearn.over_sampling import SMOTE
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, roc_auc_score, roc_curve

from lit_epgan.bayes import boosting
from lit_epgan.bayes.boosting import METHODS, Logistic, Site, area, averaged, balanced, cutoff, fitted, lacking, scores
from tests.refusals import assert_refused

MEANS = np.array([[0.0, 0.0, 0.0], [1.5, 1.0, 0.0], [-1.0, 2.0, 1.0]])


def drawn(counts: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.permutation(np.repeat(np.arange(len(counts)), counts))
    return MEANS[y] + random.standard_normal((len(y), 3)), y


def site(counts: list[int], **options: Any) -> Site:
    return Site(*drawn(counts), *drawn([150] * len(counts), seed=9), **options)


# ---------------------------------------------------------------- balance


def test_what_the_classes_lack_by_hand():
    y = np.array([0, 0, 0, 0, 1, 2, 2])
    assert lacking(y, 4) == {1: 3, 2: 2, 3: 4}
    assert lacking(np.array([0, 1, 1, 0]), 2) == {}


def test_samples_level_the_classes_and_no_more():
    """Of classes with 4, 1 and 2 records: 3 and 2 samples are added, the first ones; class 0's are not looked at."""
    x, y = np.arange(14.0).reshape(7, 2), np.array([0, 0, 0, 0, 1, 2, 2])
    samples = {k: 100.0 * (k + 1) + np.arange(20.0).reshape(10, 2) for k in range(3)}
    more_x, more_y = balanced(x, y, samples)
    assert more_y.tolist() == [0, 0, 0, 0, 1, 2, 2, 1, 1, 1, 2, 2]
    assert np.array_equal(more_x, np.concatenate([x, samples[1][:3], samples[2][:2]]))


def test_a_class_that_the_site_has_never_seen_is_filled_up():
    x, y = balanced(np.zeros((3, 2)), np.zeros(3, int), {1: np.ones((5, 2))})
    assert y.tolist() == [0, 0, 0, 1, 1, 1]
    assert x[:, 0].tolist() == y.tolist()


def test_classes_without_samples_stay_as_they_are():
    x, y = drawn([5, 2, 1])
    assert balanced(x, y, {1: np.zeros((3, 3))})[1].tolist() == [*y, 1, 1, 1]


@pytest.mark.parametrize(
    ("samples", "message"),
    [({1: np.zeros((2, 3))}, "class 1 lacks 3 records, and there are 2"), ({1: np.zeros((9, 4))}, "shape .4,., the")],
)
def test_samples_that_do_not_do_are_refused(samples, message):
    assert_refused(message, balanced, *drawn([5, 2]), samples)


# ---------------------------------------------------------------- the classifier and its scores


@pytest.mark.parametrize("counts", [[30, 20], [30, 20, 10]])
def test_the_probabilities_are_scikit_learns(counts):
    x, y = drawn(counts)
    expected = LogisticRegression(max_iter=1000).fit(x, y).predict_proba(x)
    np.testing.assert_allclose(fitted(x, y, len(counts)).probabilities(x), expected, rtol=1e-6)


def test_a_class_that_was_not_seen_has_no_probability():
    x, y = drawn([30, 20])
    wide = fitted(x, 2 * y, 3).probabilities(x)
    np.testing.assert_allclose(wide[:, [0, 2]], fitted(x, y, 2).probabilities(x))
    assert not wide[:, 1].any()


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


def test_the_cut_off_by_hand():
    """0.35 misses nothing and errs once in three; 0.6 misses one of two: 1 + 2/3 against 1/2 + 1."""
    assert cutoff(np.array([0, 0, 1, 0, 1]), np.array([0.1, 0.3, 0.4, 0.5, 0.7])) == pytest.approx(0.35)


def test_the_cut_off_has_youdens_greatest_index():
    x, y = drawn([80, 40])
    probability = fitted(x, y, 2).probabilities(x)[:, 1]
    false, true, _ = roc_curve(y, probability, drop_intermediate=False)
    predicted = probability >= cutoff(y, probability)
    assert predicted[y == 1].mean() - predicted[y == 0].mean() == pytest.approx((true - false).max())


def test_more_records_of_a_class_do_not_move_the_cut_off():
    x, y = drawn([80, 40])
    probability = fitted(x, y, 2).probabilities(x)[:, 1]
    again = np.concatenate([np.arange(len(y)), *[np.flatnonzero(y)] * 3])
    assert cutoff(y[again], probability[again]) == cutoff(y, probability)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_alone_has_the_cut_off_one_half(label):
    assert cutoff(np.full(3, label), np.array([0.1, 0.2, 0.3])) == 0.5


def test_f1_is_taken_at_the_cut_off_of_the_training_records():
    """The test records alone would have another: training says 0.5, so of the positives 0.4 and 0.9 one is found."""
    logit = np.log([[0.2 / 0.8], [0.8 / 0.2]]), np.log([[0.4 / 0.6], [0.9 / 0.1], [0.1 / 0.9]])
    model = Logistic(np.array([[0.0, 1.0]]), np.zeros(2))
    result = scores(model, (logit[0], np.array([0, 1])), (logit[1], np.array([1, 1, 0])))
    assert result == pytest.approx((1.0, 2 / 3, 0.5))


def test_several_classes_are_predicted_by_the_most_probable():
    train, test = drawn([60, 30, 20]), drawn([50, 50, 50], seed=4)
    model = fitted(*train, 3)
    result = scores(model, train, test)
    assert result.f1 == pytest.approx(f1_score(test[1], model.probabilities(test[0]).argmax(1), average="macro"))
    assert np.isnan(result.cutoff)


# ---------------------------------------------------------------- methods


def test_smote_is_imbalanced_learns():
    own = site([40, 9], seed=3)
    x, y = SMOTE(k_neighbors=5, random_state=3).fit_resample(own.x, own.y)
    assert np.bincount(y).tolist() == [40, 40]
    assert METHODS["smote"](own) == pytest.approx(scores(fitted(x, y, 2), (x, y), (own.test_x, own.test_y)))
    assert METHODS["smote"](own) != pytest.approx(METHODS["oversampled"](own))


def test_smote_of_few_records_has_fewer_neighbours_and_of_one_none():
    few, one = site([40, 3]), site([40, 1])
    x, y = SMOTE(k_neighbors=2, random_state=0).fit_resample(few.x, few.y)
    assert METHODS["smote"](few) == pytest.approx(scores(fitted(x, y, 2), (x, y), (few.test_x, few.test_y)))
    assert METHODS["smote"](one) == METHODS["oversampled"](one)


def test_smote_without_its_package_says_what_to_install(monkeypatch):
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
