"""Epsilons against published ones, closed forms, sums of parts and two other accountants; a coin for each record."""

import functools
import math

import pytest
import torch
from dp_accounting import get_epsilon_gaussian
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.clients import CoinBatches, DatasetClient, emptied
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import secure_uniform
from lit_epgan.privacy import Ledger, Releases, noise_multiplier_for, spent
from tests.refusals import assert_refused


@pytest.mark.parametrize(
    ("users", "emptied", "replaced"), [(250_000, 1.645, 14.03), (500_000, 1.175, 8.22), (1_250_000, 0.959, 6.96)]
)
def test_sampling_without_replacement(users, emptied, replaced):
    """The table of the errata page: z = 1, cohorts of 1,000, 1,000 rounds, delta = N^-1.1."""
    made = [Releases(1.0, 1000, "fixed", 1000 / users, users)]
    delta = users**-1.1
    assert spent(made, delta).epsilon == pytest.approx(emptied, rel=0.01)
    assert spent(made, delta, "replace_one").epsilon == pytest.approx(replaced, rel=0.01)


def test_everyone_is_one_gaussian_release_of_more_precision():
    """k releases at z tell as much as one at z / sqrt(k); a replaced user moves the sum twice as far."""
    assert spent([Releases(2.0)], 1e-5).epsilon == pytest.approx(1.993, abs=1e-3)
    exactly = get_epsilon_gaussian((9 / 64 + 4 / 16) ** -0.5, 1e-5)
    assert spent([Releases(8.0, 9), Releases(4.0, 4)], 1e-5).epsilon == pytest.approx(exactly)
    replaced = spent([Releases(4.0)], 1e-5, "replace_one")
    assert replaced.epsilon == spent([Releases(2.0)], 1e-5).epsilon


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_a_coin_that_always_says_yes_is_everyone(relation):
    coins, everyone = (spent([Releases(3.0, 2, kind)], 1e-5, relation).epsilon for kind in ("poisson", "everyone"))
    assert coins == pytest.approx(everyone, rel=2e-3)


def test_coins_cost_less_than_everyone_and_add_up():
    once, twice = (spent([Releases(1.0, n, "poisson", 0.1)], 1e-5).epsilon for n in (1, 2))
    assert once < twice < spent([Releases(1.0, 2)], 1e-5).epsilon / 3


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_different_kinds_add_up(relation):
    """More than each by itself, and no more than both, each at half of delta."""
    fixed, coins = Releases(2.0, 10, "fixed", 0.1, 500), Releases(2.0, 10, "poisson", 0.1)
    both = spent([fixed, coins], 1e-5, relation).epsilon
    assert both > max(spent([each], 1e-5, relation).epsilon for each in (fixed, coins))
    assert both <= 1.001 * sum(spent([each], 5e-6, relation).epsilon for each in (fixed, coins))


def test_an_epsilon_says_all_that_it_takes_to_understand_it():
    said = str(spent([Releases(1.0, 100, "fixed", 0.1, 1000)], 1e-5))
    for part in ("1e-05", "for users", "one user's whole data set emptied", "Renyi"):
        assert part in said
    assert "replaced by another" in str(spent([Releases(1.0)], 1e-5, "replace_one"))
    assert spent([], 1e-5).epsilon == spent([Releases(1.0, 0)], 1e-5).epsilon == 0


@pytest.mark.parametrize("kind", [Releases(1.0), Releases(1.0, 1, "fixed", 0.1, 1000)])
def test_the_noise_for_an_epsilon_is_the_smallest(kind):
    def releases(z: float) -> list[Releases]:
        return [kind.with_noise(z, 50)]

    z = noise_multiplier_for(2.0, 1e-5, releases)
    assert spent(releases(z), 1e-5).epsilon <= 2.0 < spent(releases(z / 1.002), 1e-5).epsilon


