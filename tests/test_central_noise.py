"""Noise on the sum of clipped reports: how much, how often, and what one client can move at most."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lit_epgan.engine import Everyone, FixedSize, Poisson
from lit_epgan.engine.aggregation import Combination
from lit_epgan.engine.mechanisms import Plan, flat_norm
from lit_epgan.engine.messages import Count, Report, Total, Weighted
from lit_epgan.engine.samplers import Chains, Sampler
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg
from lit_epgan.privacy import AdaptiveNoise, CentralNoise, DistributedNoise, Ledger, Releases, spent

NUMBERS = st.one_of(
    st.floats(-1e3, 1e3), st.sampled_from([0.0, 1e38, -1e38, float("nan"), float("inf"), -float("inf"), 1e-45])
)


def begun(mechanism: CentralNoise, exchanges: int = 1, sampler: Sampler | None = None, **more: Any) -> CentralNoise:
    mechanism.begin(Plan(sampler if sampler is not None else Everyone(), 100, exchanges, **more))
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
def test_no_report_moves_a_sum_by_more_than_the_bound(change, factor, weight, bound) -> None:
    """Huge, sparse, not finite, heavy: the report of an honest client's mechanism has weight 1 and a norm of S."""
    report = {
        "parameters": Weighted(torch.tensor(change), weight),
        "site": torch.tensor(factor, dtype=torch.float64),
        "weight": Count(weight, True),
    }
    bounded = CentralNoise(bound, 1.0).at_client(report, {})
    assert float(flat_norm(bounded)) <= bound * (1 + 1e-6)
    total = summed(bounded)
    moved = math.hypot(*(float(total[name].norm()) for name in ("parameters", "site")))
    assert moved <= bound * (1 + 1e-6)
    assert float(total["weight"]) in (0.0, 1.0)


def test_what_is_smaller_stays_as_it_is() -> None:
    report = {"parameters": Weighted(torch.tensor([0.3, 0.4]), 7.0), "weight": Count(7.0, True)}
    bounded = CentralNoise(0.6, 1.0).at_client(report, {})
    assert bounded["parameters"].tensor.tolist() == report["parameters"].tensor.tolist()
    assert bounded["weight"] == Count(1.0, True)


def test_the_noise_is_as_large_as_it_is_said_to_be() -> None:
    """z S on every coordinate of the sum, whatever the cohort; counts have none."""
    mechanism = begun(CentralNoise(0.5, 3.0))
    total = summed(*({"parameters": Weighted(torch.zeros(200_000)), "weight": Count(1.0, True)} for _ in range(4)))
    noised = mechanism.at_server(total, 4)
    assert float(noised["parameters"].std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(noised["parameters"].mean())) < 0.02
    assert float(noised["weight"]) == 4
    again = mechanism.at_server(summed({"parameters": Weighted(torch.zeros(200_000))}), 4)["parameters"]
    assert abs(float(torch.corrcoef(torch.stack([again, noised["parameters"]]))[0, 1])) < 0.02


def test_noise_with_a_seed_repeats_and_says_so() -> None:
    first, second = (
        begun(CentralNoise(1.0, 1.0, noise_seed=3)).at_server(summed({"x": torch.zeros(9)}), 1)["x"] for _ in range(2)
    )
    assert torch.equal(first, second)
    assert "whoever knows noise_seed can take it off" in str(begun(CentralNoise(1.0, 1.0, noise_seed=3)).guarantee())


def test_all_that_is_planned_is_promised_and_what_is_made_is_counted() -> None:
    mechanism = begun(CentralNoise(1.0, 4.0), 10, FixedSize(10))
    planned = Releases(4.0, 10, "fixed", 0.1, 100)
    assert str(spent([planned], 1e-5)) in str(mechanism.guarantee())
    assert mechanism.spent().epsilon == 0
    for number in range(3):
        mechanism.round_begins(number)
        mechanism.at_server(summed({"x": torch.zeros(2)}), 10)
    assert mechanism.spent().epsilon == spent([planned.times(3)], 1e-5).epsilon


