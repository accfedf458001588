"""Points herded to an embedding, and weights of points on the simplex."""

import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lit_epgan.bayes import LowFrequencies, Points, RandomFourierFeatures, SimplexWeights, herd, project_to_simplex
from lit_epgan.datamodules.toy import ToyDataModule
from lit_epgan.metrics.toy_scores import density_error, grid, mode_coverage
from tests.test_embedding import rows, stream


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
def test_projection_to_the_simplex(v: list[float]) -> None:
    w = project_to_simplex(torch.tensor(v, dtype=torch.float64))
    assert w.tolist() == pytest.approx(by_bisection(v), abs=1e-9)
    assert float(w.sum()) == pytest.approx(1.0)


def test_projections_of_several_vectors_are_each_ones_own() -> None:
    v = rows(4, 5, 7)
    together = project_to_simplex(v)
    for i in range(4):
        for j in range(5):
            assert torch.equal(together[i, j], project_to_simplex(v[i, j]))


def mismatch(w: np.ndarray, features: np.ndarray, target: np.ndarray) -> float:
    return float(((w @ features - target) ** 2).sum())


@pytest.mark.parametrize("seed", range(5))
def test_weights_are_the_minimum_that_scipy_finds(seed: int) -> None:
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


def test_known_weights_are_recovered_for_one_target_or_several() -> None:
    phi = RandomFourierFeatures(2, 200, (1.0,), stream("weights"))
    features = phi(5 * rows(10, 2))
    truth = torch.softmax(2 * rows(3, 10), 1)
    solve = SimplexWeights(features, steps=3000)
    torch.testing.assert_close(solve(truth @ features), truth, atol=2e-3, rtol=0)
    torch.testing.assert_close(solve(truth[1] @ features), truth[1], atol=2e-3, rtol=0)


def atoms(codes: Tensor, where: Tensor) -> list[int]:
    distance, nearest = torch.cdist(codes, where).min(1)
    assert float(distance.max()) < 0.1
    return torch.bincount(nearest, minlength=len(where)).tolist()


def test_a_known_small_measure_is_recovered() -> None:
    where = torch.tensor([[-2.0, 1.0], [2.0, 2.0], [0.0, -3.0]], dtype=torch.float64)
    phi, code = RandomFourierFeatures(2, 300, (0.5, 1.0, 2.0), stream("atoms")), Points((2,), 5.0)
    target = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) @ phi(where)
    codes = herd(phi, target, code, code.start(10, stream("start")), steps=400, generator=stream("noise"))
    assert atoms(codes, where) == [5, 3, 2]


@pytest.mark.parametrize("code", [Points((2,)), LowFrequencies((1, 8, 8), 10)], ids=["points", "images"])
def test_herding_comes_nearer_to_the_target(code: Points | LowFrequencies) -> None:
    dimensions, bandwidth = (2, 2.0) if isinstance(code, Points) else (64, 6.0)
    fourier = RandomFourierFeatures(dimensions, 100, (bandwidth,), stream("nearer"))
    target = fourier(code(code.start(400, stream("truth")) * 0.5 + 0.5).flatten(1)).mean(0)

    def phi(x: Tensor) -> Tensor:
        return fourier(x.flatten(1))

    start = code.start(50, stream("start"))
    codes = herd(phi, target, code, start, steps=100, generator=stream("noise"))
    before, after = (float((phi(code(c)).mean(0) - target).square().sum()) for c in (start, codes))
    assert after < before / 20


def test_herding_depends_on_its_generator_alone() -> None:
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
def test_four_gaussians_are_covered_by_points_herded_to_their_embedding(noise: float) -> None:
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
