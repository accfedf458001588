"""Objectives against values worked out by hand; penalties against finite differences."""

import io
import math

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

from lit_epgan.bayes import SGHMC
from lit_epgan.modules.objectives import OBJECTIVES, gradient_penalty, objective, r1_penalty, squared_gradient_norms
from tests.refusals import assert_refused

REAL = torch.tensor([[2.0], [-1.0]])
FAKE = torch.tensor([[0.5], [1.5]])


def softplus(x):
    return math.log(1 + math.exp(x))


@pytest.mark.parametrize(
    ("name", "discriminator", "generator"),
    [
        # -(2 - 1) / 2 + (.5 + 1.5) / 2;  -(.5 + 1.5) / 2
        ("wgan-gp", 0.5, -1.0),
        # ((2-1)^2 + (-1-1)^2) / 4 + (.25 + 2.25) / 4;  ((.5-1)^2 + (1.5-1)^2) / 4
        ("lsgan", 1.875, 0.125),
        # -mean log sigmoid(real) - mean log(1 - sigmoid(fake));  -mean log sigmoid(fake)
        ("non-saturating", sum(map(softplus, (-2, 1, 0.5, 1.5))) / 2, sum(map(softplus, (-0.5, -1.5))) / 2),
    ],
)
def test_losses_by_hand(name, discriminator, generator):
    losses = objective(name)
    assert losses.discriminator_loss(REAL, FAKE).item() == pytest.approx(discriminator, rel=1e-6)
    assert losses.generator_loss(FAKE).item() == pytest.approx(generator, rel=1e-6)
    assert_refused("wgan-gp, lsgan, non-saturating", objective, "hinge")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_weights_are_replicated_rows(name):
    """Weights (1/4, 3/4) on two rows weigh as one copy of the first row and three of the second."""
    weighted = objective(name).discriminator_loss(REAL, FAKE, torch.tensor([0.25, 0.75]))
    replicated = objective(name).discriminator_loss(REAL[[0, 1, 1, 1]], FAKE)
    assert weighted.item() == pytest.approx(replicated.item(), rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_heads_and_members_are_averaged_after_the_loss(name):
    """Several heads give the mean of their losses, which for non-linear losses is not the loss of their mean."""
    real, fake, weight = torch.randn(5, 3).double(), torch.randn(4, 3).double(), torch.rand(5).double().softmax(0)
    losses = objective(name)
    together = losses.discriminator_loss(real, fake, weight)
    each = [losses.discriminator_loss(real[:, [k]], fake[:, [k]], weight) for k in range(3)]
    assert together.item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-9)
    # N = 3 generators with 4 rows each, M = 2 heads: (1 / NM) sum_ij L(G_i, D_j), written as two loops
    real, fake, losses = torch.randn(5, 2), torch.randn(12, 2), objective(name)
    pairs = [(block[:, [j]], real[:, [j]]) for block in fake.split(4) for j in range(2)]
    generator = sum(losses.generator_loss(g) for g, _ in pairs) / 6
    discriminator = sum(losses.discriminator_loss(r, g) for g, r in pairs) / 6
    torch.testing.assert_close(losses.generator_loss(fake), generator)
    torch.testing.assert_close(losses.discriminator_loss(real, fake), discriminator)


def test_a_gradient_penaltys_norm_is_over_the_sample_and_its_pairs_are_random():
    """D(x) = <a, x> has gradient a everywhere: the penalty is (||a|| - 1)^2 with the norm over all 3 x 4 x 4 entries.

    That is 6.07 here; a norm per pixel, over channels only, would give (sqrt(3) / 2 - 1)^2 = 0.018.
    """
    direction = torch.full((3, 4, 4), 0.5)  # ||a|| = sqrt(48 / 4), ||a_p|| = sqrt(3) / 2
    penalty = gradient_penalty(lambda x: (x * direction).flatten(1).sum(1, keepdim=True), *torch.randn(2, 6, 3, 4, 4))
    assert penalty.item() == pytest.approx((math.sqrt(12) - 1) ** 2, rel=1e-5)
    # D(x) = x^2 / 2 has || grad D(x) || = | x |: the mixtures e r + (1 - e) f can be read off the penalty
    real, fake = torch.zeros(1000, 1, dtype=torch.double), torch.tensor([[3.0], [7.0], [11.0]], dtype=torch.double)
    torch.manual_seed(9)
    penalty = gradient_penalty(lambda x: x.square() / 2, real, fake, torch.full((1000,), 1e-3, dtype=torch.double))
    torch.manual_seed(9)
    chosen, share = torch.randint(3, (1000,)), torch.rand(1000, 1, dtype=torch.double)
    assert chosen.bincount(minlength=3).min() > 280
    assert penalty.item() == pytest.approx(((1 - share) * fake[chosen] - 1).square().mean().item(), rel=1e-6)


