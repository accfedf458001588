"""Mean embeddings of simulated data: against closed forms of Gaussians, and the directions that keep information."""

import math
from typing import NamedTuple

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import LogNormal, Normal

from lit_epgan.bayes import Independent, RandomFourierFeatures, Statistics
from lit_epgan.bayes.inference import LinearMean, Refinement, SyntheticLikelihood
from lit_epgan.bayes.mean_embeddings import basis, leading, ridged, root, spread_directions, sufficient_directions
from lit_epgan.bayes.search import Search
from lit_epgan.federated.features import Features
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from tests.refusals import assert_refused


class Scaled(Independent):
    """x ~ N(m, s^2)."""

    def __init__(self) -> None:
        super().__init__({"m": Normal(0.0, 2.0), "s": LogNormal(0.0, 0.5)}, dimensions=1)

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(len(values["m"]), records, 1, generator=generator)
        return values["m"].float()[:, None, None] + values["s"].float()[:, None, None] * noise


class Counted(Independent):
    """Records that say how many were asked for, and in which place they are: x_j = m + j / records."""

    def __init__(self) -> None:
        super().__init__({"m": Normal(0.0, 1.0)}, dimensions=1)
        self.asked: list[tuple[int, int]] = []

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        self.asked.append((len(values["m"]), records))
        return values["m"].float()[:, None, None] + (torch.arange(records) / records)[:, None]


def features(frequencies=6, dimensions=1):
    return RandomFourierFeatures(dimensions, frequencies, [1.0, 2.0], generator_for("features")).float()


def expected_cosines(w, m, s):
    """E cos(w x) and E sin(w x) of x ~ N(m, s^2)."""
    damped = torch.exp(-0.5 * (s * w) ** 2)
    return damped * torch.cos(w * m), damped * torch.sin(w * m)


def closed_mean(phi, m, s):
    return torch.cat(expected_cosines(phi.omega[0].double(), m, s)) / math.sqrt(phi.size / 2)


def closed_covariance(phi, m, s):
    """Cov phi (D, D), by 2 cos a cos b = cos(a - b) + cos(a + b) and its like."""
    w = phi.omega[0].double()
    (cos_less, sin_less), (cos_more, sin_more) = (expected_cosines(w[:, None] + sign * w, m, s) for sign in (-1.0, 1.0))
    cc, ss = (cos_less + cos_more) / 2, (cos_less - cos_more) / 2
    cs = (sin_more - sin_less) / 2  # cos(w_i x) sin(w_j x)
    second = torch.cat([torch.cat([cc, cs], 1), torch.cat([cs.T, ss], 1)]) / (phi.size / 2)
    mean = closed_mean(phi, m, s)
    return second - torch.outer(mean, mean)


THETA = torch.tensor([[0.5, math.log(0.8)], [-3.0, math.log(1.5)]], dtype=torch.float64)
TRUE = [(0.5, 0.8), (-3.0, 1.5)]


@pytest.mark.parametrize("rows", [8_192, 64], ids=["at once", "piece by piece"])
def test_simulated_means_and_their_noise_are_those_of_gaussians(rows, monkeypatch):
    """Of 150 records: 64 + 64 + 22 where 64 are simulated at a time. 400 data sets each: a percent or two."""
    monkeypatch.setattr("lit_epgan.bayes.mean_embeddings.ROWS", rows)
    phi = features()
    found = Statistics(Scaled(), phi).means(THETA.repeat_interleave(400, 0), 150, generator_for("means"))
    assert found.dtype == torch.float64
    for means, (m, s) in zip(found.split(400), TRUE, strict=True):
        covariance = closed_covariance(phi, m, s) / 150
        error = (means.mean(0) - closed_mean(phi, m, s)) / (covariance.diagonal() / 400).sqrt()
        assert float(error.abs().max()) < 4
        assert torch.allclose(torch.cov(means.T), covariance, atol=0.15 * float(covariance.diagonal().max()))


