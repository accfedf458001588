"""The toy federations: their points follow the mixture they state, and the mixture's density is a density."""

import math
from typing import Any

import pytest
import torch
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from lit_epgan.callbacks.toy_metrics import axis, d_mse, density_error, grid, kernel_density, mode_coverage, unit_range
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.datamodules.toy import GaussianMixture2d, ToyDataModule
from lit_epgan.datamodules.writers import by_hand
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused


def loaded(**options):
    datamodule = ToyDataModule(**options)
    datamodule.setup()
    return datamodule


def grid_points(half_width, steps):
    step = 2 * half_width / steps
    axis = (torch.arange(steps, dtype=torch.float64) + 0.5) * step - half_width
    return torch.cartesian_prod(axis, axis), step**2


def test_density_agrees_with_torchs_mixture_and_global_streams_are_untouched():
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    variances = torch.rand(5, generator=generator, dtype=torch.float64) + 0.1
    points = 2 * torch.randn(50, 2, generator=generator, dtype=torch.float64)
    parts = Independent(Normal(means, variances.sqrt()[:, None].expand(5, 2)), 1)
    independent = MixtureSameFamily(Categorical(torch.ones(5)), parts).log_prob(points).exp()
    torch.testing.assert_close(GaussianMixture2d(means, variances).density(points), independent)
    before = torch.get_rng_state()
    loaded()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("options", [{}, {"layout": "ring"}, {"layout": "ring", "components": 3}, {"clients": 2}])
def test_density_integrates_to_one(options):
    points, area = grid_points(8.0, 200)
    assert float(loaded(**options).mixture.density(points).sum() * area) == pytest.approx(1, abs=1e-4)


def test_the_papers_four_gaussians():
    datamodule = ToyDataModule()
    assert datamodule.mixture.means.tolist() == [[-3, 3], [3, 3], [-3, -3], [3, -3]]
    assert datamodule.shape == (2,)
    many = torch.cat([ToyDataModule(data_seed=seed).mixture.variances for seed in range(200)])
    assert 0.3 <= many.min() < 0.305
    assert 0.495 < many.max() <= 0.5
    assert many.mean() == pytest.approx(0.4, abs=0.008)  # four standard errors of 800 uniform draws


@pytest.mark.parametrize("options", [{}, {"layout": "ring", "components": 6}])
def test_a_client_holds_its_own_gaussian(options):
    datamodule = loaded(points=4000, **options)
    assert len(datamodule.data.train) == len(datamodule.mixture.means)
    for k, dataset in enumerate(datamodule.data.train.values()):
        x, component = dataset.tensors
        assert component.tolist() == [k] * 4000
        deviation = datamodule.mixture.variances[k].sqrt()
        assert torch.allclose(x.mean(0), datamodule.mixture.means[k], atol=float(4 * deviation / 4000**0.5))
        assert torch.allclose(x.var(0), datamodule.mixture.variances[k].expand(2), rtol=4 * (2 / 4000) ** 0.5)


def test_iid_clients_see_every_gaussian_and_pooled_is_one_client_of_the_same_points():
    iid = loaded(partition="iid", clients=7).data
    assert len(iid.train) == 7
    assert all(own.unique().tolist() == [0, 1, 2, 3] for own in iid.labels.values())
    pooled = loaded(partition="pooled", clients=5).data
    assert [len(dataset) for dataset in pooled.train.values()] == [4 * 1024]

    def points(**options: Any) -> list[list[float]]:
        return sorted(p for dataset in loaded(**options).data.train.values() for p in dataset.tensors[0].tolist())

    assert points() == points(partition="pooled") == points(partition="dirichlet")
    assert points() != points(data_seed=1)


def test_fewer_clients_leave_gaussians_out_and_a_crowded_ring_keeps_them_apart():
    datamodule = loaded(clients=2)
    assert len(datamodule.mixture.means) == len(datamodule.mixture.variances) == 2
    assert datamodule.data.test.tensors[1].unique().tolist() == [0, 1]
    for components in (2, 8, 25):
        datamodule = ToyDataModule(layout="ring", components=components, radius=4)
        assert torch.allclose(datamodule.mixture.means.norm(dim=1), torch.tensor(4.0))
        distances = torch.cdist(datamodule.mixture.means, datamodule.mixture.means) + 100 * torch.eye(components)
        assert distances.min() >= 7.99 * datamodule.mixture.variances.max().sqrt()


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
def test_options_that_cannot_be_met_are_refused(options, words):
    with pytest.raises(UserError) as error:
        loaded(**options)
    assert all(word in str(error.value) for word in words), str(error.value)