def test_what_cannot_be_is_refused():
    for delta in (0.0, 1.0, float("nan")):
        assert_refused("delta", spent, [Releases(1.0)], delta)
    assert_refused("relation", spent, [Releases(1.0)], 1e-5, "both")
    for target in (math.inf, math.nan, 0.0, -1.0):
        assert_refused("target_epsilon is .* above 0", noise_multiplier_for, target, 1e-5, lambda z: [Releases(z)])
    for wrong in ((0.0, 1), (1.0, -1), (1.0, 1, "poisson", 0.0), (1.0, 1, "fixed", 0.5)):
        with pytest.raises(UserError):
            Releases(*wrong)
    for own in ({"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 1.0}, {"delta": -1e-9}):
        assert_refused("of its own cannot be", Releases, 1.0, **own)


DELTA = 1e-5
SETTINGS = [(1.0, 0.1, 10), (2.0, 0.05, 500)]  # z, the probability, releases


@functools.cache
def by_coins(z: float, rate: float, count: int) -> float:
    return spent([Releases(z, count, "poisson", rate)], DELTA).epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "count"), SETTINGS)
def test_prv_accountant(z, rate, count):
    """Gopi, Lee and Wutschitz 2021: its bounds hold ours between them, and its estimate is ours."""
    prv = pytest.importorskip("prv_accountant", reason="pip install prv-accountant")
    mechanism = prv.PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=rate)
    accountant = prv.PRVAccountant(
        prvs=[mechanism], max_self_compositions=[count], eps_error=0.01, delta_error=DELTA / 1000
    )
    lower, estimate, upper = accountant.compute_epsilon(DELTA, num_self_compositions=[count])
    ours = by_coins(z, rate, count)
    assert lower < ours < upper
    assert ours == pytest.approx(estimate, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("z", "rate", "count"), SETTINGS)
def test_opacus(z, rate, count):
    """Ours are at most what either of its accountants says; its bound by Renyi divergences is the looser one."""
    accountants = pytest.importorskip("opacus.accountants", reason="pip install opacus")
    by_losses, by_renyi = accountants.PRVAccountant(), accountants.RDPAccountant()
    by_losses.history = by_renyi.history = [(z, rate, count)]
    ours = by_coins(z, rate, count)
    assert ours == pytest.approx(by_losses.get_epsilon(DELTA, eps_error=0.01), abs=0.011)
    assert ours < by_renyi.get_epsilon(DELTA) < 1.25 * ours


SELECTION, VOTE = Releases(2.0, 3, delta=1e-6), Releases(math.inf, 2, epsilon=0.25, delta=1e-6)


def test_own_epsilons_are_added_and_deltas_taken_off_twice_where_a_user_is_replaced():
    noise = spent([Releases(2.0, 3)], 5e-6).epsilon
    assert spent([SELECTION, VOTE], 1e-5).epsilon == pytest.approx(noise + 0.5)
    assert spent([VOTE], 1e-5).epsilon == 0.5
    assert spent([Releases(math.inf, 2)], 1e-5).epsilon == 0
    own = 3 * 2e-6 + 2 * (1 + math.exp(0.25)) * 1e-6
    noise = spent([Releases(2.0, 3)], 2e-5 - own, "replace_one").epsilon
    assert spent([SELECTION, VOTE], 2e-5, "replace_one").epsilon == pytest.approx(noise + 1.0)
    assert spent([SELECTION.times(11)], 1e-5).epsilon == math.inf
    assert_refused("no noise multiplier", noise_multiplier_for, 1.0, 1e-5, lambda z: [Releases(z, delta=1e-5)])


def test_a_ledger_keeps_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for releases in (SELECTION, VOTE):
        name = ledger.begin(str(releases), releases)
        for _ in range(releases.count):
            ledger.release(name)
        ledger.end(name)
    assert Ledger(ledger.path).read().total() == spent([SELECTION, VOTE], 1e-5)
    assert str(SELECTION) == "3 releases with noise multiplier 2, all users take part, and (0, 1e-06) of its own"
    assert str(VOTE) == "2 releases, all users take part, and (0.25, 1e-06) of its own"