def test_the_noise_multiplier_follows_from_a_target() -> None:
    mechanism = begun(CentralNoise(1.0, target_epsilon=2.0), 20)
    noised = mechanism.at_server(summed({"x": torch.zeros(100_000)}), 1)["x"]
    z = float(noised.std())
    assert spent([Releases(z, 20)], 1e-5).epsilon == pytest.approx(2.0, rel=0.03)


def test_how_many_coins_said_yes_is_not_given_away() -> None:
    mechanism = begun(CentralNoise(1.0, 1.0), 1, Poisson(0.3))
    report = {"parameters": Weighted(torch.ones(2)), "weight": Count(1.0, True)}
    assert float(mechanism.at_server(summed(report, report), 2)["weight"]) == pytest.approx(30)
    mechanism.round_begins(1)
    with pytest.raises(UserError, match="counts 'known' among those who take part"):
        mechanism.at_server(summed(report, {**report, "known": Count(1.0)}), 2)
    with pytest.raises(UserError, match="too often"):
        begun(CentralNoise(1.0, 1.0), 1, Poisson(0.01))


def test_cohorts_that_nobody_can_account_for_are_refused() -> None:
    with pytest.raises(UserError, match="Chains have no accountant"):
        begun(CentralNoise(1.0, 1.0), 1, Chains(2))


def test_a_client_of_a_random_cohort_that_does_not_answer_ends_nothing() -> None:
    """Counts are of those who answered: two of three, where the expected number, 30, is told for both."""
    mechanism = begun(CentralNoise(1.0, 1.0), 1, Poisson(0.3))
    report = {"parameters": torch.ones(2), "weight": Count(1.0, True), "federation/weight": Count(1.0, True)}
    total = mechanism.at_server(summed(report, report), 3)
    assert (float(total["weight"]), float(total["federation/weight"])) == (pytest.approx(30), pytest.approx(30))
    mechanism.round_begins(1)
    with pytest.raises(UserError, match="counts 'known' among those who take part"):
        mechanism.at_server(summed(report, {**report, "known": Count(1.0)}), 3)


@pytest.mark.parametrize("sampler", [FixedSize(10), Poisson(0.3)], ids=lambda s: type(s).__name__)
def test_a_drawn_cohort_is_asked_once_a_round(sampler: Sampler) -> None:
    """Amplification by sampling counts on a fresh draw for each exchange; whoever always takes part has none."""
    with pytest.raises(UserError, match="asks a drawn cohort more than once a round"):
        begun(CentralNoise(1.0, 1.0), 4, sampler, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 3, sampler, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 4, rounds=range(3))
    begun(CentralNoise(1.0, 1.0), 4, FixedSize(100), rounds=range(3))


