"""Random Fourier features, the maps and codes around them, and data sets as factors that sum."""

import math

import numpy as np
import pytest
import scipy.fft
import scipy.optimize
import scipy.spatial.distance
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_epgan.bayes import (
    EmbeddingFactor,
    LowFrequencies,
    NormalisedMoments,
    Points,
    RandomFourierFeatures,
    SimplexWeights,
    feature_map,
    herd,
    median_distance,
    project_to_simplex,
)
from lit_epgan.bayes.codes import cosine_basis
from lit_epgan.callbacks.toy_metrics import density_error, grid, mode_coverage
from lit_epgan.datamodules.toy import ToyDataModule
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics import feature_extractor
from tests.refusals import assert_refused


def stream(*words: int | str) -> torch.Generator:
    return generator_for("test", *words)


def rows(n: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *shape, generator=stream("rows", seed), dtype=torch.float64)


@given(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3), st.integers(1, 40))
def test_every_record_has_features_of_norm_one(record, frequencies):
    phi = RandomFourierFeatures(3, frequencies, (0.5, 2.0), stream("norm"))
    features = phi(torch.tensor([record], dtype=torch.float64))
    assert features.shape == (1, phi.size) == (1, 2 * frequencies)
    assert float(features.norm()) == pytest.approx(1.0, abs=1e-12)


def test_inner_products_are_the_mean_of_gaussian_kernels():
    x, bandwidths = rows(30, 4), (0.7, 1.5, 3.0)
    squares = torch.cdist(x, x).square()
    kernel = torch.stack([torch.exp(-squares / (2 * b * b)) for b in bandwidths]).mean(0)
    errors = {}
    for frequencies in (300, 30_000):
        phi = RandomFourierFeatures(4, frequencies, bandwidths, stream("kernel"))(x)
        errors[frequencies] = float((phi @ phi.T - kernel).abs().max())
    assert errors[300] < 5 / math.sqrt(300)
    assert errors[30_000] < 5 / math.sqrt(30_000)
    # the bandwidths have equal shares, whatever their order
    few = RandomFourierFeatures(1, 4, (1.0, 100.0), stream("turns")).omega.abs().flatten()
    assert float(few[[1, 3]].max()) < float(few[[0, 2]].min())


def test_moments_and_median_distance_by_hand():
    """(3, -4): first (3, -4) / 5; squares (9, 16), of norm 337 ** .5; each half has the norm 1 / sqrt(2)."""
    found = NormalisedMoments()(torch.tensor([[3.0, -4.0], [3e200, -4e200], [0.0, 0.0]], dtype=torch.float64))
    expected = torch.tensor([0.6, -0.8, 9 / 337**0.5, 16 / 337**0.5], dtype=torch.float64) / 2**0.5
    torch.testing.assert_close(found[0], expected)
    assert found[1].tolist() == [0.0] * 4  # its squares' norm overflows
    assert found[2].tolist() == [0.0] * 4
    x = rows(26, 3)  # 325 pairs: an odd number has one median
    expected = float(np.median(scipy.spatial.distance.pdist(x.numpy())))
    assert median_distance(x) == pytest.approx(expected)
    assert median_distance(torch.cat([x, rows(50, 3) + 100]), rows=26) == pytest.approx(expected)


def test_features_and_codes_that_cannot_be_are_refused():
    for bandwidths in ((), (1.0, 0.0), (math.inf,)):
        assert_refused("bandwidths", RandomFourierFeatures, 2, 5, bandwidths, stream())
    assert_refused("frequencies is 0", RandomFourierFeatures, 2, 0, (1.0,), stream())
    assert_refused("bound is 0", Points, (2,), 0.0)
    assert_refused(r"images \(channels, height, width\), not of \(2,\)", LowFrequencies, (2,))
    assert_refused("dimensions is 65; an image of 8 x 8 has 1 to 64", LowFrequencies, (1, 8, 8), 65)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7)])
