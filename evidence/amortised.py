"""One of the orders in which a symmetric model's parameters mean the same, chosen by the parameters alone."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.bayes.simulator import Simulator
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import MissingFileError, UserError
from lit_epgan.lib.randomness import isolated

KIND = "nsf"  # neural spline flow (Durkan et al. 2019); on mixtures it learns faster than an affine one
WIDTH, DEPTH, CODE = 256, 4, 64  # of the network that reads a summary, and the length of what it tells the flow
LEARNING_RATE = 3e-3
LARGEST_GRADIENT = 5.0
FIRST = 5_000  # simulations by which inputs and outputs are standardised
TOGETHER = 32  # data sets that are held at a time
PARTS = {"records", "size", "length", "by", "symmetries", "weights"}

Summary = Callable[[Tensor, torch.Generator], Tensor]
"""Summaries (n, D) of data sets (n, records, d): what is released of them, with noise drawn from the generator."""


def ordered(theta: Tensor, symmetries: Tensor, by: int) -> Tensor:
    """theta (n, p), each row in the order in which coordinate ``by`` and its likes in other components ascend.

    The likes are the places c_1 < ... < c_K to which the symmetries take ``by``. Of all orders of a row, the one with
    the greatest sum_k k theta_{c_k} is taken: by the rearrangement inequality theta_{c_k} then ascends. So rows of any
    origin can be compared, and a posterior with K! equal modes is left with one of them.

    Args:
        theta: (n, p).
        symmetries: (S, p), as ``Simulator.symmetries``.
        by: a coordinate that tells components apart, such as the first of a component's mean.
    """
    if len(symmetries) == 1:
        return theta
    likes = symmetries[:, by].unique()
    ranks = theta.new_tensor(range(len(likes)))
    best = (theta[:, symmetries[:, likes]] @ ranks).argmax(1)
    return theta.gather(1, symmetries[best])


class ResidualBlock(nn.Module):
    """h + f(h), f two layers on normalised h: places that a mean embedding hides in phases are found by depth."""

    def __init__(self) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        changed: Tensor = self.change(h)
        return h + changed


def conditional_flow(theta: Tensor, summaries: Tensor, generator: torch.Generator) -> Any:
    """An untrained flow, which standardises theta (n, p) and summaries (n, D), float32, by these.

    Raises:
        UserError: sbi is not installed.
    """
    try:
        from sbi.neural_nets import posterior_nn
    except ModuleNotFoundError as error:
        raise MissingFileError("amortised inference needs sbi: pip install 'lit_epgan[sbi]'") from error
    with isolated():
        _seed(generator)
        blocks = [ResidualBlock() for _ in range(DEPTH)]
        first, last = nn.Linear(summaries.shape[1], WIDTH), nn.Linear(WIDTH, CODE)
        reading = nn.Sequential(first, *blocks, nn.LayerNorm(WIDTH), last)
        return posterior_nn(KIND, embedding_net=reading)(theta, summaries)


def _fit(flow: Any, pairs: Callable[[], tuple[Tensor, Tensor]], steps: int) -> None:
    """Maximise E log q(theta | s) by Adam, whose rate rises and falls once (Smith and Topin 2018).

    Each step takes a batch (theta, s) of ``pairs`` that no step took before. The flow is changed in place.
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
def draw_parameters(flow: Any, summary: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """theta (draws, p) from q(theta | s) for one s (D,), float32."""
    with isolated(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.triangular_solve")  # nflows calls it by its old name
        _seed(generator)
        theta: Tensor = flow.sample(torch.Size([draws]), summary[None])[:, 0]
        return theta


def _seed(generator: torch.Generator) -> None:
    """Flows draw from the global stream alone."""
    torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))


