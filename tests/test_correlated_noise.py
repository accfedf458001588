"""Noise that later rounds take back: what is added, what a client pays, and what a run that resumes must not reuse."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evidence.correlated_noise import toeplitz
from lit_epgan.engine import Everyone, FixedSize, InTurn, Poisson
from lit_epgan.engine.aggregation import Total
from lit_epgan.engine.mechanisms import Plan
from lit_epgan.engine.messages import Report
from lit_epgan.engine.samplers import Chains
from lit_epgan.federated import ExpectationPropagation
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise, CorrelatedNoise, Ledger, Releases, spent
from lit_epgan.privacy.correlated import BackSubstitution, banded, prefix_deviations, sensitivity, square_root
from lit_epgan.privacy.ledger import Account, default_path
from tests.federations import federation, fit
from tests.ledgers import the_ledger
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_central_noise import summed

ZERO: Report = {"x": torch.zeros(2)}


def begun(mechanism, sampler, rounds, folder=None, **more):
    exchanges, data = len(rounds) + more.pop("beside", 0), folder and folder.name
    mechanism.begin(Plan(sampler, 12, exchanges, folder, rounds=rounds, data=data, **more))
    return mechanism


def released(mechanism: CentralNoise, number: int, report: Report = ZERO) -> Total:
    mechanism.round_begins(number)
    return mechanism.at_server(summed(report), 4)


def accounts(folder) -> list[Account]:
    own = default_path(folder.name, "user")  # of a plan that names the data so, or a fit's
    return list((Ledger(own) if own.exists() else the_ledger()).read().accounts.values())


def account(folder) -> Account:
    return accounts(folder)[-1]


@pytest.mark.parametrize("seed", [None, 1])
def test_c_makes_white_noise_of_it(seed):
    """C W / (z S) has the identity for a covariance, over more rounds than C has bands; counts have no noise."""
    d, rounds = 40_000, 7
    mechanism = begun(CorrelatedNoise(0.5, 3.0, noise_seed=seed), InTurn(3), range(rounds))
    rows = torch.stack([released(mechanism, t, {"x": torch.zeros(d)})["x"] for t in range(rounds)])
    white = toeplitz(banded(3), rounds) @ rows / 1.5
    torch.testing.assert_close(white @ white.T / d, torch.eye(rounds, dtype=torch.float64), rtol=0, atol=0.03)
    correlation = float(torch.corrcoef(rows[:2])[0, 1])
    assert correlation < -0.3  # the second round takes back a part of the first one's


def test_where_all_take_part_in_every_round_it_is_central_noise():
    runs = []
    for kind in (CorrelatedNoise, CentralNoise):
        mechanism = begun(kind(1.0, 2.0, noise_seed=1), Everyone(), range(3))
        runs.append(torch.stack([released(mechanism, t)["x"] for t in range(3)]))
        assert mechanism.spent() == spent([Releases(2.0, 3)], 1e-5)
    assert torch.equal(*runs)


def test_what_is_promised_says_what_correlation_is_worth():
    mechanism = begun(CorrelatedNoise(0.5, 3.0), InTurn(4), range(40))
    said = str(mechanism.guarantee())
    assert "10 participations with noise multiplier 3, each user at most once in 4 rounds" in said
    assert "noise correlated over 4 rounds: on the sum of 40 rounds" in said
    assert "secret" not in said
    dense = torch.ones(40, dtype=torch.float64) @ torch.linalg.inv(toeplitz(banded(4), 40))
    assert f"is {1.5 * float(dense.norm()):.4g}, where independent noise has {1.5 * 40**0.5:.4g}" in said
    assert "independent in every round" in str(begun(CorrelatedNoise(1.0, 1.0), Everyone(), range(3)).guarantee())


@pytest.mark.parametrize("missing", ["a round", "a name"])
def test_a_gap_begins_the_noise_anew(missing):
    """What is not released in between leaves rows of C without a place."""
    zero = {"x": torch.zeros(40_000)}
    mechanism = begun(CorrelatedNoise(1.0, 1.0), InTurn(3), range(9))
    before = released(mechanism, 0, zero)["x"]
    if missing == "a name":
        released(mechanism, 1, {"other": torch.zeros(2)})
    after = released(mechanism, 2, zero)["x"]
    assert abs(float(torch.corrcoef(torch.stack([before, after]))[0, 1])) < 0.03


def test_a_payment_covers_one_turn_of_everybody(tmp_path):
    mechanism = begun(CorrelatedNoise(1.0, target_epsilon=2.0), InTurn(3), range(7), tmp_path)
    for t in range(7):
        released(mechanism, t)
        assert account(tmp_path).made == t // 3 + 1
    assert account(tmp_path).planned.count == 3
    assert mechanism.spent().epsilon == pytest.approx(2.0, rel=2e-3)
    mechanism.end()
    assert account(tmp_path).releases.count == 3


def test_a_run_that_resumes_keeps_its_noise_multiplier_and_pays_for_nothing_twice(tmp_path):
    state: dict[str, torch.Tensor] = {}
    first = begun(CorrelatedNoise(1.0, target_epsilon=2.0, budget=2.0), InTurn(3), range(9), tmp_path, state=state)
    for t in range(4):
        released(first, t)
    z = account(tmp_path).planned.noise_multiplier
    second = CorrelatedNoise(1.0, target_epsilon=2.0, budget=2.0)
    begun(second, InTurn(3), range(4, 9), tmp_path, state=dict(state), resumed=True)
    for t in range(4, 9):
        released(second, t)
    assert (account(tmp_path).made, account(tmp_path).planned.count) == (3, 3)
    assert account(tmp_path).planned.noise_multiplier == z
    lost = CorrelatedNoise(1.0, target_epsilon=2.0, budget=2.0)
    assert_refused("allows epsilon 2", begun, lost, InTurn(3), range(4, 9), tmp_path, state=dict(state), resumed=True)


HISTORIES = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=4)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=HISTORIES, groups=st.integers(1, 4), twice=st.booleans())
@example(kills=[(2, 0, False), (1, 1, False)], groups=4, twice=False)  # round 1 again, from the checkpoint before it
def test_whatever_is_killed_and_resumed_no_client_takes_part_more_often_than_was_paid_for(
    tmp_path_factory, kills, groups, twice
):
    """Each fit runs for some rounds, and goes on from any checkpoint that was written, or is refused noise."""
    folder, sampler, part = tmp_path_factory.mktemp("run"), InTurn(groups), Counter[int]()
    checkpoints: list[tuple[int, dict[str, torch.Tensor]]] = [(0, {})]
    lost = False
    for runs, back, unwritten in [*kills, (9, 0, False)]:
        start, saved = checkpoints[max(0, len(checkpoints) - 1 - back)]
        lost |= back > 0 and start != checkpoints[-1][0]
        del checkpoints[max(1, len(checkpoints) - back) :]
        state, rounds = dict(saved), range(start, 9)
        mechanism = CorrelatedNoise(1.0, 1.0)
        begun(mechanism, sampler, rounds, folder, state=state, resumed=start > 0, beside=int(twice and start == 0))
        for t in rounds[:runs]:
            for _ in range(1 + int(twice and t == 0)):
                released(mechanism, t)
                part.update(k for chain in sampler.draw(list(range(12)), 0, t) for k in chain)
                assert max(part.values()) <= sum(a.made for a in accounts(folder))
            if not unwritten:
                checkpoints.append((t + 1, dict(state)))
        lost |= unwritten and runs > 0
    made = sum(a.made for a in accounts(folder))
    if not lost and not twice:
        assert made == math.ceil(9 / groups)
    assert all(a.made <= a.planned.count for a in accounts(folder))


def test_a_checkpoint_holds_no_noise_and_a_run_that_resumes_reuses_none(tmp_path):
    """A repeated round's noise is independent of what was released before, so that no difference is free of noise."""
    state: dict[str, torch.Tensor] = {}
    zero = {"x": torch.zeros(40_000)}
    first = begun(CorrelatedNoise(1.0, 1.0), InTurn(3), range(6), tmp_path, state=state)
    rows = [released(first, 0, zero)["x"]]
    saved = dict(state)
    rows.append(released(first, 1, zero)["x"])
    assert sum(value.numel() for value in saved.values() if value.is_floating_point()) == 3
    second = begun(CorrelatedNoise(1.0, 1.0), InTurn(3), range(1, 6), tmp_path, state=saved, resumed=True)
    rows += [released(second, t, zero)["x"] for t in (1, 2)]
    between = torch.corrcoef(torch.stack(rows))[:2, 2:]
    assert float(between.abs().max()) < 0.03
    assert account(tmp_path).made == 2


