"""What a release costs beside its noise: an epsilon and a delta of its own, added to the others'."""

import math
from pathlib import Path

import pytest

from lit_epgan.errors import UserError
from lit_epgan.privacy import Ledger, Releases, noise_multiplier_for, spent

SELECTION, VOTE = Releases(2.0, 3, delta=1e-6), Releases(math.inf, 2, epsilon=0.25, delta=1e-6)


def test_deltas_are_taken_off_and_epsilons_are_added() -> None:
    noise = spent([Releases(2.0, 3)], 5e-6).epsilon
    assert spent([SELECTION, VOTE], 1e-5).epsilon == pytest.approx(noise + 0.5)
    assert spent([VOTE], 1e-5).epsilon == 0.5
    assert spent([Releases(math.inf, 2)], 1e-5).epsilon == 0


def test_replacing_a_user_is_emptying_two() -> None:
    own = 3 * 2e-6 + 2 * (1 + math.exp(0.25)) * 1e-6
    noise = spent([Releases(2.0, 3)], 2e-5 - own, "replace_one").epsilon
    assert spent([SELECTION, VOTE], 2e-5, "replace_one").epsilon == pytest.approx(noise + 1.0)


def test_a_delta_that_is_used_up_is_no_guarantee() -> None:
    assert spent([SELECTION.times(11)], 1e-5).epsilon == math.inf
    with pytest.raises(UserError, match="no noise multiplier"):
        noise_multiplier_for(1.0, 1e-5, lambda z: [Releases(z, delta=1e-5)])


def test_a_ledger_keeps_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for releases in (SELECTION, VOTE):
        name = ledger.begin(str(releases), releases)
        for _ in range(releases.count):
            ledger.release(name)
        ledger.end(name)
    assert Ledger(ledger.path).read().total() == spent([SELECTION, VOTE], 1e-5)
    assert str(SELECTION) == "3 releases with noise multiplier 2, all users take part, and (0, 1e-06) of its own"
    assert str(VOTE) == "2 releases, all users take part, and (0.25, 1e-06) of its own"


@pytest.mark.parametrize("own", [{"epsilon": -1.0}, {"epsilon": math.inf}, {"delta": 1.0}, {"delta": -1e-9}])
def test_what_cannot_be_is_refused(own: dict[str, float]) -> None:
    with pytest.raises(UserError, match="of its own cannot be"):
        Releases(1.0, **own)  # type: ignore[arg-type]