def written(**settings):
    data = WritersDataModule(clients=12, images=5, held_out_writers=3, batch_size=5, **settings)
    return {name: each.tensors for name, each in data.load().train.items()}


def test_everybody_writes_by_a_hand_of_their_own_and_those_held_out_take_no_part():
    first, again, other = written(), written(seed=3), written(split_seed=8)
    assert list(first) == [f"writer-{k:02d}" for k in range(12)]
    for name, (x, y) in first.items():
        assert (x.shape, y.shape) == ((5, 1, 8, 8), (5,))
        assert float(x.min()) >= -1
        assert float(x.max()) <= 1
        assert torch.equal(x, again[name][0])
        assert not torch.equal(x, other[name][0])
    data = WritersDataModule(clients=4, images=5, held_out_writers=3, batch_size=5, inverted=1.0).load()
    x, _ = data.test.tensors
    assert len(x) == 15
    assert float(x.mean()) < 0  # dark, as none of them is inverted


def test_what_is_validated_on_is_no_clients_and_not_tested_on(monkeypatch):
    """With no hand at all an image shows which one it is; the digits have hardly any twice."""
    monkeypatch.setattr("lit_epgan.datamodules.writers.HAND", (0.0, 0.0, 0.0, 0.0))
    settings = {"clients": 100, "images": 40, "held_out_writers": 40, "batch_size": 5}
    data = WritersDataModule(val_fraction=0.5, **settings).load()
    clients = {image.numpy().tobytes() for each in data.train.values() for image in each.tensors[0]}
    val, test = ({image.numpy().tobytes() for image in each.tensors[0]} for each in (data.val, data.test))
    assert not clients & val
    assert not clients & test
    assert not val & test
    assert 700 < len(clients) < 719  # half of 1,437
    without = WritersDataModule(**settings).load()
    assert without.val is without.test


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_the_fault_inverts_all_images_of_a_share_of_the_writers(share, count):
    clean, faulty = written(), written(inverted=share)
    inverted = [name for name in clean if torch.equal(faulty[name][0], -clean[name][0])]
    assert len(inverted) == count
    assert all(torch.equal(faulty[name][0], clean[name][0]) for name in clean if name not in inverted)


def test_a_hand_shifts_thickens_and_slants():
    """One pixel a column to the left is a quarter of half of eight; no hand at all changes nothing but the range."""
    ink = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(by_hand(ink, 0, 0, 0, 0), 2 * ink - 1)
    torch.testing.assert_close(by_hand(ink, 0, 0, 0.25, 0)[..., :-1], 2 * ink[..., 1:] - 1)
    torch.testing.assert_close(by_hand(ink, 0, 0, 0, 0.25)[..., :-1, :], 2 * ink[..., 1:, :] - 1)
    assert (by_hand(ink, 0, -0.2, 0, 0) >= 2 * ink - 1 - 1e-6).all()
    bar = torch.zeros(1, 1, 8, 8)
    bar[..., 3:5] = 1
    slanted = by_hand(bar, 0.5, 0, 0, 0)[0, 0] + 1
    columns = (slanted * torch.arange(8.0)).sum(1) / slanted.sum(1)
    assert (columns.diff() < 0).all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clients": 0}, r"data\.clients"),
        ({"images": 0}, r"data\.images"),
        ({"inverted": 1.5}, r"data\.inverted"),
        ({"val_fraction": 1.0}, r"data\.val_fraction"),
    ],
)
def test_what_cannot_be_is_refused(settings, named):
    assert_refused(named, WritersDataModule, **{"batch_size": 5, **settings})


MEANS = torch.tensor([[-3.0, 3.0], [3.0, 3.0], [-3.0, -3.0], [3.0, -3.0]])
VARIANCES = torch.full((4,), 0.4)


def density(points):
    squared = torch.cdist(points, MEANS).square()
    return (torch.exp(-squared / (2 * VARIANCES)) / (2 * math.pi * VARIANCES)).mean(1)


def samples(modes, each=1000):
    generator = torch.Generator().manual_seed(0)
    return torch.cat([MEANS[k] + 0.4**0.5 * torch.randn(each, 2, generator=generator) for k in modes])