def test_all_frequencies_are_the_discrete_cosine_transform(shape):
    _, height, width = shape
    code = LowFrequencies(shape, height * width, bound=1e6)
    images = rows(4, *shape)
    spectrum = torch.from_numpy(scipy.fft.dctn(images.numpy(), axes=(2, 3), norm="ortho"))
    codes = spectrum.flatten(2)[:, :, code.kept].flatten(1)
    torch.testing.assert_close(code(codes), images)
    torch.testing.assert_close(
        cosine_basis(height), torch.from_numpy(scipy.fft.dct(np.eye(height), axis=0, norm="ortho"))
    )


def test_the_lowest_frequencies_of_every_channel_are_kept():
    code = LowFrequencies((2, 8, 8), 3)
    assert code.kept.tolist()[0] == 0
    assert sorted(code.kept.tolist()) == [0, 1, 8]  # the mean, one across, one down
    only_second = torch.zeros(1, 6, dtype=torch.float64)
    only_second[0, 3] = 4.0
    image = code(only_second)
    assert torch.count_nonzero(image[0, 0]) == 0
    torch.testing.assert_close(image[0, 1], torch.full((8, 8), 0.5, dtype=torch.float64))  # 4 / sqrt(64)
    assert len(LowFrequencies((1, 8, 8)).kept) == 36
    assert len(LowFrequencies((3, 28, 28)).kept) == 64


def test_codes_start_within_the_range_they_promise():
    code = LowFrequencies((1, 8, 8), 64)
    raw = LowFrequencies((1, 8, 8), 64, bound=1.0)
    raw.bound = 1e6  # as if nothing were clamped
    start = code.start(4000, stream("images"))
    assert float(raw(start).std()) == pytest.approx(0.6, abs=0.02)
    assert float(code(start).abs().max()) <= 1.0
    amplitude = start.std(0)
    assert float(amplitude[0] / amplitude[1]) == pytest.approx(2.0, abs=0.15)  # 1 / (1 + frequency)
    points = Points((2,), bound=4.0)
    uniform = points(points.start(4000, stream("points")))
    assert uniform.shape == (4000, 2)
    assert float(uniform.abs().max()) <= 4.0
    assert float(uniform.square().mean()) == pytest.approx(16 / 3, abs=0.3)


def test_what_is_beyond_the_range_comes_back_and_records_do_not_depend_on_their_batch():
    points = Points((2,), bound=1.0)
    codes = torch.tensor([[5.0, -0.5]], dtype=torch.float64, requires_grad=True)
    out = points(codes)
    assert out.tolist() == [[1.0, -0.5]]
    (gradient,) = torch.autograd.grad(out.sum(), codes)
    assert gradient.tolist() == [[1.0, 1.0]]
    # batchNorm in training mode would let one record change all others' features: no sensitivity bound would hold
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    h = feature_map(network, (3,), stream())
    h.train()
    x = rows(5, 3)
    torch.testing.assert_close(h(x)[:1], h(x[:1]))
    assert not any(p.requires_grad for p in h.parameters())


