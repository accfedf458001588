"""Noise on the sum of clipped reports: how much, how often, and what one client can move at most."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lit_epgan.engine import Everyone, FixedSize, InTurn, Poisson, Rounds, Server
from lit_epgan.engine.mechanisms import NormClipping, Plan, flat_norm
from lit_epgan.engine.messages import Combination, Count, Report, Total, Weighted
from lit_epgan.engine.samplers import Chains, Sampler
from lit_epgan.federated import FedAvg
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import (
    AdaptiveNoise,
    CentralNoise,
    CorrelatedNoise,
    DistributedNoise,
    RecordNoise,
    Releases,
    spent,
)
from lit_epgan.privacy.central import SecretCohorts
from tests.federations import federation, fit
from tests.ledgers import paths, the_ledger
from tests.modules import Regression
from tests.plain_federation import federated
from tests.refusals import assert_refused
from tests.test_record_noise import plan

NUMBERS = st.one_of(
    st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e38, -1e38, float("nan"), float("inf"), -float("inf"), 1e-45])
)


def begun(mechanism: CentralNoise, exchanges: int = 1, sampler: Sampler | None = None, **more) -> CentralNoise:
    mechanism.begin(Plan(sampler if sampler is not None else Everyone(), 100, exchanges, **({"data": "data"} | more)))
    return mechanism


def summed(*reports: Report) -> Total:
    combination = Combination({}, None, torch.device("cpu"))
    for client, report in enumerate(reports):
        combination.add(client, report)
    return combination.close()


@given(
    st.lists(NUMBERS, min_size=1, max_size=20),
    st.lists(NUMBERS, min_size=1, max_size=5),
    st.floats(0, 1e6),
    st.floats(1e-3, 1e3),
)
@example([1e38], [0.0], 0.0, 1 / 64)  # by a factor of so few digits in single precision that it passed the bound
def test_no_report_moves_a_sum_by_more_than_the_bound(change, factor, weight, bound):
    """Huge, sparse, not finite, heavy: the report of an honest client's mechanism has weight 1 and a norm of S."""
    site = torch.tensor(factor, dtype=torch.float64)
    report = {"parameters": Weighted(torch.tensor(change), weight), "site": site, "weight": Count(weight, True)}
    bounded = CentralNoise(bound, 1.0).at_client(report, {})
    assert float(flat_norm(bounded)) <= bound * (1 + 1e-6)
    total = summed(bounded)
    moved = math.hypot(*(float(total[name].norm()) for name in ("parameters", "site")))
    assert moved <= bound * (1 + 1e-6)
    assert float(total["weight"]) in (0.0, 1.0)


