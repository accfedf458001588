"""Amortised inference: against a posterior in closed form, and as a file; and how calibration is measured."""

import math
import sys

import pytest
import torch
from scipy import stats
from torch import Tensor

from evidence.amortised import AmortisedPosterior, Summary, draw_parameters, ordered
from evidence.calibration import coverage, ranks, uniformity
from lit_epgan.bayes.simulator import Simulator
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused

RECORDS, NOISE = 4, 0.5
VARIANCE = 1 / RECORDS + NOISE**2
REASON = "pip install -e '.[sbi]'"


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class TwoMeans(Simulator):
    """theta ~ N(0, I), records N(theta, I) in two dimensions; ``exchangeable`` says that their names mean nothing."""

    size = dimensions = 2

    def __init__(self, exchangeable: bool = False) -> None:
        self.exchangeable = exchangeable

    def prior(self, n: int, generator: torch.Generator) -> Tensor:
        return torch.randn(n, 2, generator=generator, dtype=torch.float64)

    def log_prior(self, theta: Tensor) -> Tensor:
        return -0.5 * theta.square().sum(1)

    def simulate(self, theta: Tensor, records: int, generator: torch.Generator) -> Tensor:
        return theta[:, None].float() + torch.randn(len(theta), records, 2, generator=generator)

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        return {"mean": theta}

    def symmetries(self) -> Tensor:
        return torch.tensor([[0, 1], [1, 0]]) if self.exchangeable else super().symmetries()


def noisy_mean(x: Tensor, generator: torch.Generator) -> Tensor:
    return x.mean(1) + NOISE * torch.randn(len(x), 2, generator=generator)


def trained(simulator: Simulator, summary: Summary = noisy_mean, steps: int = 2) -> AmortisedPosterior:
    pytest.importorskip("sbi", reason=REASON)
    return AmortisedPosterior.trained(simulator, summary, RECORDS, generator(), steps=steps)


@pytest.mark.slow
def test_a_gaussian_mean_has_its_closed_posterior_noise_included():
    """s | theta ~ N(theta, v), v = 1 / records + noise^2; so theta | s ~ N(s / (1 + v), v / (1 + v))."""
    simulator, v = TwoMeans(), VARIANCE
    posterior = trained(simulator, steps=150)
    sd = math.sqrt(v / (1 + v))
    for s in (torch.tensor([0.0, 1.0]), torch.tensor([-1.0, 0.5])):
        draws = posterior(s, 10_000, generator(1))
        torch.testing.assert_close(draws.mean(0), s.double() / (1 + v), atol=0.12 * sd, rtol=0)
        torch.testing.assert_close(draws.std(0), torch.full((2,), sd, dtype=torch.float64), atol=0, rtol=0.1)
        assert abs(draws.T.corrcoef()[0, 1]) < 0.06
    truth = simulator.prior(60, generator(2))
    observed = noisy_mean(simulator.simulate(truth, RECORDS, generator(3)), generator(4))
    u = ranks(truth, torch.stack([posterior(s, 200, generator(i)) for i, s in enumerate(observed)]), generator(5))
    assert uniformity(u).min() > 0.01
    assert all(each.low < 0.9 < each.high for each in coverage(u))


@pytest.mark.slow
def test_of_exchangeable_means_one_order_is_learnt():
    """The summary is sorted, so both orders fit it alike; that which ascends is the closed posterior, folded."""
    posterior, v = trained(TwoMeans(exchangeable=True), lambda x, g: noisy_mean(x, g).sort(1).values, 120), VARIANCE
    s, sd = torch.tensor([-1.0, 1.5]), math.sqrt(v / (1 + v))
    raw = draw_parameters(posterior.estimator, s, 5000, generator(1))
    assert (raw[:, 0] <= raw[:, 1]).double().mean() > 0.95
    draws = posterior(s, 5000, generator(1))
    assert (draws[:, 0] <= draws[:, 1]).all()
    folded = s.double() / (1 + v) + sd * torch.randn(5000, 2, generator=generator(2), dtype=torch.float64)
    torch.testing.assert_close(draws.mean(0), folded.sort(1).values.mean(0), atol=0.2 * sd, rtol=0)


