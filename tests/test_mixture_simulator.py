"""The Bayesian mixture of Gaussians: its prior against scipy, its draws against their moments."""

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import expit
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, MultivariateNormal, Normal, Poisson

from lit_epgan.bayes import Independent
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import Question, SummedAnswer, answered, mean_embedding
from lit_epgan.bayes.moves import consistent
from lit_epgan.bayes.simulator import GaussianMixture
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from tests.refusals import assert_refused

OTHER_MIXTURE = GaussianMixture(3, 2, concentration=1.7, mean=0.5, mean_precision=0.2, dof=6.0, scale=1.3)


def test_the_prior_is_scipys_with_the_jacobian_of_the_coordinates():
    """The density of (gamma, mu, Sigma) by scipy, times |d (gamma, mu, Sigma) / d theta| by autograd."""
    theta = OTHER_MIXTURE.prior(4, generator_for("prior"))
    for row, found in zip(theta, OTHER_MIXTURE.log_prior(theta), strict=True):
        expected = 0.0
        for block in row.reshape(3, -1):
            log_gamma, mean, diagonal, below = block[:1], block[1:3], block[3:5], block[5:]
            lower = torch.diag(diagonal.exp())
            lower[1, 0] = below[0]
            covariance = (lower @ lower.T).numpy()
            expected += stats.gamma.logpdf(math.exp(log_gamma), 1.7) + float(log_gamma)
            expected += stats.invwishart.logpdf(covariance, 6.0, 1.3 * np.eye(2))
            expected += stats.multivariate_normal.logpdf(mean, [0.5, 0.5], covariance / 0.2)
            expected += math.log(abs(float(torch.linalg.det(_covariance_jacobian(block[3:])))))
        assert float(found) == pytest.approx(expected, rel=1e-10)


def _covariance_jacobian(coordinates):
    """d (Sigma_11, Sigma_21, Sigma_22) / d (log L_11, log L_22, L_21)."""

    def covariance(c: torch.Tensor) -> torch.Tensor:
        a, b = c[:2].exp()
        return torch.stack([a * a, a * c[2], c[2] ** 2 + b * b])

    return torch.autograd.functional.jacobian(covariance, coordinates)


def test_the_prior_is_drawn_as_its_density_says():
    """Moments of Dirichlet, inverse Wishart and normal-inverse-Wishart (20,000 draws: a percent or two)."""
    values = OTHER_MIXTURE.values(OTHER_MIXTURE.prior(20_000, generator_for("moments")))
    share, covariance = values["weights"], values["covariances"]
    assert share.mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert float(share[:, 0].var()) == pytest.approx((1 / 3) * (2 / 3) / (3 * 1.7 + 1), rel=0.05)
    expected = 1.3 / (6 - 2 - 1)
    assert torch.allclose(covariance.mean((0, 1)), expected * torch.eye(2).double(), atol=0.02)
    spread = (values["means"] - 0.5).square().mean((0, 1))
    assert spread.tolist() == pytest.approx([expected / 0.2] * 2, rel=0.06)


def test_records_have_the_mixtures_mean_and_covariance():
    theta = OTHER_MIXTURE.prior(5, generator_for("few"))
    values = OTHER_MIXTURE.values(theta)
    x = OTHER_MIXTURE.simulate(theta, 200_000, generator_for("records")).double()
    assert x.shape == (5, 200_000, 2)
    mean = (values["weights"][..., None] * values["means"]).sum(1)
    away = values["means"] - mean[:, None]
    between = away[..., None] * away[..., None, :]
    covariance = (values["weights"][..., None, None] * (values["covariances"] + between)).sum(1)
    scale = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert ((x.mean(1) - mean).abs() < 5 * scale / math.sqrt(200_000)).all()
    centred = x - x.mean(1, keepdim=True)
    found = centred.mT @ centred / 200_000
    assert ((found - covariance).abs() < 0.03 * scale[:, :, None] * scale[:, None]).all()