def test_gradient_penalty_draws_nothing_for_rows_that_match_and_takes_generated_rows_of_less_precision():
    real, fake = torch.randn(2, 6, 4, dtype=torch.double)
    torch.manual_seed(9)
    penalty = gradient_penalty(lambda x: x.square().sum(1, keepdim=True) / 2, real, fake)
    torch.manual_seed(9)
    share = torch.rand(6, 1, dtype=torch.double)
    mixed = share * real + (1 - share) * fake
    assert penalty.item() == pytest.approx((mixed.norm(dim=1) - 1).square().mean().item(), rel=1e-6)
    # Under automatic mixed precision the real rows are float32 and the generated ones bfloat16
    real, fake = torch.zeros(4, 3), torch.full((4, 3), 2.0, dtype=torch.bfloat16)
    penalties = []
    for rows in (fake, fake.float()):
        torch.manual_seed(9)
        penalties.append(gradient_penalty(lambda x: x.square().sum(1, keepdim=True), real, rows))
    assert torch.equal(*penalties)


def test_r1_by_hand_and_a_flat_discriminators_gradients():
    """D(x) = 1/2 sum a x^2 has gradient a x: R1 is 1/2 sum_i w_i sum (a x_i)^2."""
    a = torch.tensor([1.0, 2.0])
    x = torch.tensor([[1.0, 1.0], [3.0, -1.0]], requires_grad=True)
    scores = (a * x.square()).sum(1, keepdim=True) / 2
    assert r1_penalty(scores, x).item() == pytest.approx((5 + 13) / 4)
    assert r1_penalty(scores, x, torch.tensor([0.9, 0.1])).item() == pytest.approx((0.9 * 5 + 0.1 * 13) / 2)
    # ||grad|| = 0 everywhere: the square root has no derivative there, the penalty's gradient must not be NaN
    weight = torch.zeros(4, requires_grad=True)
    penalty = gradient_penalty(lambda x: (x * weight).sum(1, keepdim=True), torch.randn(3, 4), torch.randn(3, 4))
    penalty.backward()
    assert penalty.item() == pytest.approx(1, rel=1e-4)
    assert weight.grad.isfinite().all()


def _network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def _numeric_gradients(discriminator, x, step=1e-6):
    columns = []
    for entry in range(x[0].numel()):
        shift = torch.zeros(x[0].numel(), dtype=x.dtype)
        shift[entry] = step
        ahead, behind = (discriminator(x + sign * shift.view(x[0].shape)).mean(1) for sign in (1, -1))
        columns.append((ahead - behind) / (2 * step))
    return torch.stack(columns, 1)


def test_gradient_norms_and_penalties_match_finite_differences():
    discriminator, x = _network(), torch.randn(5, 2, 2, 2, dtype=torch.double, requires_grad=True)
    norms = squared_gradient_norms(discriminator(x), x)
    expected = _numeric_gradients(discriminator, x.detach()).square().sum(1)
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=1e-9)
    discriminator, (real, fake) = _network(), torch.randn(2, 5, 2, 2, 2, dtype=torch.double)
    weight = torch.rand(5, dtype=torch.double).softmax(0)
    torch.manual_seed(9)
    penalty = gradient_penalty(discriminator, real, fake, weight)
    torch.manual_seed(9)
    share = torch.rand(5, 1, 1, 1, dtype=torch.double)  # one number per sample
    norms = _numeric_gradients(discriminator, share * real + (1 - share) * fake).norm(dim=1)
    assert penalty.item() == pytest.approx((weight * (norms - 1) ** 2).sum().item(), rel=1e-6)