def test_it_is_the_same_as_a_file(tmp_path):
    posterior = trained(TwoMeans(exchangeable=True))
    posterior.save(tmp_path / "posterior.pt")
    read = AmortisedPosterior.load(tmp_path / "posterior.pt")
    s = torch.tensor([0.3, -0.2])
    assert torch.equal(read(s, 50, generator(1)), posterior(s, 50, generator(1)))
    assert (read.records, read.length, read.by) == (RECORDS, 2, 0)
    torch.load(tmp_path / "posterior.pt", weights_only=True)


def test_all_randomness_comes_from_its_generators():
    s, first = torch.zeros(2), trained(TwoMeans())
    torch.rand(1)  # the global stream is elsewhere now
    before = torch.get_rng_state()
    again = trained(TwoMeans())
    assert torch.equal(first(s, 9, generator(1)), again(s, 9, generator(1)))
    assert not torch.equal(first(s, 9, generator(1)), first(s, 9, generator(2)))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_sbi_or_answers_it_is_refused(tmp_path, monkeypatch):
    posterior = trained(TwoMeans())
    assert_refused(r"has shape \(3,\).*summaries of 2 numbers", posterior, torch.zeros(3), 5, generator())
    assert_refused("not finite", posterior, torch.tensor([0.0, math.nan]), 5, generator())
    with pytest.raises(UserError, match="a coordinate from 0 to 1"):
        AmortisedPosterior.trained(TwoMeans(), noisy_mean, RECORDS, generator(), by=2, steps=2)
    with pytest.raises(UserError, match="not finite"):
        AmortisedPosterior.trained(TwoMeans(), lambda x, _: x.mean(1) / 0, RECORDS, generator())
    posterior.save(tmp_path / "posterior.pt")
    with (tmp_path / "posterior.pt").open("r+b") as file:
        file.seek(600)
        file.write(b"x")
    assert_refused("damaged", AmortisedPosterior.load, tmp_path / "posterior.pt")
    tensor_file.save({"weights": {}}, tmp_path / "other.pt")
    assert_refused("no amortised posterior", AmortisedPosterior.load, tmp_path / "other.pt")
    fits_not = {"records": 4, "size": 3, "length": 2, "by": 0, "symmetries": torch.arange(3)[None], "weights": {}}
    tensor_file.save(fits_not, tmp_path / "foreign.pt")
    assert_refused("train it again", AmortisedPosterior.load, tmp_path / "foreign.pt")
    monkeypatch.setitem(sys.modules, "sbi", None)
    monkeypatch.delitem(sys.modules, "sbi.neural_nets", raising=False)
    with pytest.raises(UserError, match=r"pip install 'lit_epgan\[sbi\]'"):
        AmortisedPosterior.trained(TwoMeans(), noisy_mean, RECORDS, generator())


def test_components_are_ordered_by_one_of_their_coordinates():
    """Three components of two coordinates, by the second of each: 5 < 7 < 9."""
    theta = torch.tensor([[1.0, 9.0, 2.0, 5.0, 3.0, 7.0], [4.0, 5.0, 5.0, 7.0, 6.0, 9.0]], dtype=torch.float64)
    blocks = [[0, 1], [2, 3], [4, 5]]
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    symmetries = torch.tensor([[*blocks[i], *blocks[j], *blocks[k]] for i, j, k in orders])
    expected = [[2.0, 5.0, 3.0, 7.0, 1.0, 9.0], [4.0, 5.0, 5.0, 7.0, 6.0, 9.0]]
    assert ordered(theta, symmetries, 1).tolist() == expected
    assert ordered(theta, symmetries, 3).tolist() == expected
    for permutation in symmetries:
        assert ordered(theta[:, permutation], symmetries, 1).tolist() == expected


M, L = 4000, 99