def test_naming_components_anew_changes_neither_prior_nor_model():
    theta = OTHER_MIXTURE.prior(3, generator_for("names"))
    orders = OTHER_MIXTURE.symmetries()
    assert orders.shape == (6, OTHER_MIXTURE.size)
    assert orders[0].tolist() == list(range(OTHER_MIXTURE.size))
    renamed = theta[:, orders]  # (3, 6, p)
    assert torch.allclose(
        OTHER_MIXTURE.log_prior(renamed.flatten(0, 1)).reshape(3, 6), OTHER_MIXTURE.log_prior(theta)[:, None]
    )
    weights = OTHER_MIXTURE.values(renamed.flatten(0, 1))["weights"].reshape(3, 6, 3)
    assert len({tuple(w) for w in weights[0].tolist()}) == 6
    assert torch.allclose(weights.sort(-1).values, OTHER_MIXTURE.values(theta)["weights"].sort(-1).values[:, None])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"components": 7}, "components is 7"),
        ({"dof": 1.0}, "dof is 1.0; an inverse Wishart of 2 dimensions needs more than 1"),
        ({"scale": 0.0}, "scale is 0.0; it must be above 0"),
    ],
)
def test_what_is_out_of_range_is_named(settings, sentence):
    assert_refused(sentence, GaussianMixture, **settings)


FILE = Path(__file__).parent.parent / "docs" / "own_simulator.py"