def test_a_checkpoint_of_another_account_counts_for_nothing(tmp_path):
    """As many entries in it are no sign that no round was lost."""
    state: dict[str, torch.Tensor] = {}
    released(begun(CorrelatedNoise(1.0, 1.0), InTurn(3), range(6), tmp_path, state=state), 0)
    saved = dict(state)
    for _ in range(2):
        other = begun(CorrelatedNoise(1.0, 2.0), InTurn(3), range(1, 6), tmp_path, state=dict(saved), resumed=True)
        released(other, 1)
    assert (account(tmp_path).made, account(tmp_path).written) == (2, 2)


def test_a_run_that_resumes_with_another_number_of_clients_pays_anew(tmp_path):
    """Other groups: a client may take part again within the rounds that were paid for."""
    state: dict[str, torch.Tensor] = {}
    released(begun(CorrelatedNoise(1.0, 1.0), InTurn(3), range(6), tmp_path, state=state), 0)
    mechanism = CorrelatedNoise(1.0, 1.0)
    mechanism.begin(Plan(InTurn(3), 11, 5, tmp_path, True, state, range(1, 6), data=tmp_path.name))
    released(mechanism, 1)
    assert [a.made for a in the_ledger().read().accounts.values()] == [1, 1]


def test_a_federation_in_turn(tmp_path):
    fit(
        Regression(), federation(), 5, tmp_path, mechanism=CorrelatedNoise(1.0, 1.0), sampler=InTurn(2)
    )  # rounds 0, 2, 4 and 1, 3
    made = account(tmp_path)
    assert (made.made, made.written, made.planned.count, made.planned.separation, made.ended) == (3, 5, 3, 2, True)


