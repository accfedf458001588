"""The sum of clipped gradients, one of each record: against a loop over records, against Opacus, and under attack."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.batches import mapped, rows, stand_in, stands_in
from lit_epgan.privacy.noisy_steps import ClippedGradients, refuse_layers_that_mix
from tests.refusals import assert_refused
from tests.test_linear_layers import of_each


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    return nn.Sequential(*layers).double()


def images(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 8, 8, generator=generator, dtype=torch.float64) * torch.linspace(0.05, 3, n).view(-1, 1, 1, 1)
    return x, torch.randint(3, (n,), generator=generator)


def loss_of(network: nn.Module):
    return lambda batch: nn.functional.cross_entropy(network(batch[0]), batch[1])


def one_by_one(network: nn.Module, batch, bound: float) -> list[Tensor]:
    """DP-SGD's sum by a loop over records, with plain autograd; how many were clipped comes last."""
    parameters = list(network.parameters())
    total, clipped = [torch.zeros_like(p) for p in parameters], 0
    for k in range(len(batch[0])):
        gradients = torch.autograd.grad(loss_of(network)([part[k : k + 1] for part in batch]), parameters)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        clipped += int(norm > bound)
        for summed, gradient in zip(total, gradients, strict=True):
            summed += gradient * min(1.0, bound / float(norm))
    return [*total, torch.tensor(clipped)]


@pytest.mark.parametrize("at_once", [256, 3])
def test_it_is_what_a_loop_over_records_gives(at_once):
    network, batch = convolutional(), images(10)
    *expected, clipped = one_by_one(network, batch, 6.0)
    assert 0 < clipped < 10
    gradients = ClippedGradients(network, loss_of(network), 6.0, at_once)
    found = gradients.parts(gradients.sum(batch))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(not p.grad for p in network.parameters() if p.grad is not None)


def test_it_is_what_opacus_gives():
    """Its own clipping, on the same model and batch, before its noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    network, batch = convolutional(), images(10)
    gradients = ClippedGradients(network, loss_of(network), 6.0)
    found = gradients.parts(gradients.sum(batch))
    sampled = GradSampleModule(convolutional())
    sgd = torch.optim.SGD(sampled.parameters(), lr=0.1)
    optimizer = DPOptimizer(sgd, noise_multiplier=0.0, max_grad_norm=6.0, expected_batch_size=10)
    loss_of(sampled)(batch).backward()
    optimizer.clip_and_accumulate()
    theirs = [p.summed_grad for p in optimizer.params]
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-6)  # they add 1e-6 to each norm


NUMBERS = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.0, 1e38, -1e38, 3e18, float("nan"), float("inf"), -float("inf"), 1e-45]),
)


@given(st.lists(NUMBERS, min_size=4, max_size=4), NUMBERS, st.sampled_from([1e-3, 1.0, 1e3]))
@settings(max_examples=40)
def test_no_record_moves_the_sum_by_more_than_the_bound(x, y, bound):
    """Huge, sparse or not finite, beside an honest record: whatever one record is, it moves the sum by C at most."""
    network = nn.Sequential(nn.Linear(4, 3), nn.Softplus(), nn.Linear(3, 1))

    def loss(batch) -> Tensor:
        return (network(batch[0]) - batch[1]).square().mean()

    honest = [torch.tensor([[0.5, -1.0, 2.0, 0.1]]), torch.tensor([[1.0]])]
    both = [torch.cat([honest[0], torch.tensor([x])]), torch.cat([honest[1], torch.tensor([[y]])])]
    gradients = ClippedGradients(network, loss, bound)
    moved = (gradients.sum(both).double() - gradients.sum(honest).double()).norm()
    assert float(moved) <= bound * (1 + 1e-5)


def test_records_count_by_themselves_and_in_double_precision():
    """A record's gradient is the record itself: in one running sum of single precision the small ones would be lost."""
    x = torch.full((1, 2**20 + 1), 0.02)
    x[:, :128] = 100.0
    network = nn.Linear(x.shape[1], 1, bias=False)
    found = ClippedGradients(network, lambda batch: network(batch).sum(), 1.0).sum(x)
    torch.testing.assert_close(found.double(), x[0].double() / x.double().norm(), rtol=1e-5, atol=0.0)
    network = nn.Linear(4, 2).double()
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = ClippedGradients(network, lambda batch: network(batch[0]).sum() ** 2, 1.0)
    alone = [gradients.sum([x[k : k + 1]]) for k in range(5)]
    torch.testing.assert_close(gradients.sum([x]), torch.stack(alone).sum(0))