def ward_outbreaks():
    spec = importlib.util.spec_from_file_location("own_simulator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WardOutbreaks()


@pytest.mark.slow
def test_an_epidemics_parameters_are_found_from_three_hospitals_discrepancies():
    """20 wards at each; the posterior of the first two is at most half as wide as the prior, and holds the truth."""
    simulator, generator = ward_outbreaks(), generator_for("wards")
    theta = torch.tensor([[1.6, 0.35, 0.8]], dtype=torch.float64)
    theta = torch.cat([theta[:, :1].log(), theta[:, 1:].logit()], 1)
    hospitals = simulator.simulate(theta.expand(3, -1), 20, generator)
    inference = Inference.of(simulator, 0, particles=60, frequencies=32)
    means = [inference.phi(x).double().mean(0) for x in hospitals]

    def answer(question: Question) -> SummedAnswer:
        return SummedAnswer(sum(20 * question.discrepancies(mean) for mean in means) / 60, 60.0)

    asking = inference.run(generator)
    question = next(asking)
    try:
        while True:
            question = asking.send(answer(question))
    except StopIteration as end:
        stage = end.value
    assert stage.kind == FOUND
    found, prior = stage.particles.theta, simulator.prior(2000, generator)
    z = (found.mean(0) - theta[0]) / found.std(0)
    assert (z.abs() < 3).all(), z
    assert (found.std(0)[:2] < 0.5 * prior.std(0)[:2]).all(), found.std(0) / prior.std(0)


class Waiting(Independent):
    def __init__(self) -> None:
        super().__init__({"rate": Gamma(3.0, 2.0)}, dimensions=1)

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        times = torch.empty(len(values["rate"]), records, 1).exponential_(generator=generator)
        return times / values["rate"].float()[:, None, None]


class Everything(Independent):
    def __init__(self) -> None:
        covariance = torch.tensor([[2.0, 0.5], [0.5, 1.0]])
        priors = {
            "rate": Gamma(2.5, 0.5),
            "share": Beta(2.0, 3.0),
            "place": MultivariateNormal(torch.tensor([1.0, -1.0]), covariance),
            "mix": Dirichlet(torch.tensor([1.0, 2.0, 4.0])),
            "noise": Normal(torch.zeros(2), torch.tensor([1.0, 3.0])),
        }
        super().__init__(priors, dimensions=1)

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        return torch.zeros(len(values["rate"]), records, 1)


def test_the_density_is_scipys_with_the_jacobian_of_the_coordinates():
    """theta = (log rate, logit share, place, the simplex's two, noise); a Jacobian of the simplex by autograd."""
    simulator = Everything()
    assert simulator.size == 1 + 1 + 2 + 2 + 2
    theta = simulator.prior(6, generator_for("prior"))
    values = simulator.values(theta)
    assert {name: tuple(value.shape) for name, value in values.items()} == {
        "rate": (6,), "share": (6,), "place": (6, 2), "mix": (6, 3), "noise": (6, 2),
    }  # fmt: skip

    def mix(two: Tensor) -> Tensor:
        return simulator.values(torch.cat([torch.zeros(4).double(), two, torch.zeros(2).double()])[None])["mix"][0, :2]

    found = simulator.log_prior(theta)
    for i, row in enumerate(theta.numpy()):
        rate, share, m = math.exp(row[0]), expit(row[1]), values["mix"][i].numpy()
        expected = stats.gamma.logpdf(rate, 2.5, scale=2.0) + row[0]
        expected += stats.beta.logpdf(share, 2.0, 3.0) + math.log(share * (1 - share))
        expected += stats.multivariate_normal.logpdf(row[2:4], [1.0, -1.0], [[2.0, 0.5], [0.5, 1.0]])
        jacobian = torch.autograd.functional.jacobian(mix, theta[i, 4:6])
        expected += stats.dirichlet.logpdf(m / m.sum(), [1.0, 2.0, 4.0]) + math.log(abs(float(jacobian.det())))
        expected += stats.norm.logpdf(row[6:], 0.0, [1.0, 3.0]).sum()
        assert float(found[i]) == pytest.approx(expected, rel=1e-6)
        assert values["rate"][i] == pytest.approx(rate)
        assert values["share"][i] == pytest.approx(share)


def test_draws_have_the_priors_distribution():
    values = Everything().values(Everything().prior(4000, generator_for("draws")))
    for name, law in {"rate": stats.gamma(2.5, scale=2.0), "share": stats.beta(2.0, 3.0)}.items():
        assert stats.kstest(values[name].numpy(), law.cdf).pvalue > 1e-3
    assert stats.kstest(values["mix"][:, 1].numpy(), stats.beta(2.0, 5.0).cdf).pvalue > 1e-3
    assert torch.cov(values["place"].T)[0, 1] == pytest.approx(0.5, abs=0.1)


def test_without_parameters_or_with_a_discrete_one_it_is_refused_and_draws_from_the_generator_alone():
    class Own(Waiting):
        def __init__(self, **priors: torch.distributions.Distribution) -> None:
            Independent.__init__(self, priors, dimensions=1)

    assert_refused("Own has no parameter: give at least one prior", Own)
    with pytest.raises(UserError, match=r"the prior of 'beds' is Poisson, .* take a continuous distribution"):
        Own(rate=Gamma(1.0, 1.0), beds=Poisson(3.0))
    before = torch.get_rng_state()
    simulator = Everything()
    theta = simulator.prior(3, generator_for("one"))
    simulator.log_prior(theta)
    simulator.simulate(theta, 2, generator_for("records"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(simulator.prior(3, generator_for("one")), theta)
    assert not torch.equal(simulator.prior(3, generator_for("other")), theta)


@pytest.mark.slow
def test_a_rates_posterior_is_the_conjugate_gamma():
    """60 exponential waiting times: rate ~ Gamma(3 + n, 2 + sum x)."""
    x = Waiting().simulate(torch.full((1, 1), math.log(1.8), dtype=torch.float64), 60, generator_for("times"))[0]
    exact = stats.gamma(3 + 60, scale=1 / (2 + float(x.sum())))
    inference = Inference.of(Waiting(), 0, particles=400, frequencies=16)
    found = answered(inference.run(generator_for("rate")), mean_embedding(inference.phi, x), 60)
    assert found.kind == FOUND
    rate = Waiting().values(found.particles.theta)["rate"]
    assert float(rate.mean()) == pytest.approx(exact.mean(), abs=0.3 * exact.std())
    assert float(rate.std()) == pytest.approx(exact.std(), rel=0.2)


CENTRES = torch.tensor([[-9.0, 3.0], [0.0, -9.0], [8.0, 3.0]])


@pytest.mark.slow
def test_three_gaussians_are_found():
    """Wrong places are two components on one Gaussian, and a wide one over two; here all particles leave them."""
    records, generator = 900, generator_for("scan", 900, 5)
    x = torch.cat([c + torch.randn(records // 3, 2, generator=generator) for c in CENTRES])
    simulator = GaussianMixture(3, 2)
    inference = Inference.of(simulator, 0, particles=120, frequencies=32)
    found = answered(inference.run(generator, 30), mean_embedding(inference.phi, x), float(records))
    assert found.kind == FOUND
    values = simulator.values(consistent(found.particles.theta, simulator.symmetries()))
    means = values["means"].mean(0)
    means = means[means[:, 0].argsort()]
    own = torch.stack([x[k * (records // 3) : (k + 1) * (records // 3)].mean(0) for k in range(3)])
    assert float((means - own).abs().max()) < 2 / (records / 3) ** 0.5
    torch.testing.assert_close(values["weights"].mean(0), torch.full((3,), 1 / 3).double(), atol=0.03, rtol=0)
    spread = values["means"].std(0) * (records / 3) ** 0.5  # one, but for the little that the prior knows
    assert 0.8 < float(spread.min()) < float(spread.max()) < 1.25
