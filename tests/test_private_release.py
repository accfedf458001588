"""The Gaussian mechanism: how far one record moves a release, how large the noise is, what that guarantees."""

import math

import pytest
import scipy.stats
import torch
from scipy.stats import norm
from torch import Tensor, nn

from lit_epgan.bayes import EmbeddingFactor, GaussianMechanism, NormalisedMoments, RandomFourierFeatures
from lit_epgan.bayes.factor import COUNT_WEIGHT, SENSITIVITY
from lit_epgan.errors import UserError
from lit_epgan.randomness import secure_normal
from tests.test_embedding import rows, stream


class Recorder(GaussianMechanism):
    """Keeps what would be noised, and adds nothing."""

    def release(self, vector: Tensor, sensitivity: float, *stream: int | str) -> Tensor:
        self.__dict__["vector"], self.__dict__["sensitivity"] = vector, sensitivity
        return vector


def noised(x: Tensor, phi: nn.Module) -> Recorder:
    mechanism = Recorder(1.0)
    EmbeddingFactor.of(x.split(5), phi, x).released(mechanism)
    return mechanism


def test_no_record_moves_the_release_further_than_its_sensitivity() -> None:
    """Every record is taken out in turn, absurd ones among them; nearly all move it by exactly the stated norm."""
    phi = RandomFourierFeatures(3, 40, (0.1, 1.0), stream("sensitivity"))
    x = torch.cat([rows(12, 3), 1e9 * rows(3, 3), torch.tensor([[math.nan, 0, 0], [math.inf, 1, 1]])])
    whole = noised(x, phi)
    moves = []
    for i in range(len(x)):
        without = noised(torch.cat([x[:i], x[i + 1 :]]), phi)
        moves.append(float((whole.__dict__["vector"] - without.__dict__["vector"]).norm()))
    assert whole.__dict__["sensitivity"] == SENSITIVITY
    assert max(moves) <= SENSITIVITY * (1 + 1e-9)
    assert sorted(moves)[2:] == pytest.approx([SENSITIVITY] * (len(x) - 2))


def test_no_record_moves_the_moments_further_either() -> None:
    """A record without features, and ones that are not finite, move the count alone."""
    phi = NormalisedMoments()
    x = torch.cat(
        [rows(12, 3), 1e9 * rows(3, 3), torch.zeros(1, 3), torch.tensor([[math.nan, 0, 0], [math.inf, 1, 1]])]
    )
    whole = noised(x, phi)
    moves = []
    for i in range(len(x)):
        without = noised(torch.cat([x[:i], x[i + 1 :]]), phi)
        moves.append(float((whole.__dict__["vector"] - without.__dict__["vector"]).norm()))
    assert moves == pytest.approx([SENSITIVITY] * (len(x) - 3) + [COUNT_WEIGHT] * 3)


def test_features_that_break_their_promise_are_clipped() -> None:
    x = rows(6, 3)
    factor = EmbeddingFactor.of([x], lambda x: 50 * x, x)
    torch.testing.assert_close(factor.statistics[1:], (x / x.norm(dim=1, keepdim=True)).sum(0))


@pytest.mark.parametrize("seed", [None, 3])
def test_the_noise_has_the_stated_standard_deviation(seed: int | None) -> None:
    n, z = 200_000, 1.7
    released = EmbeddingFactor(torch.zeros(n, dtype=torch.float64)).released(GaussianMechanism(z, noise_seed=seed), 0)
    sums = released.statistics[1:]
    sigma = z * SENSITIVITY
    assert float(sums.std()) == pytest.approx(sigma, rel=4 / math.sqrt(2 * n))
    assert scipy.stats.kstest(sums.numpy() / sigma, "norm").pvalue > 1e-4
    counts = [
        float(EmbeddingFactor(torch.zeros(2, dtype=torch.float64)).released(GaussianMechanism(z, noise_seed=k)).count)
        for k in range(400)
    ]
    assert torch.tensor(counts).std() == pytest.approx(sigma / COUNT_WEIGHT, rel=4 / math.sqrt(2 * 400))


def delta_of(epsilon: float, z: float) -> float:
    """Balle and Wang (2018), theorem 8: the least delta of the Gaussian mechanism with sigma = z sensitivity."""
    return float(norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z))


@pytest.mark.parametrize(("z", "delta"), [(0.5, 1e-3), (1.0, 1e-5), (2.0, 1e-5), (2.0, 1e-7), (10.0, 1e-6)])
def test_epsilon_is_the_exact_one(z: float, delta: float) -> None:
    guarantee = GaussianMechanism(z, delta).guarantee(3.0)
    assert guarantee is not None
    assert delta_of(guarantee.epsilon, z) == pytest.approx(delta, rel=1e-6)
    assert guarantee.sigma == 3 * z


def test_the_known_values_and_the_sentence() -> None:
    assert str(GaussianMechanism(1.0).guarantee(SENSITIVITY)).startswith(
        "(4.38, 1e-05)-differential privacy for one record added to or removed from one client's data: one release"
    )
    assert "can be predicted from noise_seed" in str(GaussianMechanism(1.0, noise_seed=1).guarantee(1.0))
    assert GaussianMechanism(0.0).guarantee(1.0) is None


@pytest.mark.parametrize(("z", "epsilon"), [(1.0, 9.63), (2.0, 4.23)])
def test_a_record_that_is_replaced_costs_what_the_page_says(z: float, epsilon: float) -> None:
    """Its number stays, its features of norm one move the sum by 2 at most: docs/methods/private_release.md."""
    guarantee = GaussianMechanism(z * SENSITIVITY / 2).guarantee(2.0)
    assert guarantee is not None
    assert guarantee.epsilon == pytest.approx(epsilon, abs=0.005)
    assert delta_of(guarantee.epsilon, z * SENSITIVITY / 2) == pytest.approx(1e-5, rel=1e-6)


def test_public_seeds_do_not_tell_the_noise() -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        draws.append(GaussianMechanism(1.0).release(torch.zeros(50, dtype=torch.float64), 1.0, 0, 0))
        assert torch.equal(torch.get_rng_state(), state)
    assert not (draws[0] == draws[1]).any()
    assert bool(torch.isfinite(secure_normal(100_000)).all())


def test_a_studys_noise_is_repeatable_and_every_clients_own() -> None:
    mechanism, zeros = GaussianMechanism(1.0, noise_seed=5), torch.zeros(50, dtype=torch.float64)
    first, again, other = (mechanism.release(zeros, 1.0, 0, client) for client in (0, 0, 1))
    assert torch.equal(first, again)
    assert not (first == other).any()


def test_without_noise_the_release_is_exact() -> None:
    x = rows(5, 3)
    assert torch.equal(GaussianMechanism(0.0).release(x, 1.0), x)


@pytest.mark.parametrize("z", [-1.0, math.inf, math.nan])
def test_wrong_settings_are_refused(z: float) -> None:
    with pytest.raises(UserError, match="noise_multiplier"):
        GaussianMechanism(z)
    for delta in (0.0, 1.0, -1e-5):
        with pytest.raises(UserError, match="delta"):
            GaussianMechanism(1.0, delta)
