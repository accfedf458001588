"""The Bayesian mixture of Gaussians: its prior against scipy, its draws against their moments."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lit_epgan.bayes.simulator import GaussianMixture
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for

MIXTURE = GaussianMixture(3, 2, concentration=1.7, mean=0.5, mean_precision=0.2, dof=6.0, scale=1.3)


def test_the_prior_is_scipys_with_the_jacobian_of_the_coordinates() -> None:
    """The density of (gamma, mu, Sigma) by scipy, times |d (gamma, mu, Sigma) / d theta| by autograd."""
    theta = MIXTURE.prior(4, generator_for("prior"))
    for row, found in zip(theta, MIXTURE.log_prior(theta), strict=True):
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


def _covariance_jacobian(coordinates: torch.Tensor) -> torch.Tensor:
    """d (Sigma_11, Sigma_21, Sigma_22) / d (log L_11, log L_22, L_21)."""

    def covariance(c: torch.Tensor) -> torch.Tensor:
        a, b = c[:2].exp()
        return torch.stack([a * a, a * c[2], c[2] ** 2 + b * b])

    return torch.autograd.functional.jacobian(covariance, coordinates)


def test_the_prior_is_drawn_as_its_density_says() -> None:
    """Moments of Dirichlet, inverse Wishart and normal-inverse-Wishart (20,000 draws: a percent or two)."""
    values = MIXTURE.values(MIXTURE.prior(20_000, generator_for("moments")))
    share, covariance = values["weights"], values["covariances"]
    assert share.mean(0).tolist() == pytest.approx([1 / 3] * 3, abs=0.01)
    assert float(share[:, 0].var()) == pytest.approx((1 / 3) * (2 / 3) / (3 * 1.7 + 1), rel=0.05)
    expected = 1.3 / (6 - 2 - 1)
    assert torch.allclose(covariance.mean((0, 1)), expected * torch.eye(2).double(), atol=0.02)
    spread = (values["means"] - 0.5).square().mean((0, 1))
    assert spread.tolist() == pytest.approx([expected / 0.2] * 2, rel=0.06)


def test_records_have_the_mixtures_mean_and_covariance() -> None:
    theta = MIXTURE.prior(5, generator_for("few"))
    values = MIXTURE.values(theta)
    x = MIXTURE.simulate(theta, 200_000, generator_for("records")).double()
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


def test_naming_components_anew_changes_neither_prior_nor_model() -> None:
    theta = MIXTURE.prior(3, generator_for("names"))
    orders = MIXTURE.symmetries()
    assert orders.shape == (6, MIXTURE.size)
    assert orders[0].tolist() == list(range(MIXTURE.size))
    renamed = theta[:, orders]  # (3, 6, p)
    assert torch.allclose(MIXTURE.log_prior(renamed.flatten(0, 1)).reshape(3, 6), MIXTURE.log_prior(theta)[:, None])
    weights = MIXTURE.values(renamed.flatten(0, 1))["weights"].reshape(3, 6, 3)
    assert len({tuple(w) for w in weights[0].tolist()}) == 6
    assert torch.allclose(weights.sort(-1).values, MIXTURE.values(theta)["weights"].sort(-1).values[:, None])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"components": 7}, "components is 7"),
        ({"dof": 1.0}, "dof is 1.0; an inverse Wishart of 2 dimensions needs more than 1"),
        ({"scale": 0.0}, "scale is 0.0; it must be above 0"),
    ],
)
def test_what_is_out_of_range_is_named(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        GaussianMixture(**settings)
