"""What a run that goes on states and keeps: all that it has released before counts, and no noise is used again."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lit_epgan.privacy import CentralNoise, CorrelatedNoise, Ledger, RecordNoise, Releases, spent
from tests.test_central_noise import begun, summed
from tests.test_record_noise import plan


@pytest.mark.parametrize("kind", [CentralNoise, CorrelatedNoise])
def test_a_resumed_run_with_a_seed_does_not_use_its_first_rounds_noise_again(kind: type[CentralNoise]) -> None:
    """Each round has noise of its own, each exchange of it too, and is the same in whichever process it runs."""

    def noise(mechanism: CentralNoise, number: int, exchanges: int = 1) -> list[list[float]]:
        mechanism.round_begins(number)
        return [mechanism.at_server(summed({"x": torch.zeros(9)}), 1)["x"].tolist() for _ in range(exchanges)]

    whole = begun(kind(1.0, 1.0, noise_seed=3), 4, rounds=range(3))
    (first,), (second, again), (third,) = (noise(whole, number, 1 + (number == 1)) for number in range(3))
    (resumed,) = noise(begun(kind(1.0, 1.0, noise_seed=3), 1, rounds=range(2, 3)), 2)
    assert resumed == third
    assert len({tuple(each) for each in (first, second, again, third)}) == 4


def test_a_resumed_run_keeps_its_noise_and_pays_for_both(tmp_path: Path) -> None:
    first = begun(CentralNoise(1.0, target_epsilon=2.0), 10, folder=tmp_path)
    for _ in range(4):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    before = Ledger(tmp_path / "privacy.jsonl").read()
    resumed = begun(CentralNoise(1.0, target_epsilon=2.0), 7, folder=tmp_path, resumed=True)  # the fourth round is lost
    (account,) = Ledger(tmp_path / "privacy.jsonl").read().accounts.values()
    assert account.planned.noise_multiplier == next(iter(before.accounts.values())).planned.noise_multiplier
    assert (account.made, account.planned.count) == (4, 11)
    assert str(spent([account.planned], 1e-5)) in str(resumed.guarantee())


def test_a_run_that_goes_on_beyond_its_target_warns(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """z was settled for ten rounds, and twenty cost more: epsilon of a Gaussian with z / sqrt(20)."""
    asked: dict[str, Any] = {"folder": tmp_path, "rounds": range(10)}
    first = begun(CentralNoise(1.0, target_epsilon=2.0), 10, **asked)
    for _ in range(10):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    begun(CentralNoise(1.0, target_epsilon=2.0), 0, **(asked | {"resumed": True, "rounds": range(0)}))
    assert not recwarn.list
    assert first._planned is not None
    price = spent([first._planned.times(20)], 1e-5)
    with pytest.warns(UserWarning, match=rf"CentralNoise.*epsilon {price.epsilon:.3g}.*target_epsilon 2 "):
        begun(CentralNoise(1.0, target_epsilon=2.0), 10, **(asked | {"resumed": True, "rounds": range(10, 20)}))


def test_a_run_resumed_with_other_noise_still_promises_what_it_has_spent_before(tmp_path: Path) -> None:
    """Nine rounds at z = 0.5 and one at z = 50 cost what the ledger says; a run that begins anew has no past."""
    first = begun(CentralNoise(1.0, 0.5), 10, folder=tmp_path)
    for _ in range(9):
        first.at_server(summed({"x": torch.zeros(2)}), 1)
    resumed = begun(CentralNoise(1.0, 50.0), 1, folder=tmp_path, resumed=True)
    price = spent([Releases(0.5, 9), Releases(50.0, 1)], 1e-5)
    assert Ledger(tmp_path / "privacy.jsonl").read().total().epsilon == pytest.approx(price.epsilon)
    assert str(price) in str(resumed.guarantee())
    assert "9 releases with noise multiplier 0.5, all users take part and one release with" in str(resumed.guarantee())
    anew = begun(CentralNoise(1.0, 50.0), 1, folder=tmp_path)
    assert str(spent([Releases(50.0, 1)], 1e-5)) in str(anew.guarantee())


@pytest.mark.parametrize(("z", "batch_size"), [(2.0, 10), (20.0, 10), (2.0, 20)])
def test_a_resumed_run_promises_what_it_has_spent_before_too(tmp_path: Path, z: float, batch_size: int) -> None:
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
    assert Ledger(tmp_path / "privacy.jsonl").read().total().epsilon == pytest.approx(price.epsilon)
    assert f"({price.epsilon:.3g}, 1e-05)" in str(resumed.guarantee())


def test_a_run_whose_clients_go_on_beyond_its_target_warns(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    first = RecordNoise(1.0, target_epsilon=2.0)
    first.begin(plan({0: 100}, 10, {0: 10}, 5, folder=tmp_path))
    for round_ in range(5):
        first._pay(round_)
    assert not recwarn.list
    resumed = RecordNoise(1.0, target_epsilon=2.0)
    with pytest.warns(UserWarning, match=r"RecordNoise.*epsilon 2\.[5-9].*target_epsilon 2 "):
        resumed.begin(plan({0: 100}, 10, {0: 10}, 5, folder=tmp_path, resumed=True))
    assert 2.5 < float(str(resumed.own_epsilon())) < 3


def test_a_client_who_takes_part_no_more_may_pay_most(tmp_path: Path) -> None:
    first = RecordNoise(1.0, 2.0)
    first.begin(plan({0: 100, 1: 40}, 10, {0: 10, 1: 4}, 1, folder=tmp_path))
    first._pay(0)
    resumed = RecordNoise(1.0, 2.0)
    resumed.begin(plan({1: 40}, 10, {1: 1}, 1, folder=tmp_path, resumed=True))
    most = max(
        (spent([Releases(2.0, n, "poisson", q, unit="record")], 1e-5) for n, q in ((10, 0.1), (5, 0.25))),
        key=lambda each: each.epsilon,
    )
    assert resumed.own_epsilon() == pytest.approx(most.epsilon)
