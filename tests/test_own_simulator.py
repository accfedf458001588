"""The documentation's simulator, which has no likelihood: its parameters are found over three hospitals."""

import importlib.util
from pathlib import Path

import pytest
import torch

from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import Question, SummedAnswer
from lit_epgan.randomness import generator_for

FILE = Path(__file__).parent.parent / "docs" / "own_simulator.py"


def ward_outbreaks():
    spec = importlib.util.spec_from_file_location("own_simulator", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.WardOutbreaks()


@pytest.mark.slow
def test_an_epidemics_parameters_are_found_from_three_hospitals_discrepancies() -> None:
    """60 wards at each; the posterior of the first two is at most half as wide as the prior, and holds the truth."""
    simulator, generator = ward_outbreaks(), generator_for("wards")
    theta = torch.tensor([[1.6, 0.35, 0.8]], dtype=torch.float64)
    theta = torch.cat([theta[:, :1].log(), theta[:, 1:].logit()], 1)
    hospitals = simulator.simulate(theta.expand(3, -1), 60, generator)
    inference = Inference.of(simulator, 0, particles=100, frequencies=32)
    means = [inference.phi(x).double().mean(0) for x in hospitals]

    def answer(question: Question) -> SummedAnswer:
        """What the hospitals' sums say: one number for each simulated data set."""
        return SummedAnswer(sum(60 * question.discrepancies(mean) for mean in means) / 180, 180.0)

    asking = inference.run(generator)
    question = next(asking)
    try:
        while True:
            question = asking.send(answer(question))
    except StopIteration as end:
        stage = end.value
    assert stage.kind == FOUND
    found, prior = stage.particles.theta, simulator.prior(2000, generator)
    z = (found.mean(0) - theta[0]) / found.std(0)
    assert (z.abs() < 3).all(), z
    assert (found.std(0)[:2] < 0.5 * prior.std(0)[:2]).all(), found.std(0) / prior.std(0)
