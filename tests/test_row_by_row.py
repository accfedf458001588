"""A function of single rows against torch.func.vmap: what torch's private names have to do."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_epgan.privacy.record_losses import row_by_row


def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Beside it a matrix of every row, and what is the same for all."""
    return F.cross_entropy(x[None], y[None]), x[:, None] * x, torch.ones(3)


def test_it_is_vmap_and_its_results_have_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, requires_grad=True)
    y = torch.randint(4, (5,), generator=generator)
    found, expected = row_by_row(loss, x, y), torch.func.vmap(loss)(x, y)
    torch.testing.assert_close(found, list(expected))
    assert found[2].shape == (5, 3)
    for slope in (torch.autograd.grad(each[0].sum(), x)[0] for each in (found, expected)):
        torch.testing.assert_close(slope, (x.softmax(1) - F.one_hot(y, 4)).detach())


def test_rows_have_random_numbers_of_their_own() -> None:
    (found,) = row_by_row(lambda x: (torch.rand(()) + 0 * x,), torch.zeros(50))
    assert len(set(found.tolist())) == 50


def test_transforms_within_see_one_row() -> None:
    x = torch.arange(3.0)
    (found,) = row_by_row(lambda row: (torch.func.grad(lambda z: z**3)(row),), x)
    torch.testing.assert_close(found, 3 * x**2)


@pytest.mark.parametrize("number", [float, bool])
def test_numbers_are_not_to_be_had_and_a_failure_leaves_nothing_behind(number: type) -> None:
    def failing(x: Tensor) -> Sequence[Tensor]:
        return (x * number(x),)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            row_by_row(failing, torch.ones(3))
    torch.testing.assert_close(row_by_row(lambda x: (2 * x,), torch.ones(3)), [torch.full((3,), 2.0)])
    assert torch.ones(3).sum().item() == 3
