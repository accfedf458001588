"""A conditional normalising flow q(theta | s) from sbi: built, fitted to simulations, and drawn from."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.errors import MissingFileError
from lit_epgan.randomness import isolated

KIND = "nsf"  # neural spline flow (Durkan et al. 2019); on mixtures it learns faster than an affine one
WIDTH, DEPTH, CODE = 256, 4, 64  # of the network that reads a summary, and the length of what it tells the flow
LEARNING_RATE = 3e-3
LARGEST_GRADIENT = 5.0


class Block(nn.Module):
    """h + f(h), f two layers on normalised h: places that a mean embedding hides in phases are found by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        """Of h (n, WIDTH)."""
        changed: Tensor = self.change(h)
        return h + changed


def conditional_flow(theta: Tensor, summaries: Tensor, generator: torch.Generator) -> Any:
    """An untrained flow, which standardises theta (n, p) and summaries (n, D) by these.

    Args:
        theta, summaries: float32.
        generator: of its weights.

    Raises:
        UserError: sbi is not installed.
    """
    try:
        from sbi.neural_nets import posterior_nn
    except ModuleNotFoundError as error:
        raise MissingFileError("amortised inference needs sbi: pip install 'lit_epgan[sbi]'") from error
    with isolated():
        _seed(generator)
        blocks = [Block() for _ in range(DEPTH)]
        first, last = nn.Linear(summaries.shape[1], WIDTH), nn.Linear(WIDTH, CODE)
        reading = nn.Sequential(first, *blocks, nn.LayerNorm(WIDTH), last)
        return posterior_nn(KIND, embedding_net=reading)(theta, summaries)


def fit(flow: Any, pairs: Callable[[], tuple[Tensor, Tensor]], steps: int) -> None:
    """Maximise E log q(theta | s): each step takes a batch (theta, s) that no step took before.

    Args:
        flow: changed in place.
        pairs: simulates a batch.
        steps: of Adam, whose rate rises and falls once (Smith and Topin 2018).
    """
    optimizer = torch.optim.Adam(flow.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        optimizer.zero_grad()
        flow.loss(*pairs()).mean().backward()
        nn.utils.clip_grad_norm_(flow.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        schedule.step()
    flow.eval()


@torch.no_grad()
def draw(flow: Any, summary: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """theta (draws, p) from q(theta | s) for one s (D,), float32."""
    with isolated(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.triangular_solve")  # nflows calls it by its old name
        _seed(generator)
        theta: Tensor = flow.sample(torch.Size([draws]), summary[None])[:, 0]
        return theta


def _seed(generator: torch.Generator) -> None:
    """Flows draw from the global stream alone."""
    torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