def test_what_is_smaller_stays_and_half_precision_is_clipped_to_the_bound():
    report = {"parameters": Weighted(torch.tensor([0.3, 0.4]), 7.0), "weight": Count(7.0, True)}
    bounded = CentralNoise(0.6, 1.0).at_client(report, {})
    assert bounded["parameters"].tensor.tolist() == report["parameters"].tensor.tolist()
    assert bounded["weight"] == Count(1.0, True)
    mechanism = begun(CentralNoise(1.0, 1.0))
    report = {"x": torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    sent = mechanism.at_client(report, {})["x"]
    assert float(sent.double().norm()) == pytest.approx(1.0, abs=1e-6)


def test_the_noise_is_as_large_as_it_is_said_to_be():
    """z S on every coordinate of the sum, whatever the cohort; counts have none."""
    mechanism = begun(CentralNoise(0.5, 3.0))
    total = summed(*({"parameters": Weighted(torch.zeros(200_000)), "weight": Count(1.0, True)} for _ in range(4)))
    noised = mechanism.at_server(total, 4)
    assert float(noised["parameters"].std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(noised["parameters"].mean())) < 0.02
    assert float(noised["weight"]) == 4
    again = mechanism.at_server(summed({"parameters": Weighted(torch.zeros(200_000))}), 4)["parameters"]
    assert abs(float(torch.corrcoef(torch.stack([again, noised["parameters"]]))[0, 1])) < 0.02


def test_all_that_is_planned_is_promised_and_what_is_made_is_counted():
    mechanism = begun(CentralNoise(1.0, 4.0), 10, FixedSize(10))
    planned = Releases(4.0, 10, "fixed", 0.1, 100)
    assert str(spent([planned], 1e-5)) in str(mechanism.guarantee())
    assert mechanism.spent().epsilon == 0
    for number in range(3):
        mechanism.round_begins(number)
        mechanism.at_server(summed({"x": torch.zeros(2)}), 10)
    assert mechanism.spent().epsilon == spent([planned.times(3)], 1e-5).epsilon
    mechanism = CentralNoise(1.0, 4.0)
    promised = str(begun(mechanism, 10, mechanism.sampler(FixedSize(10))).guarantee())
    assert str(spent([Releases(4.0, 10, "fixed", 0.1, 100)], 1e-5)) in promised


def test_the_noise_multiplier_follows_from_a_target_and_noise_with_a_seed_repeats():
    mechanism = begun(CentralNoise(1.0, target_epsilon=2.0), 20)
    noised = mechanism.at_server(summed({"x": torch.zeros(100_000)}), 1)["x"]
    z = float(noised.std())
    assert spent([Releases(z, 20)], 1e-5).epsilon == pytest.approx(2.0, rel=0.03)
    first, second = (
        begun(CentralNoise(1.0, 1.0, noise_seed=3)).at_server(summed({"x": torch.zeros(9)}), 1)["x"] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert "whoever knows noise_seed can take it off" in str(begun(CentralNoise(1.0, 1.0, noise_seed=3)).guarantee())


def test_how_many_coins_said_yes_is_not_given_away():
    """Counts are of those who answered: two, or two of three, where the expected number, 30, is told for both."""
    mechanism = begun(CentralNoise(1.0, 1.0), 1, Poisson(0.3))
    report = {"parameters": torch.ones(2), "weight": Count(1.0, True), "federation/weight": Count(1.0, True)}
    for asked in (2, 3):
        total = mechanism.at_server(summed(report, report), asked)
        assert (float(total["weight"]), float(total["federation/weight"])) == (pytest.approx(30), pytest.approx(30))
        mechanism.round_begins(asked)
    assert_refused("too often", begun, CentralNoise(1.0, 1.0), 1, Poisson(0.01))
    assert_refused("Chains have no accountant", begun, CentralNoise(1.0, 1.0), 1, Chains(2))


@pytest.mark.parametrize("sampler", [FixedSize(10), Poisson(0.3)], ids=lambda s: type(s).__name__)
def test_a_drawn_cohort_is_asked_once_a_round(sampler):
    """Amplification by sampling counts on a fresh draw for each exchange; whoever always takes part has none."""
    with pytest.raises(UserError, match="asks a drawn cohort more than once a round"):
        begun(CentralNoise(1.0, 1.0), 4, sampler, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 3, sampler, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 4, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 4, FixedSize(100), rounds=range(3))


def test_a_release_is_in_the_ledger_before_it_is_made_and_a_budget_needs_one(tmp_path, monkeypatch):
    mechanism = begun(CentralNoise(1.0, 1.0), 2, folder=tmp_path)
    monkeypatch.setattr("lit_epgan.privacy.central.secure_normal", lambda n: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mechanism.at_server(summed({"x": torch.zeros(2)}), 1)
    (account,) = the_ledger().read().accounts.values()
    assert (account.made, account.planned.count) == (1, 2)
    # where nobody says which data these are, no file could keep it
    with pytest.raises(UserError, match="budget needs a ledger: give CentralNoise ledger=FILE"):
        begun(CentralNoise(1.0, 4.0, budget=8.0), data=None)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"bound": 0.0, "noise_multiplier": 1.0}, "bound"),
        ({"bound": 1.0}, "give one of them"),
        ({"bound": 1.0, "noise_multiplier": 1.0, "target_epsilon": 1.0}, "give one of them"),
        ({"bound": 1.0, "noise_multiplier": 0.0}, "noise_multiplier"),
        ({"bound": 1.0, "noise_multiplier": 1.0, "delta": 0.0}, "delta"),
        ({"bound": 1.0, "noise_multiplier": 1.0, "relation": "other"}, "relation"),
        ({"bound": 1.0, "noise_multiplier": 1.0, "budget": 0.0}, "budget"),
    ],
)
def test_what_cannot_be_is_refused(settings, named):
    assert_refused(named, CentralNoise, **settings)