def test_a_run_that_was_stopped_goes_on_from_its_checkpoint(tmp_path):
    """The payment that it made covers rounds 0 to 3; whoever goes on from the same checkpoint again pays again."""
    run = {"sampler": InTurn(4), "folder": tmp_path}
    trainer = fit(Regression(), federation(), 2, mechanism=CorrelatedNoise(1.0, 1.0), **run)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    for made, written in ((2, 6), (3, 10)):
        run["ckpt_path"] = tmp_path / "two.ckpt"
        fit(Regression(), federation(), 6, mechanism=CorrelatedNoise(1.0, 1.0), **run)
        assert (account(tmp_path).made, account(tmp_path).written) == (made, written)
        assert account(tmp_path).planned.count == made


def test_a_second_exchange_in_a_round_is_planned_and_paid(tmp_path):
    noise = CorrelatedNoise(1.0, 1e-9)
    fit(Regression(), federation(), 3, tmp_path, algorithm=ExpectationPropagation(), mechanism=noise, sampler=InTurn(4))
    assert (account(tmp_path).made, account(tmp_path).written, account(tmp_path).planned.count) == (2, 4, 2)


@pytest.mark.parametrize("sampler", [FixedSize(3), Poisson(0.5), Chains(2)], ids=lambda s: type(s).__name__)
def test_samplers_without_a_promise_are_refused_by_name(sampler):
    assert_refused(f"{type(sampler).__name__} promises nothing", begun, CorrelatedNoise(1.0, 1.0), sampler, range(3))