def test_random_convolutions_are_two_convolutions_of_torch():
    images = rows(3, 2, 6, 6)
    h = feature_map("random_convolutions", (2, 6, 6), stream("conv")).double()
    network = nn.Sequential(
        nn.Conv2d(2, 32, 3, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(32, 16, 3, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.AvgPool2d(2),
        nn.Flatten(),
    ).double()
    with torch.no_grad():
        network[0].weight.copy_(h.network.first)
        network[2].weight.copy_(h.network.second)
    torch.testing.assert_close(h(images), network(images))
    assert float(h.network.first.square().mean()) == pytest.approx(1 / 18, rel=0.2)
    assert h(rows(3, 2, 5, 5)).shape == (3, 16 * 9)
    again = feature_map("random_convolutions", (2, 6, 6), stream("conv")).double()
    assert torch.equal(h(images), again(images))


def test_maps_are_chosen_by_the_data_or_by_name(classifier_cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(classifier_cache))
    assert feature_map(None, (3,), stream())(rows(4, 3)).tolist() == rows(4, 3).tolist()
    assert feature_map(None, (1, 8, 8), stream()).double()(rows(4, 1, 8, 8)).shape == (4, 16 * 16)
    images = rows(4, 1, 8, 8).float()
    by_name = feature_map("digits", (1, 8, 8), stream())(images)
    torch.testing.assert_close(by_name, feature_extractor("digits")(images)[0])
    with pytest.raises(UserError, match=r"'pixels' do not exist: choose identity, random_convolutions, digits"):
        feature_map("pixels", (1, 8, 8), stream())
    assert_refused(r"are of images.*\(2,\).*choose identity", feature_map, "random_convolutions", (2,), stream())


def test_a_factor_counts_and_sums_over_batches_of_any_form():
    phi, x = RandomFourierFeatures(3, 20, (1.0,), stream("factor")), rows(10, 3)
    labelled = [(part, torch.zeros(len(part))) for part in x.split(4)]
    for batches in ([x], list(x.split(3)), labelled):
        factor = EmbeddingFactor.of(batches, phi, x)
        assert float(factor.count) == 10
        torch.testing.assert_close(factor.mean, phi(x).mean(0))
    with pytest.raises(ValueError, match="without a batch"):
        EmbeddingFactor.of([], phi, x)


@given(st.lists(st.integers(1, 6), min_size=2, max_size=5), st.integers(0, 1000))
def test_the_cavity_is_the_product_of_the_other_sites(sizes, seed):
    phi = RandomFourierFeatures(2, 8, (1.0,), stream("cavity"))
    data = [rows(n, 2, seed=seed + k) for k, n in enumerate(sizes)]
    sites = [EmbeddingFactor.of([x], phi, x) for x in data]
    product = sites[0]
    for site in sites[1:]:
        product = product * site
    others = EmbeddingFactor.of([torch.cat(data[1:])], phi, data[0])
    cavity = product / sites[0]
    torch.testing.assert_close(cavity.statistics, others.statistics)
    torch.testing.assert_close(cavity.mean, phi(torch.cat(data[1:])).mean(0))


def test_projections_of_several_vectors_are_each_ones_own_and_counts_noisy():
    assert EmbeddingFactor(torch.tensor([-3.0, 0.5])).mean.tolist() == [0.5]
    phi, x = RandomFourierFeatures(2, 8, (1.0,), stream("nan")), rows(4, 2)
    spoilt = torch.cat([x, torch.tensor([[math.nan, 0.0], [math.inf, 1.0]])])
    factor = EmbeddingFactor.of([spoilt], phi, x)
    assert float(factor.count) == 6
    torch.testing.assert_close(factor.statistics[1:], phi(x).sum(0))
    v = rows(4, 5, 7)
    together = project_to_simplex(v)
    for i in range(4):
        for j in range(5):
            assert torch.equal(together[i, j], project_to_simplex(v[i, j]))


def by_bisection(v: list[float]) -> list[float]:
    """The projection's threshold t solves sum max(v - t, 0) = 1, whose left side falls."""
    low, high = min(v) - 1.0, max(v)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(x - middle, 0) for x in v) > 1:
            low = middle
        else:
            high = middle
    return [max(x - low, 0) for x in v]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12))
def test_projection_to_the_simplex(v):
    w = project_to_simplex(torch.tensor(v, dtype=torch.float64))
    assert w.tolist() == pytest.approx(by_bisection(v), abs=1e-9)
    assert float(w.sum()) == pytest.approx(1.0)