class AmortisedPosterior:
    """q(theta | s), a normalising flow, by neural posterior estimation:

        maximise E log q(theta | s),   theta ~ prior, s = summary(simulate(theta))

    whose maximum is the posterior p(theta | s) of every s, the noise of the summary included (Papamakarios and Murray
    2016, proposition 1; it is the loss of sbi's NPE in its first round). Every step sees new data sets, so nothing is
    overfitted and nothing is held back. A model's components are put in order first: q has one mode to learn instead of
    K!, and components have names.

    Attributes:
        records: n, of the data sets that it was trained for. It holds for no other size, and for no other noise.
        length: D, of a summary.
    """

    def __init__(self, estimator: Any, records: int, symmetries: Tensor, by: int) -> None:
        self.estimator, self.records, self.symmetries, self.by = estimator, records, symmetries, by
        self.length = int(estimator.condition_shape[0])

    @classmethod
    def trained(
        cls,
        simulator: Simulator,
        summary: Summary,
        records: int,
        generator: torch.Generator,
        by: int = 0,
        steps: int = 4000,
        batch: int = 256,
    ) -> "AmortisedPosterior":
        """Learn from ``steps`` x ``batch`` simulations.

        Args:
            simulator: the model and its prior.
            summary: of data sets, with all noise that will be in the observed one.
            records: of each data set, as many as the federation has.
            generator: of the simulations, and of the network's start.
            by: the coordinate by which components are ordered; for GaussianMixture 1, their means' first.
            steps: of the network's training.
            batch: simulations for each step.

        Raises:
            UserError: a number is out of its range, a summary is not finite, or sbi is not installed.
        """
        if records < 1 or steps < 2 or batch < 1 or not 0 <= by < simulator.size:
            raise UserError(
                f"records, steps, batch and by are {records}, {steps}, {batch} and {by}: give at least 1, 2 and 1, and "
                f"a coordinate from 0 to {simulator.size - 1}"
            )
        symmetries = simulator.symmetries()

        def pairs(n: int = batch) -> tuple[Tensor, Tensor]:
            theta = simulator.prior(n, generator)
            parts = [summary(simulator.simulate(part, records, generator), generator) for part in theta.split(TOGETHER)]
            return ordered(theta, symmetries, by).float(), _finite(torch.cat(parts)).float()

        estimator = conditional_flow(*pairs(FIRST), generator)
        _fit(estimator, pairs, steps)
        return cls(estimator, records, symmetries, by)

    def __call__(self, observed: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Draws theta (draws, p), float64, from the posterior of one summary (D,).

        Raises:
            UserError: the summary has another length, or is not finite.
        """
        if observed.shape != (self.length,):
            raise UserError(
                f"the observed summary has shape {tuple(observed.shape)}; this posterior was trained on summaries of "
                f"{self.length} numbers"
            )
        theta = draw_parameters(self.estimator, _finite(observed).float(), draws, generator)
        return ordered(theta.double(), self.symmetries, self.by)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as tensors and numbers, and no code."""
        numbers = {"records": self.records, "size": int(self.estimator.input_shape[0]), "length": self.length}
        weights = dict(self.estimator.state_dict())
        tensor_file.save(numbers | {"by": self.by, "symmetries": self.symmetries, "weights": weights}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "AmortisedPosterior":
        """What ``save`` wrote; nothing in the file is executed.

        Raises:
            UserError: the file is missing, damaged or something else, or sbi is not installed.
        """
        held = tensor_file.load(path)
        if not isinstance(held, dict) or set(held) != PARTS:
            raise UserError(f"{os.fspath(path)} is no amortised posterior; give a file that its save wrote")
        theta, summaries = (torch.arange(2.0)[:, None].repeat(1, held[name]) for name in ("size", "size"))
        estimator = conditional_flow(theta, summaries, torch.Generator())
        try:
            estimator.load_state_dict(held["weights"])
        except RuntimeError as error:
            raise UserError(f"{os.fspath(path)} fits no flow of this version of sbi; train it again") from error
        return cls(estimator.eval(), held["records"], held["symmetries"], held["by"])


def _finite(summaries: Tensor) -> Tensor:
    """Refuse summaries that are not finite."""
    if not summaries.isfinite().all():
        raise UserError("a summary is not finite: let the simulator or the summary clip what it makes of a data set")
    return summaries
