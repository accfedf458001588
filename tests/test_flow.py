"""Flow matching: its loss against closed forms, its solver against an exact flow, labels, and FedAvg of it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvg, GeneratorSites
from lit_epgan.modules import ConditionalFlow, Flow
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.networks import FlowGenerator, MLPVelocity, UNetVelocity
from tests import federations
from tests.refusals import assert_refused
from tests.test_generator_sites import Draw


class ExactVelocity(nn.Module):
    """The velocity whose flow carries N(0, 1) to N(mean, scale^2): E[x1 - x0 | x_t], in closed form."""

    def __init__(self, mean: float, scale: float, labels: int = 0) -> None:
        super().__init__()
        self.mean, self.scale, self.data_shape, self.labels = mean, scale, (1,), labels
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, time: Tensor, label: Tensor) -> Tensor:
        t = time[:, None]
        mean = self.mean + (label @ torch.arange(self.labels).to(x))[:, None] if self.labels else self.mean
        variance = (1 - t) ** 2 + t**2 * self.scale**2
        return mean + (t * self.scale**2 - (1 - t)) / variance * (x - t * mean)


def flow(**options) -> Flow:
    torch.manual_seed(0)
    return Flow(FlowGenerator(MLPVelocity([2], [16])), **options)


@pytest.mark.parametrize(
    ("method", "steps", "error"), [("euler", 400, 2e-2), ("midpoint", 50, 1e-3), ("rk4", 20, 1e-4)]
)
def test_an_exact_velocity_carries_noise_to_the_quantile_that_it_came_from(method, steps, error):
    """The flow of a Gaussian in one dimension is monotone: x(1) = mean + scale x(0)."""
    noise = torch.linspace(-2, 2, 9)[:, None]
    found = FlowGenerator(ExactVelocity(3.0, 0.5), steps, method)(noise)
    torch.testing.assert_close(found, 3.0 + 0.5 * noise, atol=error, rtol=0)


def test_the_loss_of_the_exact_velocity_is_its_conditional_variance():
    """E ||u - (x1 - x0)||^2 = E_t Var(x1 - x0 | x_t) = E_t scale^2 / ((1 - t)^2 + t^2 scale^2), here by quadrature."""
    scale = 0.5
    module = Flow(FlowGenerator(ExactVelocity(3.0, scale)), average=None)
    torch.manual_seed(1)
    rows = Batch(3.0 + scale * torch.randn(400_000, 1))
    t = (torch.arange(10_000) + 0.5) / 10_000
    expected = (scale**2 / ((1 - t) ** 2 + t**2 * scale**2)).mean()
    torch.testing.assert_close(module.row_losses(rows).mean(), expected, rtol=1e-2, atol=0)


def test_a_steps_loss_is_the_weighted_mean_of_its_rows():
    module, x, weight = flow(average=None), torch.randn(4, 2), torch.tensor([0.1, 0.2, 0.3, 0.4])
    module.optimizers = lambda: torch.optim.SGD(module.parameters())  # type: ignore[method-assign]
    torch.manual_seed(2)
    losses = module.row_losses(Batch(x))
    torch.manual_seed(2)
    torch.testing.assert_close(module.training_step((x, None, weight), 0), (weight * losses).sum())
    torch.manual_seed(2)
    torch.testing.assert_close(module.training_step(x, 0), losses.mean())


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_guidance_goes_from_no_label_through_the_label_and_beyond(guidance):
    """Both velocities are those of N(mean, 1), a shift by mean: guided the shift is guidance times the label's."""
    noise = torch.tensor([[0.3, 0.0, 0.0, 1.0], [-1.0, 0.0, 1.0, 0.0]])
    found = FlowGenerator(ExactVelocity(0.0, 1.0, labels=3), 200, guidance=guidance)(noise)
    torch.testing.assert_close(found, noise[:, :1] + guidance * torch.tensor([[2.0], [1.0]]), atol=1e-3, rtol=0)


