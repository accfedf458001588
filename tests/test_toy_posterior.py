"""GRAFFL's toy (section 4.2) by the posterior's own search, on a seed where particles once stayed in several places."""

import pytest
import torch

from lit_epgan.bayes import GaussianMixture
from lit_epgan.bayes.inference import FOUND, Inference
from lit_epgan.bayes.mean_embeddings import answered, mean_embedding
from lit_epgan.bayes.moves import consistent
from lit_epgan.randomness import generator_for

CENTRES = torch.tensor([[-9.0, 3.0], [0.0, -9.0], [8.0, 3.0]])


@pytest.mark.slow
def test_three_gaussians_are_found() -> None:
    """Wrong places are two components on one Gaussian, and a wide one over two; here all particles leave them."""
    records, generator = 900, generator_for("scan", 900, 5)
    x = torch.cat([c + torch.randn(records // 3, 2, generator=generator) for c in CENTRES])
    simulator = GaussianMixture(3, 2)
    inference = Inference.of(simulator, 0, particles=400, frequencies=32)
    found = answered(inference.run(generator, 30), mean_embedding(inference.phi, x), float(records))
    assert found.kind == FOUND
    values = simulator.values(consistent(found.particles.theta, simulator.symmetries()))
    means = values["means"].mean(0)
    means = means[means[:, 0].argsort()]
    own = torch.stack([x[k * (records // 3) : (k + 1) * (records // 3)].mean(0) for k in range(3)])
    assert float((means - own).abs().max()) < 2 / (records / 3) ** 0.5
    torch.testing.assert_close(values["weights"].mean(0), torch.full((3,), 1 / 3).double(), atol=0.03, rtol=0)
    spread = values["means"].std(0) * (records / 3) ** 0.5  # one, but for the little that the prior knows
    assert 0.8 < float(spread.min()) < float(spread.max()) < 1.25