def test_shares_of_the_noise_add_up():
    """Of 100 clients 50 are counted on; ten shares have a fifth of the variance of what fifty promise."""
    mechanism = begun(DistributedNoise(0.5, 3.0, honest=0.5))
    report = {"parameters": Weighted(torch.zeros(50_000)), "weight": Count(1.0, True)}
    sent = [mechanism.at_client(report, mechanism.broadcast()) for _ in range(50)]
    assert float(sent[0]["parameters"].tensor.std()) == pytest.approx(1.5 / 50**0.5, rel=0.02)
    total = mechanism.at_server(summed(*sent), 100)
    assert float(total["parameters"].std()) == pytest.approx(1.5, rel=0.02)
    assert float(total["weight"]) == 50
    assert_refused("only 49 of 100 clients have answered, and 50 shares", mechanism.at_server, summed(*sent[:49]), 100)
    assert_refused("known size", begun, DistributedNoise(0.5, 3.0), 1, Poisson(0.5))
    assert "for whoever sees sums only" in str(mechanism.guarantee())


def test_a_server_that_asks_for_less_noise_gets_nothing():
    """Of eight clients four are honest at least: a share's standard deviation is 3 * .5 / 2, as in a cohort of all."""
    mechanism = DistributedNoise(0.5, 3.0, honest=0.5)
    mechanism.around(SimpleNamespace(clients=8, module=None), FedAvg(), True)
    report = {"x": torch.zeros(3)}
    for asked in (0.0, 0.74, float("nan")):
        with pytest.raises(UserError, match=r"a share in a cohort of all 8 clients is 0\.75: nothing is sent"):
            mechanism.at_client(report, {"privacy.honest": torch.tensor([asked])})
    mechanism.at_client(report, {"privacy.honest": torch.tensor([0.75])})


def test_the_bound_goes_to_the_quantile_of_the_norms():
    """Norms are 1 to 100: from either side S comes to the median, and to the ninetieth."""
    reports = [{"x": torch.tensor([float(k)]), "weight": Count(1.0, True)} for k in range(1, 101)]
    for start, quantile in ((1.0, 0.5), (1000.0, 0.5), (10.0, 0.9)):
        state: dict[str, torch.Tensor] = {}
        mechanism = begun(AdaptiveNoise(start, 8.0, quantile=quantile, noise_seed=0), 60, state=state)
        for _ in range(60):
            sent = [mechanism.at_client(report, mechanism.broadcast()) for report in reports]
            total = mechanism.at_server(summed(*sent), 100)
        assert float(state["privacy.bound"]) == pytest.approx(100 * quantile, rel=0.15)
        assert set(total.sums) == {"x", "weight"}


def test_without_an_answer_or_a_finite_one_the_bound_stays():
    state: dict[str, torch.Tensor] = {}
    mechanism = begun(AdaptiveNoise(1.0, 3.0, rate=0.2, noise_seed=0), state=state)
    assert not mechanism.at_server(Total(), 100).sums
    assert float(state["privacy.bound"]) == pytest.approx(1.0, rel=0.1)  # rate times noise of 5 on a count of 100
    assert float(state["privacy.bound"]) != 1
    mechanism = begun(AdaptiveNoise(1.0, 3.0))
    sent = mechanism.at_client({"x": torch.tensor([float("nan"), 1.0])}, mechanism.broadcast())
    assert sent["x"].tolist() == [0, 0]
    assert sent["privacy/below"].tolist() == [-0.5]


