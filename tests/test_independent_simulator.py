"""A user's own simulator: its priors against scipy, its randomness, and a posterior that is known."""

import math

import pytest
import torch
from scipy import stats
from scipy.special import expit
from torch import Tensor
from torch.distributions import Beta, Dirichlet, Gamma, MultivariateNormal, Normal, Poisson

from lit_epgan.bayes import Independent
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for


class Waiting(Independent):
    """Exponential waiting times: all that a user writes."""

    def __init__(self) -> None:
        super().__init__({"rate": Gamma(3.0, 2.0)}, dimensions=1)

    def records(self, values: dict[str, Tensor], records: int, generator: torch.Generator) -> Tensor:
        times = torch.empty(len(values["rate"]), records, 1).exponential_(generator=generator)
        return times / values["rate"].float()[:, None, None]


class Everything(Independent):
    """A parameter of every kind of support; its records are of no interest."""

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


def test_the_density_is_scipys_with_the_jacobian_of_the_coordinates() -> None:
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


def test_draws_have_the_priors_distribution() -> None:
    values = Everything().values(Everything().prior(4000, generator_for("draws")))
    for name, law in {"rate": stats.gamma(2.5, scale=2.0), "share": stats.beta(2.0, 3.0)}.items():
        assert stats.kstest(values[name].numpy(), law.cdf).pvalue > 1e-3
    assert stats.kstest(values["mix"][:, 1].numpy(), stats.beta(2.0, 5.0).cdf).pvalue > 1e-3
    assert torch.cov(values["place"].T)[0, 1] == pytest.approx(0.5, abs=0.1)


def test_all_randomness_comes_from_the_generator() -> None:
    before = torch.get_rng_state()
    simulator = Everything()
    theta = simulator.prior(3, generator_for("one"))
    simulator.log_prior(theta)
    simulator.simulate(theta, 2, generator_for("records"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(simulator.prior(3, generator_for("one")), theta)
    assert not torch.equal(simulator.prior(3, generator_for("other")), theta)


def test_without_parameters_or_with_a_discrete_one_it_is_refused() -> None:
    class Own(Waiting):
        def __init__(self, **priors: torch.distributions.Distribution) -> None:
            Independent.__init__(self, priors, dimensions=1)

    with pytest.raises(UserError, match="Own has no parameter: give at least one prior"):
        Own()
    with pytest.raises(UserError, match=r"the prior of 'beds' is Poisson, .* take a continuous distribution"):
        Own(rate=Gamma(1.0, 1.0), beds=Poisson(3.0))


@pytest.mark.slow
def test_a_rates_posterior_is_the_conjugate_gamma() -> None:
    """60 exponential waiting times: rate ~ Gamma(3 + n, 2 + sum x)."""
    x = Waiting().simulate(torch.full((1, 1), math.log(1.8), dtype=torch.float64), 60, generator_for("times"))[0]
    exact = stats.gamma(3 + 60, scale=1 / (2 + float(x.sum())))
    inference = Inference.of(Waiting(), 0, particles=400, frequencies=16)
    found = answered(inference.run(generator_for("rate")), mean_embedding(inference.phi, x), 60)
    assert found.kind == FOUND
    rate = Waiting().values(found.particles.theta)["rate"]
    assert float(rate.mean()) == pytest.approx(exact.mean(), abs=0.3 * exact.std())
    assert float(rate.std()) == pytest.approx(exact.std(), rel=0.2)
