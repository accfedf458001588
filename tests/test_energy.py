"""Energy distances by brute force and over sites; the search by them against a posterior that is known."""

import pytest
import torch
from torch.distributions import Normal

from lit_epgan.likelihood_free import Independent
from lit_epgan.likelihood_free.abc_search import (
    ToleranceSearch,
    compared,
    energy_distance,
    sliced_energy,
    unit_directions,
)
from lit_epgan.randomness import generator_for

G = generator_for("energy")
SIMULATED, RECORDS = torch.randn(4, 7, 3, generator=G), torch.randn(11, 3, generator=G)


def brute(x: torch.Tensor, y: torch.Tensor) -> float:
    """2 E|X - Y| - E|X - X'|, pair by pair."""
    across = [float((a - b).norm()) for a in x for b in y]
    within = [float((a - b).norm()) for a in x for b in x]
    return 2 * sum(across) / len(across) - sum(within) / len(within)


def test_the_energy_distance_is_that_of_all_pairs() -> None:
    by_hand = [brute(x, RECORDS) for x in SIMULATED]
    assert energy_distance(SIMULATED, RECORDS).tolist() == pytest.approx(by_hand, rel=1e-5)


def test_a_part_at_a_time_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = energy_distance(SIMULATED, RECORDS)
    monkeypatch.setattr("lit_epgan.likelihood_free.abc_search.PAIRS", 1)
    assert torch.allclose(energy_distance(SIMULATED, RECORDS), whole)


def test_the_sliced_one_is_the_mean_over_directions() -> None:
    along = unit_directions(3, 5, G)
    assert torch.allclose(along.norm(dim=0), torch.ones(5).double())
    by_hand = [sum(brute(x @ a[:, None], RECORDS @ a[:, None]) for a in along.float().T) / 5 for x in SIMULATED]
    assert sliced_energy(SIMULATED, RECORDS, along).tolist() == pytest.approx(by_hand, rel=1e-5)


@pytest.mark.parametrize("sliced", [False, True])
def test_over_sites_they_are_the_pooled_records_up_to_a_constant(sliced: bool) -> None:
    along = unit_directions(3, 5, G)

    def distance(y: torch.Tensor) -> torch.Tensor:
        return sliced_energy(SIMULATED, y, along) if sliced else energy_distance(SIMULATED, y)

    sites = RECORDS.split([3, 6, 2])
    summed = sum(len(y) * distance(y) for y in sites) / len(RECORDS)
    assert torch.allclose(summed, distance(RECORDS), atol=1e-6)


class Located(Independent):
    """x ~ N(m, 1), m ~ N(0, 5^2)."""

    def __init__(self) -> None:
        super().__init__({"m": Normal(0.0, 5.0)}, dimensions=1)

    def records(self, values: dict[str, torch.Tensor], records: int, generator: torch.Generator) -> torch.Tensor:
        noise = torch.randn(len(values["m"]), records, 1, generator=generator)
        return values["m"].float()[:, None, None] + noise


def test_a_search_comes_to_the_posteriors_mean_and_stays_wider() -> None:
    """100 records of mean 2 or so: the posterior's standard deviation is .1."""
    generator = generator_for("located")
    records = 2 + torch.randn(100, 1, generator=generator)
    search = ToleranceSearch(Located(), records=100, particles=300, moves=10)

    def distance(simulated: torch.Tensor) -> torch.Tensor:
        return energy_distance(simulated, records)

    at = compared(search.start(generator), distance)
    widths = []
    for _ in range(7):
        at = compared(search.generation(at, generator), distance)
        widths.append(float(at.theta.std()))
    assert float(at.theta.mean()) == pytest.approx(float(records.mean()), abs=0.1)
    assert 0.09 < widths[-1] < 0.3 < widths[0]
