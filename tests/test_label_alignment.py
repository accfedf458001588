"""Components are named alike in all particles, where a coordinate that tells them apart is wide over wrong orders."""

import torch

from lit_epgan.bayes import GaussianMixture
from lit_epgan.bayes.moves import aligned, consistent
from lit_epgan.randomness import generator_for

MIXTURE = GaussianMixture(3, 2)


def renamed_at_random(n: int = 400) -> torch.Tensor:
    """Particles of a narrow posterior of three far components, each named in an order of its own."""
    generator = generator_for("labels")
    means = torch.tensor([[-9.0, 3.0], [0.0, -9.0], [8.0, 3.0]]).double()
    weights = 1 + 0.1 * torch.rand(n, 3, generator=generator, dtype=torch.float64)
    factor = torch.eye(2).double().expand(n, 3, 2, 2) * (1 + 0.2 * torch.randn(n, 3, 1, 1, generator=generator).abs())
    noise = 0.1 * torch.randn(n, 3, 2, generator=generator, dtype=torch.float64)
    theta = MIXTURE.coordinates(weights, means + noise, factor)
    orders = MIXTURE.symmetries()
    return theta.gather(1, orders[torch.randint(len(orders), (n,), generator=generator)])


def test_every_particle_gets_the_references_names() -> None:
    theta = renamed_at_random()
    found = MIXTURE.values(aligned(theta, theta[0], MIXTURE.symmetries()))["means"]
    assert (found.std(0) < 0.2).all()


def test_all_are_named_alike_whatever_the_first_is_called() -> None:
    theta = renamed_at_random()
    found = consistent(theta, MIXTURE.symmetries())
    assert (MIXTURE.values(found)["means"].std(0) < 0.2).all()
    assert torch.allclose(MIXTURE.log_prior(found), MIXTURE.log_prior(theta))