@pytest.mark.parametrize("seed", [None, 3])
def test_each_record_is_drawn_at_the_rate(seed):
    """Over 4,000 steps every one of 50 records has its rate 8 / 50, within five standard errors; sizes are binomial."""
    drawn = torch.zeros(4000, 50, dtype=torch.float64)
    for step, batch in enumerate(CoinBatches(seed)(50, 8, 4000, 1, 0, 0, 0)):
        assert len(set(batch)) == len(batch)
        drawn[step, batch] = 1
    rate = 8 / 50
    error = (rate * (1 - rate) / 4000) ** 0.5
    assert float((drawn.mean(0) - rate).abs().max()) < 5 * error
    sizes = drawn.sum(1)
    assert float(sizes.mean()) == pytest.approx(8, rel=0.03)
    assert float(sizes.var()) == pytest.approx(50 * rate * (1 - rate), rel=0.15)
    assert abs(float(torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max())) < 0.1


def test_coins_give_batches_of_the_passes_they_stand_for(monkeypatch):
    assert list(CoinBatches()(3, 8, None, 2)) == [[0, 1, 2]] * 2
    assert len(list(CoinBatches()(50, 8, None, 2))) == 14
    monkeypatch.setattr(torch, "rand", lambda n, **options: torch.zeros(n, dtype=torch.float64))
    assert next(CoinBatches(3)(50, 8, 1, 1)) == list(range(50))


def test_coins_are_secret_unless_a_study_repeats_them():
    def drawn(seed: int | None, *stream: int) -> list[list[int]]:
        return list(CoinBatches(seed)(200, 20, 3, 1, *stream))

    assert drawn(None, 0, 1, 2) != drawn(None, 0, 1, 2)
    assert drawn(7, 0, 1, 2) == drawn(7, 0, 1, 2)
    assert drawn(7, 0, 1, 2) != drawn(7, 0, 1, 3)
    assert len(secure_uniform(0)) == 0
    assert 0 < float(secure_uniform(1000).min()) < float(secure_uniform(1000).max()) < 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_without_a_record_has_an_empty_batch_of_the_same_kind(workers):
    collate = torch.utils.data.default_collate if workers else None
    client = DatasetClient(TensorDataset(torch.ones(9, 2), torch.arange(9)), 4, collate, 0)
    client.draw = lambda *_: iter([[3, 4], [], [8]])
    batches = list(client.batches(3, 1, 0, 0, 0))
    assert [batch[1].tolist() for batch in batches] == [[3, 4], [], [8]]
    assert batches[1][0].shape == (0, 2)
    assert emptied({"x": torch.ones(2, 3)})["x"].shape == (0, 3)
    assert client.culprits(0, 3, 1, 0, 0, 0) == []


KINDS = [Releases(1.0), Releases(1.0, 1, "poisson", 0.01), Releases(1.0, 1, "fixed", 0.01, 1000)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.sampling)
@pytest.mark.parametrize("z", [1e-160, 1e-8, 0.01, 0.06, 1e8, 1e200])
def test_tiny_and_huge_noise_cost_what_is_true_and_at_once(kind, z):
    """Never less than a lower bound: a release with probability q costs epsilon > ln((e^e' - 1) q), e' of one."""
    cost = spent([kind.with_noise(z, 100)], 1e-5).epsilon
    whole = spent([Releases(z, 100)], 1e-5).epsilon
    assert 0 <= cost <= whole
    assert (cost == math.inf) == (z == 1e-160)
    assert cost == 0 if z > 1 else cost == math.inf or cost > 0.5 * 0.01 / z**2 / 100


@pytest.mark.parametrize("kind", KINDS, ids=lambda each: each.sampling)
@pytest.mark.parametrize("delta", [1e-20, 1e-100, 5e-324])
def test_a_tiny_delta_has_a_finite_epsilon(kind, delta):
    """The distributions know nothing beyond 1e-15; the Gaussian mechanism does."""
    cost = spent([kind.with_noise(1.0, 100)], delta)
    assert spent([kind.with_noise(1.0, 100)], 1e-9).epsilon < cost.epsilon < 500


def test_a_target_beyond_reach_ends_the_search():
    for kind in KINDS:
        assert_refused("no noise multiplier", noise_multiplier_for, 1e-12, 1e-5, lambda z: [kind.with_noise(z, 100)])  # noqa: B023
    assert 0.0009 < noise_multiplier_for(1e300, 1e-5, lambda z: [Releases(z, 100)]) <= 0.001