def test_labels_are_told_and_hidden_as_often_as_asked():
    module = ConditionalFlow(FlowGenerator(MLPVelocity([2], [8], labels=3)), untold=0.25)
    rows = Batch(torch.zeros(8000, 2), torch.arange(8000) % 3)
    torch.manual_seed(0)
    told = module._told(rows)
    hidden = told.sum(1) == 0
    assert abs(hidden.double().mean() - 0.25) < 0.02
    assert torch.equal(told[~hidden].argmax(1), rows.labels[~hidden])


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 28, 28), (1, 7, 9)])
@pytest.mark.parametrize("labels", [0, 3])
def test_a_unet_gives_a_velocity_for_every_pixel_and_hears_time_and_label(shape, labels):
    torch.manual_seed(0)
    network = UNetVelocity(shape, width=4, labels=labels)
    x, time, label = torch.randn(2, *shape), torch.tensor([0.2, 0.2]), torch.eye(2, labels)
    found = network(x, time, label)
    assert found.shape == x.shape
    assert not torch.allclose(found, network(x, time + 0.5, label))
    assert labels == 0 or not torch.allclose(found, network(x, time, torch.zeros(2, labels)))
    alone = network(x[:1], time[:1], label[:1])
    torch.testing.assert_close(alone, found[:1])  # rows do not see each other


def test_an_average_begins_anew_with_a_fresh_optimizer():
    """One step at one client: half of the parameters before it, half of those after, whatever the average was."""
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(8, 2))], batch_size=8, local_steps=1)
    module = flow(average=0.5)
    before = [p.detach().clone() for p in module.generator.parameters()]
    torch._foreach_add_(list(module.average.buffers()), 100.0)
    federations.fit(module, data, 1, algorithm=FedAvg(), precision=32)
    for start, mean, end in zip(before, module.average.buffers(), module.generator.parameters(), strict=True):
        assert not torch.equal(start, end)
        torch.testing.assert_close(mean, (start + end.detach()) / 2)


def test_a_flow_learns_two_points_and_their_labels():
    x = torch.tensor([[-2.0, 0.0], [2.0, 0.0]]).repeat(64, 1)
    data = FederatedDataModule.from_datasets([TensorDataset(x, (x[:, 0] > 0).long())], batch_size=64, local_steps=300)
    torch.manual_seed(0)
    module = ConditionalFlow(FlowGenerator(MLPVelocity([2], [64, 64], labels=2)), lr=5e-3)
    federations.fit(module, data, 1, algorithm=FedAvg(), precision=32)
    samples, labels = module.sample_labelled(200, torch.Generator().manual_seed(0))
    assert ((samples[:, 0] > 0).long() == labels).all()
    assert (samples[:, 0].abs() - 2).abs().mean() < 0.2
    assert 60 < int(labels.sum()) < 140


def test_generator_sites_take_a_flow():
    data = FederatedDataModule.from_datasets(
        [TensorDataset(torch.randn(16, 2) + k) for k in range(2)], batch_size=8, local_steps=2
    )
    draw = Draw(6)
    federations.fit(flow(), data, 2, algorithm=GeneratorSites(), callbacks=[draw], precision=32)
    assert [found.shape for found in draw.found] == [(6, 2), (6, 2)]


def test_what_cannot_be_is_refused():
    assert_refused("lr is nan", flow, lr=math.nan)
    assert_refused("steps", FlowGenerator, MLPVelocity([2], [8]), steps=0)
    assert_refused("guidance", FlowGenerator, MLPVelocity([2], [8]), guidance=-1.0)
    assert_refused("ConditionalFlow", Flow, FlowGenerator(MLPVelocity([2], [8], labels=3)))
    assert_refused("labels", ConditionalFlow, FlowGenerator(MLPVelocity([2], [8])))
    module = flow(average=None)
    module.optimizers = lambda: torch.optim.SGD(module.parameters())  # type: ignore[method-assign]
    assert_refused("shape", module.training_step, torch.zeros(3, 5), 0)