def mismatch(w: np.ndarray, features: np.ndarray, target: np.ndarray) -> float:
    return float(((w @ features - target) ** 2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_minimum_that_scipy_finds(seed):
    features, target = rows(7, 4, seed=seed), rows(4, seed=100 + seed)
    w = SimplexWeights(features, steps=2000)(target)
    arrays = features.numpy(), target.numpy()
    best = scipy.optimize.minimize(
        mismatch,
        np.full(7, 1 / 7),
        args=arrays,
        bounds=[(0, 1)] * 7,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert mismatch(w.numpy(), *arrays) == pytest.approx(best.fun, abs=1e-7)
    assert float(w.min()) >= 0
    assert float(w.sum()) == pytest.approx(1.0)


def test_known_weights_and_a_small_measure_are_recovered():
    phi = RandomFourierFeatures(2, 200, (1.0,), stream("weights"))
    features = phi(5 * rows(10, 2))
    truth = torch.softmax(2 * rows(3, 10), 1)
    solve = SimplexWeights(features, steps=3000)
    torch.testing.assert_close(solve(truth @ features), truth, atol=2e-3, rtol=0)
    torch.testing.assert_close(solve(truth[1] @ features), truth[1], atol=2e-3, rtol=0)
    where = torch.tensor([[-2.0, 1.0], [2.0, 2.0], [0.0, -3.0]], dtype=torch.float64)
    phi, code = RandomFourierFeatures(2, 300, (0.5, 1.0, 2.0), stream("atoms")), Points((2,), 5.0)
    target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) @ phi(where)
    codes = herd(phi, target, code, code.start(10, stream("start")), steps=400, generator=stream("noise"))
    assert atoms(codes, where) == [5, 3, 2]


def atoms(codes: Tensor, where: Tensor) -> list[int]:
    distance, nearest = torch.cdist(codes, where).min(1)
    assert float(distance.max()) < 0.1
    return torch.bincount(nearest, minlength=len(where)).tolist()


@pytest.mark.parametrize("code", [Points((2,)), LowFrequencies((1, 8, 8), 10)], ids=["points", "images"])
def test_herding_comes_nearer_to_the_target(code):
    dimensions, bandwidth = (2, 2.0) if isinstance(code, Points) else (64, 6.0)
    fourier = RandomFourierFeatures(dimensions, 100, (bandwidth,), stream("nearer"))
    target = fourier(code(code.start(400, stream("truth")) * 0.5 + 0.5).flatten(1)).mean(0)

    def phi(x: Tensor) -> Tensor:
        return fourier(x.flatten(1))

    start = code.start(50, stream("start"))
    codes = herd(phi, target, code, start, steps=100, generator=stream("noise"))
    before, after = (float((phi(code(c)).mean(0) - target).square().sum()) for c in (start, codes))
    assert after < before / 20


def test_herding_depends_on_its_generator_alone():
    phi, code = RandomFourierFeatures(2, 30, (1.0,), stream("own")), Points((2,))
    start, target = code.start(20, stream("start")), phi(rows(50, 2)).mean(0)
    kept, state = start.clone(), torch.get_rng_state()
    with torch.no_grad():
        codes = [herd(phi, target, code, start, steps=20, generator=stream(seed)) for seed in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(start, kept)
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert not codes[0].requires_grad


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_four_gaussians_are_covered_by_points_herded_to_their_embedding(noise):
    """``noise`` is the noise multiplier of four clients, each of which noises the sum over its 1,024 records."""
    toy = ToyDataModule()
    x = torch.cat([data.tensors[0] for data in toy.data.train.values()])
    phi, code = RandomFourierFeatures(2, 512, (0.5, 1.0, 2.0), stream("toy")).float(), Points((2,)).float()
    error = 2 * noise / len(x) * torch.randn(phi.size, generator=stream("release"))
    codes = herd(phi, phi(x).mean(0) + error, code, code.start(400, stream("start")), 200, generator=stream("noise"))
    covered = mode_coverage(code(codes), toy.mixture.means, toy.mixture.variances)
    assert covered.coverage > (0.95 if not noise else 0.92)
    assert covered.weakest > 0.2
    assert density_error(code(codes), toy.mixture.density(grid())) < 0.004  # the truth's own samples .0006
