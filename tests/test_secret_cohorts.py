"""Cohorts of a private run: drawn anew in every process, alike on all of its sides."""

from pathlib import Path
from typing import Any

import pytest

from lit_epgan.engine import Everyone, FixedSize, InTurn, Poisson, Rounds, Server
from lit_epgan.engine.mechanisms import NormClipping
from lit_epgan.engine.samplers import Sampler
from lit_epgan.federated import FedAvg
from lit_epgan.privacy import AdaptiveNoise, CentralNoise, CorrelatedNoise, DistributedNoise, Releases, spent
from lit_epgan.privacy.central import SecretCohorts
from tests.federations import federation, fit
from tests.modules import Regression
from tests.plain_federation import federated
from tests.test_central_noise import begun

CLIENTS, ROUNDS = list(range(100)), range(20)


def drawn(sampler: Sampler, seed: int = 0) -> list[list[list[int]]]:
    return [sampler.draw(CLIENTS, seed, number) for number in ROUNDS]


@pytest.mark.parametrize("of", [FixedSize(10), Poisson(0.1)], ids=lambda of: type(of).__name__)
def test_a_processs_draws_are_its_own_and_do_not_follow_from_the_seed(of: Sampler) -> None:
    one, other = SecretCohorts(of), SecretCohorts(of)
    assert drawn(one, 0) == drawn(one, 1) != drawn(other, 0)
    assert drawn(one) != drawn(of)
    assert one.rate(100) == of.rate(100)
    assert drawn(SecretCohorts(of, 7)) == drawn(of, 7)


def test_a_cohort_of_the_wrapped_size_is_drawn_without_favour() -> None:
    """Each of a hundred is drawn in a tenth of 2,000 rounds: 200, with a standard deviation of 13."""
    sampler = SecretCohorts(FixedSize(10))
    cohorts = [[k for chain in sampler.draw(CLIENTS, 0, number) for k in chain] for number in range(2000)]
    assert {len(set(cohort)) for cohort in cohorts} == {10}
    times = [sum(k in cohort for cohort in cohorts) for k in CLIENTS]
    assert 200 - 6 * 13 < min(times) <= max(times) < 200 + 6 * 13


@pytest.mark.parametrize("kind", [CentralNoise, DistributedNoise])
def test_a_mechanism_whose_price_counts_on_the_draw_makes_it_secret(kind: type[CentralNoise]) -> None:
    mechanism = kind(1.0, 4.0)
    assert isinstance(mechanism.sampler(FixedSize(10)), SecretCohorts)
    assert isinstance(AdaptiveNoise(1.0, noise_multiplier=4.0).sampler(Poisson(0.1)), SecretCohorts)
    for open_ in (Everyone(), InTurn(4)):
        assert mechanism.sampler(open_) is open_
    seeded = FixedSize(10)
    assert CentralNoise(1.0, 4.0, noise_seed=1).sampler(seeded) is seeded
    assert CorrelatedNoise(1.0, 4.0).sampler(seeded) is seeded
    assert NormClipping(1.0).sampler(seeded) is seeded


def test_the_accountant_reads_the_sampler_that_is_wrapped() -> None:
    mechanism = CentralNoise(1.0, 4.0)
    promised = str(begun(mechanism, 10, mechanism.sampler(FixedSize(10))).guarantee())
    assert str(spent([Releases(4.0, 10, "fixed", 0.1, 100)], 1e-5)) in promised


class Watched(FedAvg):
    """Notes the server's cohorts."""

    def __init__(self) -> None:
        super().__init__()
        self.cohorts: list[list[int]] = []

    def round(self, server: Server) -> Rounds:
        self.cohorts.append(server.cohort)
        yield from super().round(server)


@pytest.mark.parametrize("seeded", [True, False])
def test_two_runs_of_one_seed_ask_other_cohorts_unless_it_is_a_studys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeded: bool
) -> None:
    """2 of 4 clients, 12 rounds: two runs draw alike once in 6^12 times. The loader has the server's cohorts."""
    monkeypatch.chdir(tmp_path)
    found: list[Any] = []
    for drive in (fit, fit, federated):
        algorithm, mechanism = Watched(), CentralNoise(0.5, 1.0, noise_seed=1 if seeded else None)
        data = federation(clients_per_round=2)
        if drive is fit:
            fit(Regression(), data, rounds=12, algorithm=algorithm, mechanism=mechanism)
            assert [data.cohort(number) for number in range(12)] == algorithm.cohorts
        else:
            drive(Regression().double(), data, algorithm, mechanism=mechanism).run(12)
        found.append(algorithm.cohorts)
    assert [len(cohort) for cohort in found[0]] == [2] * 12
    assert (found[0] == found[1] == found[2]) == seeded
    assert seeded or len({str(each) for each in found}) == 3