@pytest.mark.parametrize("kind", ["gp", "r1"])
def test_penalties_train_the_discriminator(kind):
    """The derivative of the penalty with respect to a weight is that of finite differences."""
    discriminator, (real, fake) = _network(), torch.randn(2, 5, 2, 2, 2, dtype=torch.double)
    weight = next(discriminator.parameters())

    def penalty() -> Tensor:
        torch.manual_seed(9)
        x = real.clone().requires_grad_()
        return gradient_penalty(discriminator, real, fake) if kind == "gp" else r1_penalty(discriminator(x), x)

    penalty().backward()
    for row, column in ((0, 0), (3, 5)):
        with torch.no_grad():
            weight[row, column] += 1e-6
            ahead = penalty_value(penalty)
            weight[row, column] -= 2e-6
            behind = penalty_value(penalty)
            weight[row, column] += 1e-6
        assert weight.grad[row, column].item() == pytest.approx((ahead - behind) / 2e-6, rel=1e-4)


def penalty_value(penalty):  # type: ignore[no-untyped-def]
    with torch.enable_grad():
        return penalty().item()


A = torch.tensor([[2.0, 0.9], [0.9, 1.0]], dtype=torch.float64)  # precision of a correlated target
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
CHAINS = 40_000


def energy(theta):
    return 0.5 * ((theta - MEAN) @ A * (theta - MEAN)).sum()


def sample(steps, lr, friction, temperature=1.0):
    torch.manual_seed(0)
    theta = nn.Parameter(MEAN.repeat(CHAINS, 1))
    optimizer = SGHMC([theta], lr=lr, friction=friction, temperature=temperature)
    for _ in range(steps):
        optimizer.zero_grad()
        energy(theta).backward()
        optimizer.step()
    return theta.detach().mean(0), torch.cov(theta.detach().T)


def stationary(lr, friction, temperature):
    """Covariance of theta under v' = (1-a) v - lr A theta + n, theta' = theta + v': the discrete Lyapunov equation."""
    eye = torch.eye(2, dtype=torch.float64)
    step = torch.cat(
        [torch.cat([(1 - friction) * eye, -lr * A], 1), torch.cat([(1 - friction) * eye, eye - lr * A], 1)]
    )
    noise = 2 * friction * lr * temperature * torch.ones(2, 2, dtype=torch.float64).kron(eye)
    return torch.tensor(solve_discrete_lyapunov(step.numpy(), noise.numpy())[2:, 2:])


def assert_samples_of(mean, covariance, expected):
    variances = expected.diagonal()
    assert bool(((mean - MEAN).abs() < 5 * (variances / CHAINS).sqrt()).all())
    errors = ((expected.square() + torch.outer(variances, variances)) / CHAINS).sqrt()
    assert bool(((covariance - expected).abs() < 5 * errors).all())


@pytest.mark.parametrize(
    ("lr", "friction", "temperature"),
    [(0.02, 0.2, 1.0), (0.3, 0.4, 1.0), (0.1, 1.0, 1.0), (0.3, 0.4, 0.25), (0.1, 1.0, 9.0)],
)
def test_samples_have_the_targets_mean_and_the_known_covariance(lr, friction, temperature):
    """T [A - lr A^2 / (2 (2 - alpha))]^-1: the target's covariance times T, but for the step size's known error."""
    mean, covariance = sample(steps=120, lr=lr, friction=friction, temperature=temperature)
    closed_form = temperature * torch.linalg.inv(A - lr / (2 * (2 - friction)) * A @ A)
    torch.testing.assert_close(closed_form, stationary(lr, friction, temperature))
    assert_samples_of(mean, covariance, closed_form)