def test_no_records_have_no_gradient_and_each_has_its_own():
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)

    network = Counting()
    gradients = ClippedGradients(network, lambda batch: network(batch).square().mean(), 1.0)
    assert not gradients.sum(torch.zeros(0, 4)).any()
    assert gradients.sum(torch.ones(2, 4)).any()
    assert float(network.seen) == 0
    network = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
    network[0].bias.requires_grad_(False)
    gradients = ClippedGradients(network, lambda batch: network(batch).mean(), 1.0)
    first = gradients.parts(of_each(gradients, torch.ones(2, 4)))
    assert len(first) == len(gradients.parameters) == 3
    assert not torch.equal(first[1][0], first[1][1])


def test_what_cannot_be_taken_record_by_record_is_named():
    network = nn.Linear(4, 1)
    with pytest.raises(UserError, match=r"the loss of Linear cannot be taken record by record .*leave out what looks"):
        ClippedGradients(network, lambda batch: network(batch).mean() * network(batch).mean().item(), 1.0).sum(
            torch.ones(2, 4)
        )
    network = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4)))
    with pytest.raises(UserError, match=r"the layer discriminator\.1\.0 \(BatchNorm1d\) .*use GroupNorm"):
        refuse_layers_that_mix(network, "discriminator")
    refuse_layers_that_mix(network.eval(), "")  # by its running statistics, records are each by themselves
    refuse_layers_that_mix(convolutional(), "")


def test_batches_are_taken_apart_whatever_holds_them():
    batch = {"x": torch.ones(3, 2), "y": [torch.arange(3), (torch.ones(3, 1),)]}
    assert rows(batch) == 3
    nothing = stand_in(batch, 5)
    assert stands_in(nothing).tolist() == [True] * 5
    assert nothing["y"][0].tolist() == [0] * 5
    assert mapped(batch, len) == {"x": 3, "y": [3, (3,)]}
    mixed = torch.cat([nothing["x"], torch.tensor([[float("nan"), 1.0]])])
    assert stands_in([mixed]).tolist() == [*[True] * 5, False]
    assert_refused("holds a str", rows, ["name"])


def clipped_by_autograd(network: nn.Module, loss, x: Tensor, bound: float) -> Tensor:
    """The sum (d,) of clipped gradients of records x (records, ...), by torch's own gradients."""
    parameters = list(network.parameters())
    each = [torch.cat([g.flatten() for g in torch.autograd.grad(loss([record[None]]), parameters)]) for record in x]
    return torch.stack([gradient * (bound / gradient.norm()).clamp(max=1.0) for gradient in each]).sum(0)


class Words(nn.Module):
    """The mean over a sentence of embedded words (records, length), one of which stands for nothing."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4, padding_idx=2)
        self.out = nn.Linear(4, 6, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def loss(self, batch) -> Tensor:
        return self.out(self.embed(batch[0]).mean(1)).square().mean()


@pytest.mark.parametrize("tied", [False, True])
def test_a_row_that_stands_for_nothing_gets_no_noise(tied):
    """Unless another layer uses it, too, where its gradient is not 0."""
    network = Words(tied)
    nn.init.ones_(network.embed.weight)
    clipped = ClippedGradients(network, network.loss, 1.0)
    x = torch.randint(6, (5, 3))
    total = clipped.sum([x])
    torch.testing.assert_close(total.float(), clipped_by_autograd(network, network.loss, x, 1.0))
    assert clipped.still == ([] if tied else [slice(8, 12)])
    assert (total[8:12].abs().sum() == 0) == (not tied)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_are_opacuss(kind):
    """torch's are refused, and the remedy that is named gives the gradients of records one by one."""
    import opacus.layers

    torch.manual_seed(0)
    x = torch.randn(5, 7, 3)

    def network(layer: nn.Module):
        net = nn.ModuleDict({"recurrent": layer, "out": nn.Linear(4, 1)})
        return net, lambda batch: net["out"](net["recurrent"](batch[0])[0][:, -1]).square().mean()

    net, loss = network(getattr(nn, kind)(3, 4, batch_first=True))
    assert_refused(rf"take opacus\.layers\.DP{kind}", ClippedGradients(net, loss, 1.0).sum, [x])
    names = set(dict(net.named_parameters()))
    net, loss = network(getattr(opacus.layers, f"DP{kind}")(3, 4, batch_first=True))
    assert set(dict(net.named_parameters())) == names
    found = ClippedGradients(net, loss, 0.1).sum([x])
    torch.testing.assert_close(found.float(), clipped_by_autograd(net, loss, x, 0.1))
