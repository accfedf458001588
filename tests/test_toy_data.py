"""The toy federations: their points follow the mixture they state, and the mixture's density is a density."""

from typing import Any

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from lit_epgan.datamodules.toy import GaussianMixture2d, ToyDataModule
from lit_epgan.errors import UserError


def loaded(**options: Any) -> ToyDataModule:
    datamodule = ToyDataModule(**options)
    datamodule.setup()
    return datamodule


def grid(half_width: float, steps: int) -> tuple[torch.Tensor, float]:
    step = 2 * half_width / steps
    axis = (torch.arange(steps, dtype=torch.float64) + 0.5) * step - half_width
    return torch.cartesian_prod(axis, axis), step**2


def test_density_agrees_with_torchs_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    variances = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    points = 2 * torch.randn(50, 2, generator=generator, dtype=torch.float64)
    parts = Independent(Normal(means, variances.sqrt()[:, None].expand(5, 2)), 1)
    independent = MixtureSameFamily(Categorical(torch.ones(5)), parts).log_prob(points).exp()
    torch.testing.assert_close(GaussianMixture2d(means, variances).density(points), independent)


@pytest.mark.parametrize("options", [{}, {"layout": "ring"}, {"layout": "ring", "components": 3}, {"clients": 2}])
def test_density_integrates_to_one(options: dict[str, Any]) -> None:
    points, area = grid(8.0, 200)
    assert float(loaded(**options).mixture.density(points).sum() * area) == pytest.approx(1, abs=1e-4)


def test_the_papers_four_gaussians() -> None:
    datamodule = ToyDataModule()
    assert datamodule.mixture.means.tolist() == [[-3, 3], [3, 3], [-3, -3], [3, -3]]
    assert datamodule.shape == (2,)
    many = torch.cat([ToyDataModule(data_seed=seed).mixture.variances for seed in range(200)])
    assert 0.3 <= many.min() < 0.305
    assert 0.495 < many.max() <= 0.5
    assert many.mean() == pytest.approx(0.4, abs=0.008)  # four standard errors of 800 uniform draws


@pytest.mark.parametrize("options", [{}, {"layout": "ring", "components": 6}])
def test_a_client_holds_its_own_gaussian(options: dict[str, Any]) -> None:
    datamodule = loaded(points=4000, **options)
    assert len(datamodule.data.train) == len(datamodule.mixture.means)
    for k, dataset in enumerate(datamodule.data.train.values()):
        x, component = dataset.tensors
        assert component.tolist() == [k] * 4000
        deviation = datamodule.mixture.variances[k].sqrt()
        assert torch.allclose(x.mean(0), datamodule.mixture.means[k], atol=float(4 * deviation / 4000**0.5))
        assert torch.allclose(x.var(0), datamodule.mixture.variances[k].expand(2), rtol=4 * (2 / 4000) ** 0.5)


def test_a_crowded_ring_keeps_its_gaussians_apart() -> None:
    for components in (2, 8, 25):
        datamodule = ToyDataModule(layout="ring", components=components, radius=4)
        assert torch.allclose(datamodule.mixture.means.norm(dim=1), torch.tensor(4.0))
        distances = torch.cdist(datamodule.mixture.means, datamodule.mixture.means) + 100 * torch.eye(components)
        assert distances.min() >= 7.99 * datamodule.mixture.variances.max().sqrt()


def test_iid_clients_see_every_gaussian_and_pooled_is_one_client() -> None:
    iid = loaded(partition="iid", clients=7).data
    assert len(iid.train) == 7
    assert all(own.unique().tolist() == [0, 1, 2, 3] for own in iid.labels.values())
    pooled = loaded(partition="pooled", clients=5).data
    assert [len(dataset) for dataset in pooled.train.values()] == [4 * 1024]


def test_partitions_deal_out_the_same_points() -> None:
    def points(**options: Any) -> list[list[float]]:
        return sorted(p for dataset in loaded(**options).data.train.values() for p in dataset.tensors[0].tolist())

    assert points() == points(partition="pooled") == points(partition="dirichlet")
    assert points() != points(data_seed=1)


def test_fewer_clients_leave_gaussians_out_of_the_truth_and_of_the_test_points() -> None:
    datamodule = loaded(clients=2)
    assert len(datamodule.mixture.means) == len(datamodule.mixture.variances) == 2
    assert datamodule.data.test.tensors[1].unique().tolist() == [0, 1]


def test_global_streams_are_untouched() -> None:
    before = torch.get_rng_state()
    loaded()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 5}, ["4 clients", "not 5", "--data.clients"]),
        ({"layout": "star"}, ["star", "ring"]),
        ({"layout": "ring", "components": 0}, ["components"]),
        ({"variances": (0.5, 0.3)}, ["variances"]),
        ({"partition": "iid", "points": 2, "clients": 9}, ["9 clients", "8 records"]),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        loaded(**options)
    assert all(word in str(error.value) for word in words), str(error.value)
