"""Amortised inference: a network learns the posterior of every data set at once, and then answers in no time."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lit_epgan import tensor_file
from lit_epgan.errors import UserError
from lit_epgan.likelihood_free import flow
from lit_epgan.likelihood_free.ordering import ordered
from lit_epgan.likelihood_free.simulator import Simulator

FIRST = 5_000  # simulations by which inputs and outputs are standardised
TOGETHER = 32  # data sets that are held at a time
PARTS = {"records", "size", "length", "by", "symmetries", "weights"}

Summary = Callable[[Tensor, torch.Generator], Tensor]
"""Summaries (n, D) of data sets (n, records, d): what is released of them, with noise drawn from the generator."""


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

        estimator = flow.conditional_flow(*pairs(FIRST), generator)
        flow.fit(estimator, pairs, steps)
        return cls(estimator, records, symmetries, by)

    def __call__(self, observed: Tensor, draws: int, generator: torch.Generator) -> Tensor:
        """Draws theta (draws, p), float64, from the posterior of one summary.

        Args:
            observed: (D,).
            draws: how many.
            generator: of the draws.

        Raises:
            UserError: the summary has another length, or is not finite.
        """
        if observed.shape != (self.length,):
            raise UserError(
                f"the observed summary has shape {tuple(observed.shape)}; this posterior was trained on summaries of "
                f"{self.length} numbers"
            )
        theta = flow.draw(self.estimator, _finite(observed).float(), draws, generator)
        return ordered(theta.double(), self.symmetries, self.by)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as tensors and numbers, and no code.

        Args:
            path: the file to create or replace.
        """
        numbers = {"records": self.records, "size": int(self.estimator.input_shape[0]), "length": self.length}
        weights = dict(self.estimator.state_dict())
        tensor_file.save(numbers | {"by": self.by, "symmetries": self.symmetries, "weights": weights}, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "AmortisedPosterior":
        """What ``save`` wrote; nothing in the file is executed.

        Args:
            path: the file.

        Raises:
            UserError: the file is missing, damaged or something else, or sbi is not installed.
        """
        held = tensor_file.load(path)
        if not isinstance(held, dict) or set(held) != PARTS:
            raise UserError(f"{os.fspath(path)} is no amortised posterior; give a file that its save wrote")
        theta, summaries = (torch.arange(2.0)[:, None].repeat(1, held[name]) for name in ("size", "size"))
        estimator = flow.conditional_flow(theta, summaries, torch.Generator())
        try:
            estimator.load_state_dict(held["weights"])
        except RuntimeError as error:
            raise UserError(f"{os.fspath(path)} fits no flow of this version of sbi; train it again") from error
        return cls(estimator.eval(), held["records"], held["symmetries"], held["by"])


def _finite(summaries: Tensor) -> Tensor:
    """The same.

    Raises:
        UserError: they are not finite.
    """
    if not summaries.isfinite().all():
        raise UserError("a summary is not finite: let the simulator or the summary clip what it makes of a data set")
    return summaries