def test_pieces_are_averaged_by_their_sizes_and_small_data_sets_simulated_together(monkeypatch):
    monkeypatch.setattr("lit_epgan.bayes.mean_embeddings.ROWS", 10)
    simulator, phi = Counted(), features()
    theta = torch.tensor([[0.3], [-1.0]], dtype=torch.float64)
    found = Statistics(simulator, phi).means(theta, 25, generator_for("none"))
    assert simulator.asked == [(1, 10), (1, 10), (1, 5)] * 2
    for means, m in zip(found, (0.3, -1.0), strict=True):
        x = torch.cat([m + torch.arange(k) / k for k in (10, 10, 5)])[:, None]
        torch.testing.assert_close(means, phi(x).double().mean(0), atol=1e-6, rtol=0)
    simulator = Counted()
    Statistics(simulator, features()).means(torch.zeros(7, 1, dtype=torch.float64), 3, generator_for("none"))
    assert simulator.asked == [(3, 3), (3, 3), (1, 3)]


def test_the_covariance_is_that_within_a_data_set():
    """On average over two parameters far apart: what lies between their means is no part of it."""
    phi = features()
    found = Statistics(Scaled(), phi).covariance(THETA, generator_for("pairs"))
    expected = sum(closed_covariance(phi, m, s) for m, s in TRUE) / 2
    assert torch.allclose(found, expected, atol=0.05 * float(expected.diagonal().max()))
    between = torch.cov(torch.stack([closed_mean(phi, m, s) for m, s in TRUE]).T)
    assert float(between.diagonal().max()) > 0.2 * float(expected.diagonal().max())


def test_moments_along_directions_are_those_of_gaussians_and_of_few_records_unbiased(monkeypatch):
    """V phi has mean V E phi and covariance V Cov(phi) V^T, each of its own parameters: 20,000 records, a percent."""
    monkeypatch.setattr("lit_epgan.bayes.mean_embeddings.ROWS", 30_000)  # one data set at a time
    phi, v = features(), torch.randn(2, 12, generator=generator_for("v"), dtype=torch.float64)
    means, covariances = Statistics(Scaled(), phi).moments(THETA, v, 20_000, generator_for("moments"))
    assert (means.dtype, covariances.shape) == (torch.float64, (2, 2, 2))
    for mean, covariance, (m, s) in zip(means, covariances, TRUE, strict=True):
        expected = v @ closed_covariance(phi, m, s) @ v.T
        assert torch.allclose(covariance, expected, atol=0.04 * float(expected.diagonal().max()))
        error = (mean - v @ closed_mean(phi, m, s)) / (expected.diagonal() / 20_000).sqrt()
        assert float(error.abs().max()) < 4
    phi, v = features(), torch.eye(12, dtype=torch.float64)
    many = THETA[:1].expand(4000, -1)
    _, covariances = Statistics(Scaled(), phi).moments(many, v, 3, generator_for("three"))
    expected = closed_covariance(phi, *TRUE[0])
    assert torch.allclose(covariances.mean(0), expected, atol=0.04 * float(expected.diagonal().max()))


@pytest.mark.parametrize("scaled", [0.0, 0.3])
def test_the_synthetic_likelihood_is_a_gaussians(scaled):
    """N(s; V E phi, (V Cov(phi) V^T + N) / n), where N holds scaled s s^T and theta's likelihood scaled m m^T."""
    phi, v = features(), torch.randn(2, 12, generator=generator_for("v"), dtype=torch.float64)
    seen, noise = v @ closed_mean(phi, 0.4, 0.9), torch.tensor([[0.4, 0.1], [0.1, 0.3]], dtype=torch.float64)
    known = noise + scaled * torch.outer(seen, seen)
    likelihood = SyntheticLikelihood(Statistics(Scaled(), phi), v, seen, known, scaled, data=50.0, records=200_000)
    found = likelihood.log(THETA, generator_for("likelihood"))
    expected = []
    for m, s in TRUE:
        mean = v @ closed_mean(phi, m, s)
        covariance = v @ closed_covariance(phi, m, s) @ v.T + noise + scaled * torch.outer(mean, mean)
        expected.append(stats.multivariate_normal.logpdf(seen, mean, covariance / 50))
    assert float(found[0] - found[1]) == pytest.approx(expected[0] - expected[1], rel=0.01)