def gaussian_ranks(width: float = 1.0, shift: float = 0.0, m: int = M, seed: int = 0) -> Tensor:
    """mu ~ N(0, 1), x ~ N(mu, 1): mu | x ~ N(x / 2, 1 / 2). Two independent parameters, the second always right."""
    own = generator(seed)
    mu = torch.randn(m, 2, generator=own)
    x = mu + torch.randn(m, 2, generator=own)
    sd = math.sqrt(0.5) * torch.tensor([width, 1.0])
    draws = (x / 2 + torch.tensor([shift, 0.0]))[:, None] + sd * torch.randn(m, L, 2, generator=own)
    return ranks(mu, draws, own)


def test_ranks_are_calibrated_and_shapes_fit():
    u = gaussian_ranks()
    assert uniformity(u).min() > 0.05
    for each in coverage(u):
        assert each.share == pytest.approx(0.9, abs=0.02)
        assert each.low < 0.9 < each.high
    assert_refused(r"truth \(5, 2\)", ranks, torch.zeros(5, 2), torch.zeros(5, 9, 3), generator())
    assert_refused("below 0", ranks, torch.zeros(1, 1), torch.zeros(1, 2, 1), generator(), torch.tensor([[3.0, -1.0]]))
    assert_refused("all 0", ranks, torch.zeros(1, 1), torch.zeros(1, 2, 1), generator(), torch.zeros(1, 2))


@pytest.mark.parametrize("width", [0.8, 1.2])
def test_a_width_wrong_by_a_fifth_is_seen(width):
    """The central 90 % interval of a posterior too narrow by c covers 2 Phi(1.645 c) - 1."""
    u = gaussian_ranks(width)
    p = uniformity(u)
    assert p[0] < 1e-3
    assert p[1] > 0.05
    assert coverage(u)[0].share == pytest.approx(2 * stats.norm.cdf(1.645 * width) - 1, abs=0.02)


def test_a_shift_is_seen_and_a_fifth_mostly_with_two_hundred_simulations():
    assert uniformity(gaussian_ranks(shift=0.2))[0] < 1e-3
    found = [float(uniformity(gaussian_ranks(0.8, m=200, seed=seed))[0]) < 0.05 for seed in range(40)]
    assert sum(found) >= 30


def test_p_values_are_uniform_where_ranks_are():
    p = uniformity(torch.rand(200, 2000, generator=generator(), dtype=torch.float64))
    assert stats.kstest(p.numpy(), "uniform").pvalue > 0.01
    own = generator(3)
    few = torch.randn(20_000, 4, 1, generator=own)
    coins = torch.randint(2, (20_000, 4, 1), generator=own)
    for each in (few, coins):
        u = ranks(each[:, 0], each[:, 1:], own)
        assert stats.kstest(u[:, 0].numpy(), "uniform").pvalue > 0.01


def test_ranks_and_an_interval_by_hand():
    truth, draws = torch.tensor([[2.5]]), torch.tensor([[[1.0], [2.0], [3.0]]])
    u = float(torch.rand(1, generator=generator(5), dtype=torch.float64))
    assert float(ranks(truth, draws, generator(5))) == pytest.approx((2 + u) / 4)
    weighted = ranks(truth, draws, generator(5), torch.tensor([[2.0, 2.0, 6.0]]))
    assert float(weighted) == pytest.approx((0.4 + 0.44 * u) / 1.44)  # sum w^2 = .04 + .04 + .36
    # all of n held: the interval begins at (.05 / 2)^(1 / n)
    (found,) = coverage(torch.full((40, 1), 0.5))
    assert (found.share, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(0.025 ** (1 / 40))


@pytest.mark.parametrize(("power", "right"), [(1.0, True), (2.0, False)])
def test_weights_are_heeded(power, right):
    """Draws from the prior, weighted by the likelihood, or by its square, as if each record had been seen twice."""
    own = generator(6)
    mu = torch.randn(M, 1, generator=own)
    x = mu + torch.randn(M, 1, generator=own)
    draws = torch.randn(M, 400, 1, generator=own)
    weights = 7 * torch.exp(-power / 2 * (x - draws[..., 0]) ** 2)
    u = ranks(mu, draws, own, weights)
    assert (uniformity(u)[0] > 0.05) == right
    assert (coverage(u)[0].high > 0.9) == right
