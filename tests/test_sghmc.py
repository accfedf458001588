"""SGHMC against the exact stationary distribution of its own recursion on a Gaussian target."""

import io
from typing import Any

import pytest
import torch
from scipy.linalg import solve_discrete_lyapunov
from torch import Tensor, nn

from lit_epgan.bayes import SGHMC
from lit_epgan.errors import UserError

A = torch.tensor([[2.0, 0.9], [0.9, 1.0]], dtype=torch.float64)  # precision of a correlated target
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)
CHAINS = 40_000


def energy(theta: Tensor) -> Tensor:
    return 0.5 * ((theta - MEAN) @ A * (theta - MEAN)).sum()


def sample(steps: int, lr: float, friction: float, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance of independent chains after ``steps`` steps from the target's mean."""
    torch.manual_seed(0)
    theta = nn.Parameter(MEAN.repeat(CHAINS, 1))
    optimizer = SGHMC([theta], lr=lr, friction=friction, temperature=temperature)
    for _ in range(steps):
        optimizer.zero_grad()
        energy(theta).backward()
        optimizer.step()
    return theta.detach().mean(0), torch.cov(theta.detach().T)


def stationary(lr: float, friction: float, temperature: float) -> Tensor:
    """Covariance of theta under v' = (1-a) v - lr A theta + n, theta' = theta + v': the discrete Lyapunov equation."""
    eye = torch.eye(2, dtype=torch.float64)
    step = torch.cat(
        [torch.cat([(1 - friction) * eye, -lr * A], 1), torch.cat([(1 - friction) * eye, eye - lr * A], 1)]
    )
    noise = 2 * friction * lr * temperature * torch.ones(2, 2, dtype=torch.float64).kron(eye)
    return torch.tensor(solve_discrete_lyapunov(step.numpy(), noise.numpy())[2:, 2:])


def assert_samples_of(mean: Tensor, covariance: Tensor, expected: Tensor) -> None:
    """Five standard errors of independent chains."""
    variances = expected.diagonal()
    assert bool(((mean - MEAN).abs() < 5 * (variances / CHAINS).sqrt()).all())
    errors = ((expected.square() + torch.outer(variances, variances)) / CHAINS).sqrt()
    assert bool(((covariance - expected).abs() < 5 * errors).all())


@pytest.mark.parametrize("temperature", [1.0, 0.25, 9.0])
@pytest.mark.parametrize(("lr", "friction"), [(0.02, 0.2), (0.3, 0.4), (0.1, 1.0)])
def test_samples_have_the_targets_mean_and_the_known_covariance(lr: float, friction: float, temperature: float) -> None:
    """T [A - lr A^2 / (2 (2 - alpha))]^-1: the target's covariance times T, but for the step size's known error."""
    mean, covariance = sample(steps=120, lr=lr, friction=friction, temperature=temperature)
    closed_form = temperature * torch.linalg.inv(A - lr / (2 * (2 - friction)) * A @ A)
    torch.testing.assert_close(closed_form, stationary(lr, friction, temperature))
    assert_samples_of(mean, covariance, closed_form)


def test_a_small_step_samples_the_target_itself() -> None:
    _, covariance = sample(steps=300, lr=0.01, friction=0.2)
    bias = 0.01 * float(torch.linalg.eigvalsh(A).max()) / (2 * 1.8)
    assert bias < 0.01
    torch.testing.assert_close(covariance, torch.linalg.inv(A), rtol=0.03, atol=0.03)


def test_without_temperature_it_is_gradient_descent_with_momentum() -> None:
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


def test_one_step_by_hand() -> None:
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


def test_many_parameters_are_one_vector_whatever_their_shape_and_layout() -> None:
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


def test_a_parameter_without_a_gradient_stays_and_groups_have_settings_of_their_own() -> None:
    still, slow, fast = (nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.float32, torch.float64))
    optimizer = SGHMC([{"params": [still, slow], "lr": 0.01}, {"params": [fast]}], lr=1.0, temperature=0.0)
    slow.grad, fast.grad = torch.ones(3), torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert still.tolist() == [1] * 3
    assert slow.tolist() == pytest.approx([0.99] * 3)
    assert fast.tolist() == pytest.approx([0.0] * 3)


def test_a_closure_is_called_with_gradients() -> None:
    theta = nn.Parameter(torch.tensor([2.0]))
    optimizer = SGHMC([theta], lr=0.5, temperature=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = theta.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure)) == 4.0
    assert theta.tolist() == [0.0]


def test_resumed_from_a_state_dict_it_goes_on_bit_by_bit() -> None:
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
def test_arguments_out_of_range(argument: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(argument))):
        SGHMC([nn.Parameter(torch.zeros(1))], **argument)