def test_coverage_by_hand_and_modes_of_five_percent():
    """Ten points: six at a centre, two just inside and one just outside three standard deviations, one far away."""
    three = 3 * 0.4**0.5
    inside, outside = torch.tensor([[0.999 * three, 0.0], [0.0, 1.001 * three]])
    centres = MEANS[[0, 0, 0, 0, 0, 1]]
    points = torch.cat([centres, MEANS[[1, 2]] + inside, MEANS[[3]] + outside, torch.zeros(1, 2)])
    found = mode_coverage(points, MEANS, VARIANCES)
    assert (found.coverage, found.weakest) == (pytest.approx(0.8), 0)
    assert found.modes == 3
    points = torch.cat([MEANS[[0] * 91], MEANS[[1] * 5], MEANS[[2] * 4]])
    found = mode_coverage(points, MEANS, VARIANCES)
    assert (found.modes, found.coverage) == (2, 1.0)
    full = mode_coverage(samples([0, 1, 2, 3]), MEANS, VARIANCES)
    # within three standard deviations in the plane: 1 - exp(-9 / 2)
    assert full.coverage == pytest.approx(1 - math.exp(-4.5), abs=0.003)
    assert (full.weakest, full.modes) == (pytest.approx(0.25, abs=0.005), 4)


def test_grid_is_the_cells_centres_and_kernel_density_the_sum_of_its_kernels():
    assert axis()[0] == pytest.approx(-4.95)
    assert axis()[-1] == pytest.approx(4.95, rel=1e-6)
    assert grid()[1].tolist() == pytest.approx([-4.85, -4.95])  # x runs fastest
    assert density(grid()).sum().item() * 0.01 == pytest.approx(1, abs=0.002)
    points = torch.randn(50, 2)
    squared = torch.cdist(grid(), points).square()
    expected = torch.exp(-squared / (2 * 0.2**2)).mean(1) / (2 * math.pi * 0.2**2)
    torch.testing.assert_close(kernel_density(points), expected, rtol=1e-3, atol=1e-5)


def test_density_errors_by_hand_and_of_reference():
    """Modes of one variance v: nothing misses 4 pi v / 100 of their squared heights. Three of four miss one mode's
    part and overshoot the others by a third: (1 + 3 / 9) / 4 of that. (Smoothing by the kernel takes a little off.)"""
    truth = density(grid())
    nothing = density_error(torch.full((10, 2), 100.0), truth)
    assert nothing == pytest.approx(4 * math.pi * 0.4 / 100, rel=0.02)  # no cell lies exactly at a centre
    assert density_error(samples([0, 1, 2]), truth) == pytest.approx(nothing / 3, rel=0.06)
    assert density_error(samples([0, 1, 2, 3]), truth) < 0.001
    # The trials' five mixtures, variances drawn from [.3, .5]: true samples .0005, three modes .011, nothing .036
    found = []
    for seed in range(5):
        generator = torch.Generator().manual_seed(1000 + seed)
        variances = torch.rand(4, generator=generator) * 0.2 + 0.3
        heights = torch.exp(-torch.cdist(grid(), MEANS).square() / (2 * variances)) / (2 * math.pi * variances)
        noise = variances.sqrt()[:, None, None] * torch.randn(4, 1000, 2, generator=generator)
        points = (MEANS[:, None] + noise)[[0, 1, 2, 3]]
        sets = points.flatten(0, 1), points[:3].flatten(0, 1), torch.full((10, 2), 100.0)
        found.append([density_error(some, heights.mean(1)) for some in sets])
    assert torch.tensor(found).mean(0).tolist() == pytest.approx([0.0005, 0.011, 0.036], rel=0.15)


def test_d_mse_compares_maps_scaled_to_the_unit_range():
    truth = density(grid())
    assert d_mse(5 + 3 * truth[:, None], truth) == pytest.approx(0, abs=1e-9)
    inverted = (1 - 2 * unit_range(truth)).square().mean().item()
    assert d_mse(-truth[:, None], truth) == pytest.approx(inverted, rel=1e-5)
    heads = torch.stack([truth, truth + 7], 1)
    assert d_mse(heads, truth) == pytest.approx(0, abs=1e-9)
    flat = d_mse(torch.ones(10000, 1), truth)
    assert flat == pytest.approx(unit_range(truth).square().mean().item(), rel=1e-5)