def test_more_bands_than_rounds_between_two_participations_are_refused():
    with pytest.raises(UserError, match="bands is 3, and under InTurn a client may take part again after 2 rounds"):
        begun(CorrelatedNoise(1.0, 1.0, bands=3), InTurn(2), range(3))
    assert_refused("bands is 0", CorrelatedNoise, 1.0, 1.0, bands=0)
    assert_refused("for clients in turn there is CorrelatedNoise", begun, CentralNoise(1.0, 1.0), InTurn(2), range(3))


def patterns(rounds: int, separation: int, most: int) -> list[tuple[int, ...]]:
    """All sets of at most so many rounds that are at least ``separation`` apart."""
    every = itertools.chain.from_iterable(itertools.combinations(range(rounds), k) for k in range(1, most + 1))
    return [p for p in every if all(b - a >= separation for a, b in itertools.pairwise(p))]


def farthest(matrix: torch.Tensor, pattern: tuple[int, ...]) -> float:
    """How far a user moves C X, by all signs of what it adds in each round of the pattern."""
    signs = torch.tensor(list(itertools.product([1.0, -1.0], repeat=len(pattern))), dtype=torch.float64)
    return float((signs @ matrix[:, list(pattern)].T).norm(dim=1).max())


def test_correlation_helps_where_clients_take_turns_by_the_square_root():
    root = toeplitz(square_root(30), 30)
    torch.testing.assert_close(root @ root, torch.ones(30, 30, dtype=torch.float64).tril(), rtol=0, atol=1e-13)

    # at equal epsilon: the final model's noise times how far one client moves it
    def error(bands: int, separation: int, rounds: int = 80) -> float:
        moved = sensitivity(toeplitz(banded(bands), rounds), separation)
        return moved * float(prefix_deviations(banded(bands), rounds)[-1])

    assert error(1, 1) == pytest.approx(80)
    assert all(error(bands, 1) > 80 for bands in (2, 8, 80))
    assert error(8, 8) < 0.45 * error(1, 8)
    # what a separation is needed for
    assert sensitivity(toeplitz(banded(4), 12), 3) > 1.05 * sensitivity(toeplitz(banded(3), 12), 3)


@pytest.mark.parametrize(("separation", "bands"), [(1, 1), (1, 4), (2, 2), (3, 2), (3, 3), (3, 9), (4, 4)])
def test_no_participation_moves_more_than_the_schedule(separation, bands):
    """Brute force: any rounds at least so far apart, any signs."""
    matrix = toeplitz(banded(bands), 9)
    worst = max(farthest(matrix, p) for p in patterns(9, separation, math.ceil(9 / separation)))
    assert sensitivity(matrix, separation) == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("separation", "bands"), [(1, 1), (3, 3), (5, 3)])
def test_a_participation_costs_as_much_as_one_release_with_independent_noise(separation, bands):
    """At most k of them, at least as far apart as C has bands: sqrt(k), and no more wherever they lie."""
    matrix = toeplitz(banded(bands), 9)
    for most in (1, 2, 9 // separation):
        moved = [farthest(matrix, p) for p in patterns(9, separation, most)]
        assert max(moved) <= most**0.5 * (1 + 1e-12)
    assert max(farthest(matrix, p) for p in patterns(9, separation, 1)) == pytest.approx(1)


@pytest.mark.parametrize("bands", [1, 2, 5, 40])
def test_back_substitution_solves_the_triangular_system(bands):
    draws = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    row = BackSubstitution(banded(bands))
    solved = torch.linalg.solve_triangular(toeplitz(banded(bands), 20), draws, upper=False)
    torch.testing.assert_close(torch.stack([row(draw) for draw in draws]), solved, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bands", [1, 3, 12])
def test_deviations_of_prefix_sums(bands):
    dense = torch.ones(12, 12, dtype=torch.float64).tril() @ torch.linalg.inv(toeplitz(banded(bands), 12))
    torch.testing.assert_close(prefix_deviations(banded(bands), 12), dense.norm(dim=1))
