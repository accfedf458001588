"""The metric at which a search ends, and when a refinement takes over: matrices and particles made by hand."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from lit_epgan.bayes import Independent, RandomFourierFeatures, Statistics, inference
from lit_epgan.bayes.inference import SEEN, Correction, Inference, Refinement
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.bayes.moves import effective_size
from lit_epgan.bayes.search import Particles, Search
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

N = 1000.0  # the data's records


class Unasked(Independent):
    def __init__(self, size: int) -> None:
        super().__init__({f"parameter{k}": Normal(0.0, 1.0) for k in range(size)}, dimensions=1)

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        raise AssertionError("something was simulated")


def search(size: int, width: int) -> Search:
    phi = RandomFourierFeatures(1, width // 2, [1.0], generator_for("phi")).float()
    return Search(Statistics(Unasked(size), phi), particles=60)


def matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def normal(rows: int, columns: int, name: str) -> Tensor:
    return torch.randn(rows, columns, generator=generator_for(name), dtype=torch.float64)


def particles(theta: Tensor, means: Tensor, records: int, worth: float, covariance: Tensor, noise: Tensor) -> Particles:
    """Under a metric that is worth so many records in every direction."""
    metric = worth * torch.linalg.inv(covariance + noise)
    return Particles(theta, means, records, metric, torch.zeros(len(theta)).double(), noise, data=N)


SLOPE = matrix([1.0, 0.0], [2.0, 1.0], [0.0, -1.0], [0.5, 3.0])  # A: mu = A theta
SIGMA = torch.diag(matrix([1.0, 2.0, 0.5, 1.5])[0]) + 0.3
NOISE = torch.diag(matrix([0.5, 0.1, 1.0, 0.2])[0])
THETA = normal(60, 2, "theta")


@pytest.mark.parametrize("records", [3000, 20_000])
def test_the_last_metric_is_widened_by_what_simulations_vary(records):
    """B = (A^T S^-1 A)^-1/2 A^T S^-1 with S = Sigma + noise, so that with P = S^-1 A

    W* = B^T (I / n - B Sigma B^T / M)^-1 B = P (A^T P / n - P^T Sigma P / M)^-1 P^T.
    """
    at = particles(THETA, THETA @ SLOPE.T, records, N, SIGMA, NOISE)
    p = torch.linalg.solve(SIGMA + NOISE, SLOPE)
    expected = p @ torch.linalg.inv(SLOPE.T @ p / N - p.T @ SIGMA @ p / records) @ p.T
    found = search(2, 4)._last_metric(at, SIGMA)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(("records", "kernel"), [(2040, 1 / (1 / N - 1 / 2040)), (1960, 2 * N), (100, 2 * N)])
def test_it_is_widened_twice_at_most(records, kernel):
    """One parameter, no noise: B Sigma B^T = 1, so W* = B^T B / (1 / n - 1 / M), and 2 n B^T B from M = 2 n down."""
    theta, slope, sigma = THETA[:, :1], matrix([3.0], [4.0]), matrix([1.0, 0.0], [0.0, 4.0])
    at = particles(theta, theta @ slope.T, records, N, sigma, torch.zeros_like(sigma))
    found = search(1, 2)._last_metric(at, sigma)
    b = matrix([3.0, 1.0]) / 13**0.5  # A^T Sigma^-1, of the length at which B Sigma B^T = (9 + 4) / 13
    torch.testing.assert_close(found, kernel * b.T @ b, rtol=0, atol=1e-3 * kernel)


@pytest.mark.parametrize(("worth", "bent", "rank"), [(17.0, 0.0, 1), (16.0, 0.0, 2), (17.0, 1.0, 2)])
def test_wide_apart_or_bent_it_keeps_the_directions_in_which_particles_differ(worth, bent, rank):
    """Near is from n / 60 = 16.7 records on. Two directions for the one parameter are all: n V^T V = n S^-1."""
    theta, sigma, noise = THETA[:, :1], matrix([1.0, 0.2], [0.2, 2.0]), matrix([0.5, 0.0], [0.0, 2.0])
    means = torch.cat([theta, bent * theta**2], 1)
    found = search(1, 2)._last_metric(particles(theta, means, 10_000, worth, sigma, noise), sigma)
    values = torch.linalg.eigvalsh(found)
    assert int((values > 1e-6 * values[-1]).sum()) == rank
    if rank == 2:
        torch.testing.assert_close(found, N * torch.linalg.inv(sigma + noise), rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("most_records", "worth", "step", "due"),
    [
        (9999, [3.0, 1.1], 0.51, True),
        (10_000, [3.0, 1.1], 0.51, False),  # surplus n = 10,000 may be simulated
        (9999, [3.0, 0.9], 0.51, False),  # on average the metric is worth no more than n / 500 = 2 records
        (9999, [3.0, 1.1], 0.5, False),  # a Gaussian's draws are not accepted
    ],
)
def test_a_refinement_is_due_where_much_data_make_gaussian_particles(most_records, worth, step, due, monkeypatch):
    covariance, noise = torch.diag(matrix([0.5, 2.0])[0]), torch.diag(matrix([0.5, 1.0])[0])
    monkeypatch.setattr(Statistics, "covariance", lambda self, theta, generator: covariance)
    metric = torch.diag(matrix(worth)[0] / (covariance + noise).diagonal())
    at = Particles(THETA, THETA, 100, metric, torch.zeros(60).double(), noise, data=N, step=step)
    assert Refinement(search(2, 2)).due(at, most_records, generator_for("due")) is due


def test_of_a_noised_release_all_directions_are_looked_at():
    """V (Sigma + noise) V^T = I, and V spans everything; without noise as many as parameters are sufficient."""
    means = THETA @ SLOPE.T + 0.01 * normal(60, 4, "further")
    found = {}
    for name, noise in (("released", NOISE), ("asked", torch.zeros_like(NOISE))):
        at = particles(THETA, means, 3000, N, SIGMA, noise)
        found[name] = Correction(search(2, 4))._directions(at, SIGMA)
    assert found["asked"].shape == (2, 4)
    assert found["released"].shape == (4, 4)
    v = found["released"]
    torch.testing.assert_close(v @ (SIGMA + NOISE) @ v.T, torch.eye(4, dtype=v.dtype), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("width", "n", "most"), [(200, 400, SEEN), (200, 30, 29), (20, 400, 20)])
def test_so_many_directions_as_an_answer_can_be_solved_for(width, n, most):
    covariance = torch.eye(width, dtype=torch.float64)
    at = particles(normal(n, 2, "theta"), normal(n, width, "means"), 3000, 1.0, covariance, covariance)
    assert Correction(search(2, width))._directions(at, covariance).shape == (most, width)


class Level(Independent):
    """x ~ N(level, 1), or what ``records`` is told to give."""

    def __init__(self, kind: str = "sound") -> None:
        super().__init__({"level": Normal(0.0, 1.0)}, 1)
        self.kind = kind

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        level = values["level"][:, None, None].float().expand(-1, records, 1)
        if self.kind == "constant":
            return torch.zeros_like(level)
        if self.kind == "deterministic":
            return level
        found = level + torch.randn(level.shape, generator=generator)
        return torch.where(level > 1.5, torch.nan, found) if self.kind == "not a number" else found


@dataclass
class Known:
    """A log likelihood N(m; theta, s^2), and how often it was asked for."""

    middle: float = 1.5
    width: float = 0.02
    asked: int = 0

    def log(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        self.asked += 1
        return -0.5 * ((theta[:, 0] - self.middle) / self.width).square()


def test_a_likelihood_that_leaves_one_particle_is_approached_by_its_powers():
    """Of 400 draws of the prior about two are within two widths; the posterior is N(m / (1 + s^2), s^2 / (1 + s^2))."""
    known = Known()
    correction = Correction(Inference.of(Level(), 0, 400, 8).search)
    prior = correction.search.statistics.simulator.prior(400, generator_for("prior"))
    assert effective_size(known.log(prior, generator_for("unused"))) < 0.1 * 400
    theta = correction._tempered(known, generator_for("tempered"))
    assert float(theta.mean()) == pytest.approx(1.5, abs=0.005)
    assert float(theta.std()) == pytest.approx(0.02, rel=0.15)
    assert len(theta.unique()) > 380
    with pytest.raises(
        UserError, match=r"400 particles do not reach the posterior: the likelihood's power came to 0 of 1"
    ):
        correction._tempered(Nowhere(), generator_for("nowhere"))


class Nowhere:
    def log(self, theta: Tensor, generator: torch.Generator) -> Tensor:
        return torch.full((len(theta),), -torch.inf, dtype=theta.dtype)


@pytest.mark.parametrize("least", [0.0, 1.1])
def test_few_effective_particles_are_no_start(least, monkeypatch):
    """Both ways lead to the posterior of 60 records about 1.5 under noise: from the search, and from the prior."""
    tempered: list[int] = []
    original = Correction._tempered

    def watched(self: Correction, *given) -> Tensor:
        tempered.append(1)
        return original(self, *given)

    monkeypatch.setattr(inference, "LEAST_EFFECTIVE", least)
    monkeypatch.setattr(Correction, "_tempered", watched)
    own = Inference.of(Level(), 0, 200, 8)
    x = 1.5 + torch.randn(60, 1, generator=generator_for("data"))
    noise = torch.eye(16, dtype=torch.float64) * 3 / 60
    found = answered(own.run(generator_for("run")), mean_embedding(own.phi, x), 60.0, noise)
    assert len(tempered) == (least > 1)
    assert float(found.particles.theta.mean()) == pytest.approx(float(x.mean()) * 60 / 61, abs=0.25)
    assert 0.1 < float(found.particles.theta.std()) < 0.35


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("constant", "Level simulates records whose median distance is 0"),
        ("deterministic", "Level is deterministic: the records of a data set do not differ"),
        ("not a number", "Level simulates records whose median distance is nan"),
    ],
)
def test_a_simulator_that_cannot_be_is_one_sentence(kind, sentence):
    def start() -> None:
        own = Inference.of(Level(kind), 0, 100, 8)
        answered(own.run(generator_for("run")), torch.zeros(16, dtype=torch.float64), 60.0)

    with pytest.raises(UserError, match=sentence):
        start()


def test_a_simulator_that_is_rarely_no_number_is_named_when_it_is_met():
    own = Inference.of(Level(), 0, 100, 8)
    statistics = replace(own.search.statistics, simulator=Level("not a number"))
    with pytest.raises(UserError, match=r"Level simulates records that are no numbers \(NaN\)"):
        statistics.covariance(torch.full((10, 1), 2.0, dtype=torch.float64), generator_for("met"))
