"""Objectives against values worked out by hand; penalties against finite differences."""

import math

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.objectives import OBJECTIVES, gradient_penalty, objective, r1_penalty, squared_gradient_norms

REAL = torch.tensor([[2.0], [-1.0]])
FAKE = torch.tensor([[0.5], [1.5]])


@pytest.mark.parametrize(
    ("name", "discriminator", "generator"),
    [
        # -(2 - 1) / 2 + (.5 + 1.5) / 2;  -(.5 + 1.5) / 2
        ("wgan-gp", 0.5, -1.0),
        # ((2-1)^2 + (-1-1)^2) / 4 + (.25 + 2.25) / 4;  ((.5-1)^2 + (1.5-1)^2) / 4
        ("lsgan", 1.875, 0.125),
        # -mean log sigmoid(real) - mean log(1 - sigmoid(fake));  -mean log sigmoid(fake)
        (
            "non-saturating",
            (
                math.log(1 + math.exp(-2))
                + math.log(1 + math.e)
                + math.log(1 + math.exp(0.5))
                + math.log(1 + math.exp(1.5))
            )
            / 2,
            (math.log(1 + math.exp(-0.5)) + math.log(1 + math.exp(-1.5))) / 2,
        ),
    ],
)
def test_losses_by_hand(name: str, discriminator: float, generator: float) -> None:
    losses = objective(name)
    assert losses.discriminator_loss(REAL, FAKE).item() == pytest.approx(discriminator, rel=1e-6)
    assert losses.generator_loss(FAKE).item() == pytest.approx(generator, rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_weights_are_replicated_rows(name: str) -> None:
    """Weights (1/4, 3/4) on two rows weigh as one copy of the first row and three of the second."""
    weighted = objective(name).discriminator_loss(REAL, FAKE, torch.tensor([0.25, 0.75]))
    replicated = objective(name).discriminator_loss(REAL[[0, 1, 1, 1]], FAKE)
    assert weighted.item() == pytest.approx(replicated.item(), rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_heads_are_averaged_after_the_loss(name: str) -> None:
    """Several heads give the mean of their losses, which for non-linear losses is not the loss of their mean."""
    real, fake, weight = torch.randn(5, 3).double(), torch.randn(4, 3).double(), torch.rand(5).double().softmax(0)
    losses = objective(name)
    together = losses.discriminator_loss(real, fake, weight)
    each = [losses.discriminator_loss(real[:, [k]], fake[:, [k]], weight) for k in range(3)]
    assert together.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-9)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_are_the_average_over_all_pairs_of_a_generator_and_a_discriminator(name: str) -> None:
    """N = 3 generators with 4 rows each, M = 2 heads: (1 / NM) sum_ij L(G_i, D_j), written as two loops."""
    real, fake, losses = torch.randn(5, 2), torch.randn(12, 2), objective(name)
    pairs = [(block[:, [j]], real[:, [j]]) for block in fake.split(4) for j in range(2)]
    generator = sum(losses.generator_loss(g) for g, _ in pairs) / 6
    discriminator = sum(losses.discriminator_loss(r, g) for g, r in pairs) / 6
    torch.testing.assert_close(losses.generator_loss(fake), generator)
    torch.testing.assert_close(losses.discriminator_loss(real, fake), discriminator)


def test_unknown_objective_lists_those_there_are() -> None:
    with pytest.raises(UserError, match="wgan-gp, lsgan, non-saturating"):
        objective("hinge")


def test_gradient_penalty_takes_the_norm_over_the_whole_sample() -> None:
    """D(x) = <a, x> has gradient a everywhere: the penalty is (||a|| - 1)^2 with the norm over all 3 x 4 x 4 entries.

    That is 6.07 here; a norm per pixel, over channels only, would give (sqrt(3) / 2 - 1)^2 = 0.018.
    """
    direction = torch.full((3, 4, 4), 0.5)  # ||a|| = sqrt(48 / 4), ||a_p|| = sqrt(3) / 2
    penalty = gradient_penalty(lambda x: (x * direction).flatten(1).sum(1, keepdim=True), *torch.randn(2, 6, 3, 4, 4))
    assert penalty.item() == pytest.approx((math.sqrt(12) - 1) ** 2, rel=1e-5)


def test_gradient_penalty_pairs_each_real_row_with_a_generated_one_at_random() -> None:
    """D(x) = x^2 / 2 has || grad D(x) || = | x |: the mixtures e r + (1 - e) f can be read off the penalty."""
    real, fake = torch.zeros(1000, 1, dtype=torch.double), torch.tensor([[3.0], [7.0], [11.0]], dtype=torch.double)
    torch.manual_seed(9)
    penalty = gradient_penalty(lambda x: x.square() / 2, real, fake, torch.full((1000,), 1e-3, dtype=torch.double))
    torch.manual_seed(9)
    chosen, share = torch.randint(3, (1000,)), torch.rand(1000, 1, dtype=torch.double)
    assert chosen.bincount(minlength=3).min() > 280
    assert penalty.item() == pytest.approx(((1 - share) * fake[chosen] - 1).square().mean().item(), rel=1e-6)


def test_gradient_penalty_draws_nothing_for_rows_that_match() -> None:
    real, fake = torch.randn(2, 6, 4, dtype=torch.double)
    torch.manual_seed(9)
    penalty = gradient_penalty(lambda x: x.square().sum(1, keepdim=True) / 2, real, fake)
    torch.manual_seed(9)
    share = torch.rand(6, 1, dtype=torch.double)
    mixed = share * real + (1 - share) * fake
    assert penalty.item() == pytest.approx((mixed.norm(dim=1) - 1).square().mean().item(), rel=1e-6)


def test_gradient_penalty_takes_generated_rows_of_less_precision() -> None:
    """Under automatic mixed precision the real rows are float32 and the generated ones bfloat16."""
    real, fake = torch.zeros(4, 3), torch.full((4, 3), 2.0, dtype=torch.bfloat16)
    penalties = []
    for rows in (fake, fake.float()):
        torch.manual_seed(9)
        penalties.append(gradient_penalty(lambda x: x.square().sum(1, keepdim=True), real, rows))
    assert torch.equal(*penalties)


def test_r1_by_hand() -> None:
    """D(x) = 1/2 sum a x^2 has gradient a x: R1 is 1/2 sum_i w_i sum (a x_i)^2."""
    a = torch.tensor([1.0, 2.0])
    x = torch.tensor([[1.0, 1.0], [3.0, -1.0]], requires_grad=True)
    scores = (a * x.square()).sum(1, keepdim=True) / 2
    assert r1_penalty(scores, x).item() == pytest.approx((5 + 13) / 4)
    assert r1_penalty(scores, x, torch.tensor([0.9, 0.1])).item() == pytest.approx((0.9 * 5 + 0.1 * 13) / 2)


def _network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _numeric_gradients(discriminator: nn.Module, x: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of the heads' mean, one input entry at a time: (rows, entries)."""
    columns = []
    for entry in range(x[0].numel()):
        shift = torch.zeros(x[0].numel(), dtype=x.dtype)
        shift[entry] = step
        ahead, behind = (discriminator(x + sign * shift.view(x[0].shape)).mean(1) for sign in (1, -1))
        columns.append((ahead - behind) / (2 * step))
    return torch.stack(columns, 1)


def test_gradient_norms_match_finite_differences() -> None:
    discriminator, x = _network(), torch.randn(5, 2, 2, 2, dtype=torch.double, requires_grad=True)
    norms = squared_gradient_norms(discriminator(x), x)
    expected = _numeric_gradients(discriminator, x.detach()).square().sum(1)
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=1e-9)


def test_gradient_penalty_matches_finite_differences_at_the_mixtures() -> None:
    discriminator, (real, fake) = _network(), torch.randn(2, 5, 2, 2, 2, dtype=torch.double)
    weight = torch.rand(5, dtype=torch.double).softmax(0)
    torch.manual_seed(9)
    penalty = gradient_penalty(discriminator, real, fake, weight)
    torch.manual_seed(9)
    share = torch.rand(5, 1, 1, 1, dtype=torch.double)  # one number per sample
    norms = _numeric_gradients(discriminator, share * real + (1 - share) * fake).norm(dim=1)
    assert penalty.item() == pytest.approx((weight * (norms - 1) ** 2).sum().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["gp", "r1"])
def test_penalties_train_the_discriminator(kind: str) -> None:
    """The derivative of the penalty with respect to a weight is that of finite differences."""
    discriminator, (real, fake) = _network(), torch.randn(2, 5, 2, 2, 2, dtype=torch.double)
    weight = next(discriminator.parameters())

    def penalty() -> Tensor:
        torch.manual_seed(9)
        x = real.clone().requires_grad_()
        return gradient_penalty(discriminator, real, fake) if kind == "gp" else r1_penalty(discriminator(x), x)

    penalty().backward()
    assert weight.grad is not None
    for row, column in ((0, 0), (3, 5)):
        with torch.no_grad():
            weight[row, column] += 1e-6
            ahead = penalty_value(penalty)
            weight[row, column] -= 2e-6
            behind = penalty_value(penalty)
            weight[row, column] += 1e-6
        assert weight.grad[row, column].item() == pytest.approx((ahead - behind) / 2e-6, rel=1e-4)


def penalty_value(penalty) -> float:  # type: ignore[no-untyped-def]
    with torch.enable_grad():
        return penalty().item()


def test_flat_discriminator_has_finite_gradients() -> None:
    """||grad|| = 0 everywhere: the square root has no derivative there, the penalty's gradient must not be NaN."""
    weight = torch.zeros(4, requires_grad=True)
    penalty = gradient_penalty(lambda x: (x * weight).sum(1, keepdim=True), torch.randn(3, 4), torch.randn(3, 4))
    penalty.backward()
    assert penalty.item() == pytest.approx(1, rel=1e-4)
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