class Linear(NamedTuple):
    """Means that are linear in three parameters: mu = a + A theta, one record's noise of covariance Sigma."""

    theta: Tensor
    means: Tensor
    slope: Tensor
    covariance: Tensor

    def information(self, directions: Tensor) -> Tensor:
        """Fisher's, of one record, in V mu: (V A)^T (V Sigma V^T)^-1 (V A)."""
        seen = directions @ self.slope
        return seen.T @ torch.linalg.solve(directions @ self.covariance @ directions.T, seen)


@pytest.fixture
def linear():
    generator = generator_for("linear")
    theta = torch.randn(200, 3, generator=generator, dtype=torch.float64) @ torch.diag(
        torch.tensor([1.0, 0.2, 5.0], dtype=torch.float64)
    )
    slope = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    factor = torch.randn(12, 12, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.T + 0.5 * torch.eye(12, dtype=torch.float64)
    return Linear(theta, 4.0 + theta @ slope.T, slope, covariance)


def test_as_many_numbers_as_parameters_keep_the_information(linear):
    b = sufficient_directions(linear.theta, linear.means, linear.covariance)
    assert b.shape == (3, 12)
    torch.testing.assert_close(b @ linear.covariance @ b.T, torch.eye(3).double(), atol=5e-3, rtol=0)
    everything = linear.information(torch.eye(12, dtype=torch.float64))
    torch.testing.assert_close(linear.information(b), everything, rtol=5e-3, atol=5e-3)
    fewer = linear.information(torch.randn(3, 12, generator=generator_for("any"), dtype=torch.float64))
    assert float(fewer.det()) < 0.5 * float(everything.det())  # not any three numbers do


def test_where_means_are_linear_the_spread_tells_the_same_and_the_widest_comes_first(linear):
    """Both span Sigma^-1 A."""
    v = spread_directions(linear.means, linear.covariance, 3)
    torch.testing.assert_close(v @ linear.covariance @ v.T, torch.eye(3).double(), atol=5e-3, rtol=0)
    b = sufficient_directions(linear.theta, linear.means, linear.covariance)
    cosines = torch.linalg.svdvals(v @ linear.covariance @ b.T)
    torch.testing.assert_close(cosines, torch.ones(3).double(), atol=5e-3, rtol=0)
    (v,) = spread_directions(linear.means, linear.covariance, 1)
    whitened = torch.linalg.solve(torch.linalg.cholesky(linear.covariance), linear.means.T)
    widest = float(torch.linalg.eigvalsh(torch.cov(whitened))[-1])
    assert float((linear.means @ v).var()) == pytest.approx(widest, rel=1e-2)


def test_the_root_of_a_metric_has_its_rank_and_a_basis_spans_the_rows_once():
    factor = torch.randn(4, 9, generator=generator_for("metric"), dtype=torch.float64)
    r = root(factor.T @ factor)
    assert r.shape == (4, 9)
    torch.testing.assert_close(r.T @ r, factor.T @ factor)
    rows = torch.randn(4, 9, generator=generator_for("rows"), dtype=torch.float64)
    q = basis(torch.cat([rows, 1e3 * rows[:3] + 1e-9]))
    assert q.shape == (4, 9)
    torch.testing.assert_close(q @ q.T, torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(rows @ q.T @ q, rows)


def test_a_metric_keeps_the_directions_that_are_worth_most_and_a_ridge_is_a_share_of_the_variance():
    """R Sigma R^T is known: the kept directions have its largest eigenvalues, and nothing between them."""
    worth = torch.tensor([5.0, 1.0, 9.0, 3.0], dtype=torch.float64)
    covariance = torch.diag(torch.tensor([4.0, 4.0, 1.0, 0.25], dtype=torch.float64))
    r = torch.diag((worth / covariance.diagonal()).sqrt())
    assert leading(r, covariance, 4) is r
    kept = leading(r, covariance, 2)
    torch.testing.assert_close(kept @ covariance @ kept.T, torch.diag(torch.tensor([5.0, 9.0], dtype=torch.float64)))
    covariance = torch.tensor([[1.0, 0.5], [0.5, 3.0]], dtype=torch.float64)
    assert ridged(covariance, 0.01).tolist() == [[1.02, 0.5], [0.5, 3.02]]
    assert torch.linalg.cholesky(ridged(torch.ones(3, 3, dtype=torch.float64), 1e-4)).isfinite().all()


def test_pairs_are_mirrored_and_have_the_same_random_numbers():
    """A location moves a record and its pair's by opposite amounts, so that both means add up to twice the centre's."""

    class Located(Independent):
        def __init__(self) -> None:
            super().__init__({"place": Normal(0.0, 1.0)}, 1)

        def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
            noise = torch.randn(len(values["place"]), records, 1, generator=generator)
            return values["place"][:, None, None].float() + noise

    phi = RandomFourierFeatures(1, 1, [1e3], generator_for("phi")).float()  # nearly linear: sin(x w) = x w
    theta = 0.1 * torch.randn(40, 1, generator=generator_for("theta"), dtype=torch.float64)
    refinement = Refinement(Search(Statistics(Located(), phi), particles=40))
    pairs, means = refinement._in_pairs(theta, 10, generator_for("pairs"))
    torch.testing.assert_close(pairs[:20], theta[:20])
    torch.testing.assert_close(pairs[:20] + pairs[20:], 2 * theta[:20].mean(0).expand(20, 1))
    apart = (means[:20, 1] - means[20:, 1]) / float(phi.omega)
    torch.testing.assert_close(apart, (pairs[:20] - pairs[20:])[:, 0], rtol=1e-2, atol=1e-3)
    found = LinearMean.fitted(pairs, means[:, 1:])
    torch.testing.assert_close(found.slope, phi.omega.double(), rtol=1e-3, atol=0)  # ten records, and no noise


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 1))
        self.generator = nn.Linear(2, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_features_of_a_convolution_are_means_over_positions():
    module, x = Convolutions(), torch.randn(3, 1, 4, 4)
    features = Features(module, "net.1")
    assert features.width == 5
    with features.watching(module):
        torch.testing.assert_close(features.of(module, x), module.net[1](module.net[0](x)).mean((2, 3)))
        features.expect(2)
        module(x)
        caught = features.take()
        assert caught.shape == (2, 5)
        assert caught.requires_grad
        assert features.take() is None
        module(x)
        assert features.take() is None
    assert not module.net[1]._forward_hooks
    assert Features(module, "net").width == 1
    assert_refused("no layer up to 'body' says how many features", Features, nn.ModuleDict({"body": nn.Tanh()}), "body")


def test_features_of_a_sequence_are_means_over_time_even_of_as_many_frames_as_features():
    module = nn.ModuleDict({"body": nn.Sequential(nn.Linear(4, 6), nn.Tanh())})
    features, x = Features(module, "body.1"), torch.randn(3, 9, 4)
    with features.watching(module):
        torch.testing.assert_close(features.of(module, x), module["body"](x).mean(1))
    odd, images = Features(Convolutions(), "net.2"), Convolutions()
    with odd.watching(images), pytest.raises(UserError, match=r"net\.2.*\(2, 20\).*5"):
        odd.of(images, torch.randn(2, 1, 4, 4))
    module = nn.ModuleDict({"body": nn.Linear(4, 6), "convolution": nn.Conv1d(4, 6, 1)})
    linear, convolution = Features(module, "body"), Features(module, "convolution")
    x = torch.randn(3, 6, 4)
    with linear.watching(module), convolution.watching(module):
        torch.testing.assert_close(linear.of(module, x), module["body"](x).mean(1))
        torch.testing.assert_close(convolution.of(module, x.mT), module["convolution"](x.mT).mean(2))