def test_both_noises_together_are_one_release():
    """(z_sum^-2 + (2 s_b)^-2)^(-1/2) = z, read off the noises themselves."""
    state = {"privacy.bound": torch.tensor([2.0], dtype=torch.float64)}
    mechanism = begun(AdaptiveNoise(1.0, 3.0, count_noise=2.0), state=state)
    assert float(mechanism.broadcast()["privacy.bound"]) == 2  # a resumed run's goes on
    deviation = mechanism.deviations(["x", "privacy/below"])
    noised = mechanism.at_server(summed({"x": torch.zeros(100_000), "privacy/below": torch.zeros(1)}), 100)["x"]
    assert float(noised.std()) == pytest.approx(deviation["x"], rel=0.02)
    assert ((deviation["x"] / 2) ** -2 + (deviation["privacy/below"] / 0.5) ** -2) ** -0.5 == pytest.approx(3.0)


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_no_client_moves_both_sums_by_more_than_is_charged(bound):
    """Against its own data emptied by 1 / z, against any other data by 2 / z, each sum in units of its noise."""
    z, state = 3.0, {"privacy.bound": torch.tensor([bound], dtype=torch.float64)}
    mechanism = begun(AdaptiveNoise(1.0, z, count_noise=2.0), state=state)
    vectors = [a * torch.tensor(v) for v in ([3.0, 4.0], [-3.0, -4.0]) for a in (0, 1e-9, 0.1, 0.2, 1, 1e30, math.nan)]
    sent = [mechanism.at_client({"x": vector.double()}, mechanism.broadcast()) for vector in vectors]
    noise = mechanism.deviations(["x", "privacy/below"])

    def distance(one: Report, other: Report) -> float:
        return math.hypot(*(float((one[n] - other[n]).norm()) / noise[n] for n in ("x", "privacy/below")))

    assert max(distance(one, sent[0]) for one in sent) == pytest.approx(1 / z)
    assert max(distance(one, other) for one in sent for other in sent) <= 2 / z * (1 + 1e-9)


def test_too_little_noise_on_the_count_is_refused():
    assert_refused("must be above half of that", begun, AdaptiveNoise(1.0, 3.0, count_noise=1.0))
    assert not paths()  # nothing was booked
    for settings in ({"quantile": 1.0}, {"rate": 0.0}, {"count_noise": 0.0}):
        assert_refused(f"AdaptiveNoise's {next(iter(settings))} is", AdaptiveNoise, 1.0, 3.0, **settings)
    assert_refused("honest", DistributedNoise, 1.0, 3.0, honest=0.0)
    assert_refused("noise_seed", DistributedNoise, 1.0, 3.0, noise_seed=1)


CLIENTS, ROUNDS = list(range(100)), range(20)


def drawn(sampler: Sampler, seed: int = 0) -> list[list[list[int]]]:
    return [sampler.draw(CLIENTS, seed, number) for number in ROUNDS]


@pytest.mark.parametrize("of", [FixedSize(10), Poisson(0.1)], ids=lambda of: type(of).__name__)
def test_a_processs_draws_are_its_own_and_do_not_follow_from_the_seed(of):
    one, other = SecretCohorts(of), SecretCohorts(of)
    assert drawn(one, 0) == drawn(one, 1) != drawn(other, 0)
    assert drawn(one) != drawn(of)
    assert one.rate(100) == of.rate(100)
    assert drawn(SecretCohorts(of, 7)) == drawn(of, 7)


def test_a_cohort_of_the_wrapped_size_is_drawn_without_favour():
    """Each of a hundred is drawn in a tenth of 2,000 rounds: 200, with a standard deviation of 13."""
    sampler = SecretCohorts(FixedSize(10))
    cohorts = [[k for chain in sampler.draw(CLIENTS, 0, number) for k in chain] for number in range(2000)]
    assert {len(set(cohort)) for cohort in cohorts} == {10}
    times = [sum(k in cohort for cohort in cohorts) for k in CLIENTS]
    assert 200 - 6 * 13 < min(times) <= max(times) < 200 + 6 * 13