def test_without_temperature_it_is_gradient_descent_with_momentum():
    torch.manual_seed(1)
    ours, theirs = (nn.Linear(3, 2).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    sghmc = SGHMC(ours.parameters(), lr=0.05, friction=0.1, temperature=0.0)
    sgd = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    x = torch.randn(8, 3, dtype=torch.float64)
    for _ in range(5):
        for network, optimizer in ((ours, sghmc), (theirs, sgd)):
            optimizer.zero_grad()
            network(x).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    stream = torch.get_rng_state()
    sghmc.step()
    assert torch.equal(torch.get_rng_state(), stream)


def test_one_step_by_hand():
    """v = 0.9 v - 0.5 g + sqrt(2 x 0.1 x 0.5 x 4) z; theta + v."""
    theta = nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = SGHMC([theta], lr=0.5, friction=0.1, temperature=4.0)
    velocity, expected = torch.zeros(2), theta.detach().clone()
    for step in range(3):
        theta.grad = torch.tensor([1.0, -3.0]) * (step + 1)
        torch.manual_seed(step)
        velocity = 0.9 * velocity - 0.5 * theta.grad + 0.4**0.5 * torch.randn(2)
        expected = expected + velocity
        torch.manual_seed(step)
        optimizer.step()
        torch.testing.assert_close(theta.detach(), expected)


def test_many_parameters_are_one_vector_whatever_their_shape_and_layout():
    torch.manual_seed(2)
    whole = nn.Parameter(torch.randn(24))
    parts = [nn.Parameter(part.detach().clone()) for part in whole.split([4, 12, 8])]
    parts[1].data = parts[1].data.view(3, 4).t()  # dense, not contiguous
    whole.grad = torch.randn(24)
    for part, gradient in zip(parts, whole.grad.split([4, 12, 8]), strict=True):
        part.grad = gradient.view(3, 4).t() if part.dim() == 2 else gradient.clone()
    for parameters in ([whole], parts):
        torch.manual_seed(3)
        SGHMC(parameters, lr=0.1, friction=0.2).step()
    assert torch.equal(torch.cat([parts[0], parts[1].t().flatten(), parts[2]]), whole)


def test_a_parameter_without_a_gradient_stays_and_groups_have_settings_and_closures_gradients():
    still, slow, fast = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float32, torch.float64))
    optimizer = SGHMC([{"params": [still, slow], "lr": 0.01}, {"params": [fast]}], lr=1.0, temperature=0.0)
    slow.grad, fast.grad = torch.ones(3), torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert (still.tolist(), slow.tolist()) == ([1] * 3, pytest.approx([0.99] * 3))
    assert fast.tolist() == pytest.approx([0.0] * 3)
    theta = nn.Parameter(torch.tensor([2.0]))
    optimizer = SGHMC([theta], lr=0.5, temperature=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 4.0
    assert theta.tolist() == [0.0]


def test_resumed_from_a_state_dict_it_goes_on_bit_by_bit():
    def run(steps: int, theta: nn.Parameter, optimizer: SGHMC) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (theta - 1).pow(4).sum().backward()
            optimizer.step()

    def start() -> tuple[nn.Parameter, SGHMC]:
        theta = nn.Parameter(torch.zeros(5))
        return theta, SGHMC([theta], lr=0.05, friction=0.3)

    torch.manual_seed(4)
    theta, optimizer = start()
    run(7, theta, optimizer)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), theta.detach(), torch.get_rng_state()), file)
    run(9, theta, optimizer)

    resumed, fresh = start()
    file.seek(0)
    state, values, stream = torch.load(file, weights_only=True)
    resumed.data.copy_(values)
    fresh.load_state_dict(state)
    torch.set_rng_state(stream)
    run(9, resumed, fresh)
    assert torch.equal(resumed, theta)
    assert fresh.state[resumed]["step"] == 16


@pytest.mark.parametrize("argument", [{"lr": -1.0}, {"friction": 0.0}, {"friction": 1.5}, {"temperature": -0.1},
                                      {"lr": float("nan")}])  # fmt: skip
def test_arguments_out_of_range(argument):
    assert_refused(next(iter(argument)), SGHMC, [nn.Parameter(torch.zeros(1))], **argument)