def test_a_release_is_in_the_ledger_before_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = begun(CentralNoise(1.0, 1.0), 2, folder=tmp_path)
    monkeypatch.setattr("lit_epgan.privacy.central.secure_normal", lambda n: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        mechanism.at_server(summed({"x": torch.zeros(2)}), 1)
    (account,) = Ledger(tmp_path / "privacy.jsonl").read().accounts.values()
    assert (account.made, account.planned.count) == (1, 2)


def test_a_budget_without_a_ledger_is_refused() -> None:
    """Without a folder there is no file that could keep it."""
    with pytest.raises(UserError, match="budget needs a ledger: give CentralNoise ledger=FILE"):
        begun(CentralNoise(1.0, 4.0, budget=8.0))


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
def test_what_cannot_be_is_refused(settings, named) -> None:
    with pytest.raises(UserError, match=named):
        CentralNoise(**settings)


def test_a_report_in_half_precision_is_clipped_to_the_bound_and_not_above() -> None:
    mechanism = begun(CentralNoise(1.0, 1.0))
    report = {"x": torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()}
    sent = mechanism.at_client(report, {})["x"]
    assert float(sent.double().norm()) == pytest.approx(1.0, abs=1e-6)


# The clients' own noise -----------------------------------------------------------------------------------------------


def test_shares_of_the_noise_add_up() -> None:
    """Of 100 clients 50 are counted on; ten shares have a fifth of the variance of what fifty promise."""
    mechanism = begun(DistributedNoise(0.5, 3.0, honest=0.5))
    report = {"parameters": Weighted(torch.zeros(50_000)), "weight": Count(1.0, True)}
    sent = [mechanism.at_client(report, mechanism.broadcast()) for _ in range(50)]
    assert float(sent[0]["parameters"].tensor.std()) == pytest.approx(1.5 / 50**0.5, rel=0.02)
    total = mechanism.at_server(summed(*sent), 100)
    assert float(total["parameters"].std()) == pytest.approx(1.5, rel=0.02)
    assert float(total["weight"]) == 50
    with pytest.raises(UserError, match="only 49 of 100 clients have answered, and 50 shares"):
        mechanism.at_server(summed(*sent[:49]), 100)
    with pytest.raises(UserError, match="known size"):
        begun(DistributedNoise(0.5, 3.0), 1, Poisson(0.5))
    assert "for whoever sees sums only" in str(mechanism.guarantee())


def test_a_server_that_asks_for_less_noise_gets_nothing() -> None:
    """Of eight clients four are honest at least: a share's standard deviation is 3 * .5 / 2, as in a cohort of all."""
    mechanism = DistributedNoise(0.5, 3.0, honest=0.5)
    mechanism.around(SimpleNamespace(clients=8, module=None), FedAvg(), True)  # type: ignore[arg-type]
    report = {"x": torch.zeros(3)}
    for asked in (0.0, 0.74, float("nan")):
        with pytest.raises(UserError, match=r"a share in a cohort of all 8 clients is 0\.75: nothing is sent"):
            mechanism.at_client(report, {"privacy.honest": torch.tensor([asked])})
    mechanism.at_client(report, {"privacy.honest": torch.tensor([0.75])})


# A bound that moves ---------------------------------------------------------------------------------------------------


def test_the_bound_goes_to_the_quantile_of_the_norms() -> None:
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


def test_a_round_that_nobody_answers_tells_the_bound_noise_alone() -> None:
    state: dict[str, torch.Tensor] = {}
    mechanism = begun(AdaptiveNoise(1.0, 3.0, rate=0.2, noise_seed=0), state=state)
    assert not mechanism.at_server(Total(), 100).sums
    assert float(state["privacy.bound"]) == pytest.approx(1.0, rel=0.1)  # rate times noise of 5 on a count of 100
    assert float(state["privacy.bound"]) != 1


def test_both_noises_together_are_one_release() -> None:
    """(z_sum^-2 + (2 s_b)^-2)^(-1/2) = z, read off the noises themselves."""
    state = {"privacy.bound": torch.tensor([2.0], dtype=torch.float64)}
    mechanism = begun(AdaptiveNoise(1.0, 3.0, count_noise=2.0), state=state)
    assert float(mechanism.broadcast()["privacy.bound"]) == 2  # a resumed run's goes on
    deviation = mechanism.deviations(["x", "privacy/below"])
    noised = mechanism.at_server(summed({"x": torch.zeros(100_000), "privacy/below": torch.zeros(1)}), 100)["x"]
    assert float(noised.std()) == pytest.approx(deviation["x"], rel=0.02)
    assert ((deviation["x"] / 2) ** -2 + (deviation["privacy/below"] / 0.5) ** -2) ** -0.5 == pytest.approx(3.0)


def test_a_report_that_is_not_finite_is_above_the_bound() -> None:
    mechanism = begun(AdaptiveNoise(1.0, 3.0))
    sent = mechanism.at_client({"x": torch.tensor([float("nan"), 1.0])}, mechanism.broadcast())
    assert sent["x"].tolist() == [0, 0]
    assert sent["privacy/below"].tolist() == [-0.5]


def test_too_little_noise_on_the_count_is_refused() -> None:
    with pytest.raises(UserError, match="must be above half of that"):
        begun(AdaptiveNoise(1.0, 3.0, count_noise=1.0))
    for settings in ({"quantile": 1.0}, {"rate": 0.0}, {"count_noise": 0.0}):
        with pytest.raises(UserError, match="quantile, rate and count_noise"):
            AdaptiveNoise(1.0, 3.0, **settings)
    with pytest.raises(UserError, match="honest"):
        DistributedNoise(1.0, 3.0, honest=0.0)
    with pytest.raises(UserError, match="noise_seed"):
        DistributedNoise(1.0, 3.0, noise_seed=1)