@pytest.mark.parametrize("kind", [CentralNoise, DistributedNoise])
def test_a_mechanism_whose_price_counts_on_the_draw_makes_it_secret(kind):
    mechanism = kind(1.0, 4.0)
    assert isinstance(mechanism.sampler(FixedSize(10)), SecretCohorts)
    assert isinstance(AdaptiveNoise(1.0, noise_multiplier=4.0).sampler(Poisson(0.1)), SecretCohorts)
    for open_ in (Everyone(), InTurn(4)):
        assert mechanism.sampler(open_) is open_
    seeded = FixedSize(10)
    assert CentralNoise(1.0, 4.0, noise_seed=1).sampler(seeded) is seeded
    assert CorrelatedNoise(1.0, 4.0).sampler(seeded) is seeded
    assert NormClipping(1.0).sampler(seeded) is seeded


class Watched(FedAvg):
    """Notes the server's cohorts."""

    def __init__(self) -> None:
        super().__init__()
        self.cohorts: list[list[int]] = []

    def round(self, server: Server) -> Rounds:
        self.cohorts.append(server.cohort)
        yield from super().round(server)


@pytest.mark.parametrize("seeded", [True, False])
def test_two_runs_of_one_seed_ask_other_cohorts_unless_it_is_a_studys(folder, seeded):
    """2 of 4 clients, 12 rounds: two runs draw alike once in 6^12 times. The loader has the server's cohorts."""
    found = []
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


@pytest.mark.parametrize("kind", [CentralNoise, CorrelatedNoise])
def test_a_resumed_run_with_a_seed_does_not_use_its_first_rounds_noise_again(kind):
    """Each round has noise of its own, each exchange of it too, and is the same in whichever process it runs."""

    def noise(mechanism: CentralNoise, number: int, exchanges: int = 1) -> list[list[float]]:
        mechanism.round_begins(number)
        return [mechanism.at_server(summed({"x": torch.zeros(9)}), 1)["x"].tolist() for _ in range(exchanges)]

    whole = begun(kind(1.0, 1.0, noise_seed=3), 4, rounds=range(3))
    (first,), (second, again), (third,) = (noise(whole, number, 1 + (number == 1)) for number in range(3))
    (resumed,) = noise(begun(kind(1.0, 1.0, noise_seed=3), 1, rounds=range(2, 3)), 2)
    assert resumed == third
    assert len({tuple(each) for each in (first, second, again, third)}) == 4


def test_a_resumed_run_keeps_its_noise_and_pays_for_both(tmp_path):
    first = begun(CentralNoise(1.0, target_epsilon=2.0), 10, folder=tmp_path)
    for _ in range(4):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    before = the_ledger().read()
    resumed = begun(CentralNoise(1.0, target_epsilon=2.0), 7, folder=tmp_path, resumed=True)  # the fourth round is lost
    (account,) = the_ledger().read().accounts.values()
    assert account.planned.noise_multiplier == next(iter(before.accounts.values())).planned.noise_multiplier
    assert (account.made, account.planned.count) == (4, 11)
    assert str(spent([account.planned], 1e-5)) in str(resumed.guarantee())


def test_a_run_that_goes_on_beyond_its_target_warns(tmp_path, recwarn):
    """z was settled for ten rounds, and twenty cost more: epsilon of a Gaussian with z / sqrt(20)."""
    asked = {"folder": tmp_path, "rounds": range(10)}
    first = begun(CentralNoise(1.0, target_epsilon=2.0), 10, **asked)
    for _ in range(10):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    begun(CentralNoise(1.0, target_epsilon=2.0), 0, **(asked | {"resumed": True, "rounds": range(0)}))
    assert not recwarn.list
    price = spent([first._planned.times(20)], 1e-5)
    with pytest.warns(UserWarning, match=rf"CentralNoise.*epsilon {price.epsilon:.3g}.*target_epsilon 2 "):
        begun(CentralNoise(1.0, target_epsilon=2.0), 10, **(asked | {"resumed": True, "rounds": range(10, 20)}))


