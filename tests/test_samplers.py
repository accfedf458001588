"""Who takes part: rates against frequencies, and cohorts that depend on seed and round alone."""

import pytest
import torch

from lit_epgan.engine import Chains, Everyone, FixedSize, InTurn, Poisson, Sampler, stages
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg
from tests.test_sealed_server import federation

CLIENTS = list(range(3, 23))


@pytest.mark.parametrize(
    "sampler",
    [Everyone(), FixedSize(5), Poisson(0.3), InTurn(4), Chains(3, FixedSize(7))],
    ids=lambda s: type(s).__name__,
)
def test_a_sampler_states_its_rate(sampler: Sampler) -> None:
    """Every client's frequency over 2,000 rounds is within four standard deviations of the rate."""
    rounds, counts = 2000, dict.fromkeys(CLIENTS, 0)
    for r in range(rounds):
        for chain in sampler.draw(CLIENTS, 7, r):
            for k in chain:
                counts[k] += 1
    rate = sampler.rate(len(CLIENTS))
    spread = 4 * (rate * (1 - rate) / rounds) ** 0.5
    assert all(abs(n / rounds - rate) <= spread for n in counts.values())


def test_poisson_cohorts_have_binomial_sizes() -> None:
    sizes = torch.tensor([float(len(Poisson(0.3).draw(CLIENTS, 1, r))) for r in range(3000)])
    assert float(sizes.mean()) == pytest.approx(6, abs=0.15)
    assert float(sizes.var()) == pytest.approx(20 * 0.3 * 0.7, rel=0.1)


@pytest.mark.parametrize("sampler", [FixedSize(5), Poisson(0.5), Chains(2)], ids=lambda s: type(s).__name__)
def test_a_draw_depends_on_seed_and_round_alone(sampler: Sampler) -> None:
    first = sampler.draw(CLIENTS, 0, 4)
    sampler.draw(CLIENTS, 0, 5)
    assert sampler.draw(CLIENTS, 0, 4) == first
    assert sampler.draw(CLIENTS, 0, 6) != first
    assert sampler.draw(CLIENTS, 1, 4) != first


@pytest.mark.parametrize("groups", [1, 3, 20])
def test_in_turn_every_client_takes_part_once_in_as_many_rounds_as_there_are_groups(groups: int) -> None:
    """Whatever round one begins with, and in groups of nearly one size; whatever the seed."""
    drawn = [[k for chain in InTurn(groups).draw(CLIENTS, r, r) for k in chain] for r in range(3 * groups)]
    for start in range(2 * groups):
        assert sorted(k for cohort in drawn[start : start + groups] for k in cohort) == CLIENTS
    sizes = {len(cohort) for cohort in drawn}
    assert max(sizes) - min(sizes) <= 1
    assert InTurn(groups).separation == groups


def test_in_turn_groups_of_neighbours_follow_each_other() -> None:
    sampler, clients = InTurn(3), [1, 2, 4, 5, 6, 7, 8, 9]
    assert [[k for (k,) in sampler.draw(clients, 0, r)] for r in range(4)] == [[1, 2], [4, 5, 6], [7, 8, 9], [1, 2]]
    assert sampler.rate(8) == pytest.approx(1 / 3)


def test_what_others_promise_of_participation() -> None:
    promised = [s.separation for s in (Everyone(), FixedSize(2), Poisson(0.5), Chains(2))]
    assert promised == [1, None, None, None]


def test_chains_deal_the_cohort_of_another_sampler() -> None:
    chains = Chains(3, FixedSize(8)).draw(CLIENTS, 0, 0)
    assert sorted(map(len, chains), reverse=True) == [3, 3, 2]
    assert sorted(k for chain in chains for k in chain) == [c[0] for c in FixedSize(8).draw(CLIENTS, 0, 0)]


def test_stages_are_the_places_in_the_chains() -> None:
    assert stages([[1, 2, 3], [4], [5, 6]]) == [[1, 4, 5], [2, 6], [3]]
    assert stages([]) == []


def test_a_round_that_nobody_takes_part_in_changes_nothing() -> None:
    plain = federation(FedAvg(), sampler=Poisson(1e-9))
    before = plain.server.parameters.clone()
    assert torch.equal(plain.run(2), before)


def test_a_cohort_larger_than_the_federation_is_refused() -> None:
    with pytest.raises(UserError, match="choose at most 3"):
        FixedSize(4).check(3)
    with pytest.raises(UserError, match="take at most that"):
        InTurn(4).check(3)
    with pytest.raises(UserError, match="at least one group"):
        InTurn(0)