def test_a_run_resumed_with_other_noise_still_promises_what_it_has_spent_before(tmp_path):
    """Nine rounds at z = 0.5 and one at z = 50 cost what the ledger says; a run that begins anew has no past."""
    first = begun(CentralNoise(1.0, 0.5), 10, folder=tmp_path)
    for _ in range(9):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    resumed = begun(CentralNoise(1.0, 50.0), 1, folder=tmp_path, resumed=True)
    price = spent([Releases(0.5, 9), Releases(50.0, 1)], 1e-5)
    assert the_ledger().read().total().epsilon == pytest.approx(price.epsilon)
    assert str(price) in str(resumed.guarantee())
    assert "9 releases with noise multiplier 0.5, all users take part and one release with" in str(resumed.guarantee())
    anew = begun(CentralNoise(1.0, 50.0), 1, folder=tmp_path)
    assert str(spent([Releases(50.0, 1)], 1e-5)) in str(anew.guarantee())


@pytest.mark.parametrize(("z", "batch_size"), [(2.0, 10), (20.0, 10), (2.0, 20)])
def test_a_resumed_run_promises_what_it_has_spent_before_too(tmp_path, z, batch_size):
    """Nine of ten rounds are done; the last has the same kind of steps, other noise, or other batches."""
    first = RecordNoise(1.0, 2.0)
    first.begin(plan({0: 100, 1: 40}, 10, {0: 10, 1: 1}, 10, folder=tmp_path))
    for round_ in range(9):
        first._pay(round_)
    resumed = RecordNoise(1.0, z)
    resumed.begin(plan({0: 100, 1: 40}, batch_size, {0: 10, 1: 1}, 1, folder=tmp_path, resumed=True))
    old = Releases(2.0, 90, "poisson", 0.1, unit="record")
    price = spent([old, Releases(z, 10, "poisson", batch_size / 100, unit="record")], 1e-5)
    assert resumed.own_epsilon() == pytest.approx(price.epsilon)
    assert the_ledger().read().total().epsilon == pytest.approx(price.epsilon)
    assert f"({price.epsilon:.3g}, 1e-05)" in str(resumed.guarantee())


def test_a_run_whose_clients_go_on_beyond_its_target_warns(tmp_path, recwarn):
    first = RecordNoise(1.0, target_epsilon=2.0)
    first.begin(plan({0: 100}, 10, {0: 10}, 5, folder=tmp_path))
    for round_ in range(5):
        first._pay(round_)
    assert not recwarn.list
    resumed = RecordNoise(1.0, target_epsilon=2.0)
    with pytest.warns(UserWarning, match=r"RecordNoise.*epsilon 2\.[5-9].*target_epsilon 2 "):
        resumed.begin(plan({0: 100}, 10, {0: 10}, 5, folder=tmp_path, resumed=True))
    assert 2.5 < float(str(resumed.own_epsilon())) < 3


def test_a_client_who_takes_part_no_more_may_pay_most(tmp_path):
    first = RecordNoise(1.0, 2.0)
    first.begin(plan({0: 100, 1: 40}, 10, {0: 10, 1: 4}, 1, folder=tmp_path))
    first._pay(0)
    resumed = RecordNoise(1.0, 2.0)
    resumed.begin(plan({1: 40}, 10, {1: 1}, 1, folder=tmp_path, resumed=True))
    kinds = [Releases(2.0, n, "poisson", q, unit="record") for n, q in ((10, 0.1), (5, 0.25))]
    most = max((spent([kind], 1e-5) for kind in kinds), key=lambda each: each.epsilon)
    assert resumed.own_epsilon() == pytest.approx(most.epsilon)
