"""Epsilons against published ones, closed forms, and sums of parts."""

import pytest
from dp_accounting import get_epsilon_gaussian

from lit_epgan.errors import UserError
from lit_epgan.privacy import Releases, noise_multiplier_for, spent


@pytest.mark.parametrize(
    ("users", "emptied", "replaced"), [(250_000, 1.645, 14.03), (500_000, 1.175, 8.22), (1_250_000, 0.959, 6.96)]
)
def test_sampling_without_replacement(users: int, emptied: float, replaced: float) -> None:
    """The table of the errata page: z = 1, cohorts of 1,000, 1,000 rounds, delta = N^-1.1."""
    made = [Releases(1.0, 1000, "fixed", 1000 / users, users)]
    delta = users**-1.1
    assert spent(made, delta).epsilon == pytest.approx(emptied, rel=0.01)
    assert spent(made, delta, "replace_one").epsilon == pytest.approx(replaced, rel=0.01)


def test_everyone_is_one_gaussian_release_of_more_precision() -> None:
    """k releases at z tell as much as one at z / sqrt(k); a replaced user moves the sum twice as far."""
    assert spent([Releases(2.0)], 1e-5).epsilon == pytest.approx(1.993, abs=1e-3)
    assert spent([Releases(8.0, 9), Releases(4.0, 4)], 1e-5).epsilon == pytest.approx(
        get_epsilon_gaussian((9 / 64 + 4 / 16) ** -0.5, 1e-5)
    )
    replaced = spent([Releases(4.0)], 1e-5, "replace_one")
    assert replaced.epsilon == spent([Releases(2.0)], 1e-5).epsilon


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_a_coin_that_always_says_yes_is_everyone(relation) -> None:
    coins, everyone = (spent([Releases(3.0, 2, kind)], 1e-5, relation).epsilon for kind in ("poisson", "everyone"))
    assert coins == pytest.approx(everyone, rel=2e-3)


def test_coins_cost_less_than_everyone_and_add_up() -> None:
    once, twice = (spent([Releases(1.0, n, "poisson", 0.1)], 1e-5).epsilon for n in (1, 2))
    assert once < twice < spent([Releases(1.0, 2)], 1e-5).epsilon / 3


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_different_kinds_add_up(relation) -> None:
    """More than each by itself, and no more than both, each at half of delta."""
    fixed, coins = Releases(2.0, 10, "fixed", 0.1, 500), Releases(2.0, 10, "poisson", 0.1)
    both = spent([fixed, coins], 1e-5, relation).epsilon
    assert both > max(spent([each], 1e-5, relation).epsilon for each in (fixed, coins))
    assert both <= 1.001 * sum(spent([each], 5e-6, relation).epsilon for each in (fixed, coins))


def test_an_epsilon_says_all_that_it_takes_to_understand_it() -> None:
    said = str(spent([Releases(1.0, 100, "fixed", 0.1, 1000)], 1e-5))
    for part in ("1e-05", "for users", "one user's whole data set emptied", "Renyi"):
        assert part in said
    assert "replaced by another" in str(spent([Releases(1.0)], 1e-5, "replace_one"))
    assert spent([], 1e-5).epsilon == spent([Releases(1.0, 0)], 1e-5).epsilon == 0


@pytest.mark.parametrize("kind", [Releases(1.0), Releases(1.0, 1, "fixed", 0.1, 1000)])
def test_the_noise_for_an_epsilon_is_the_smallest(kind: Releases) -> None:
    def releases(z: float) -> list[Releases]:
        return [kind.with_noise(z, 50)]

    z = noise_multiplier_for(2.0, 1e-5, releases)
    assert spent(releases(z), 1e-5).epsilon <= 2.0 < spent(releases(z / 1.002), 1e-5).epsilon


def test_what_cannot_be_accounted_for_is_refused() -> None:
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(UserError, match="delta"):
            spent([Releases(1.0)], delta)
    with pytest.raises(UserError, match="relation"):
        spent([Releases(1.0)], 1e-5, "both")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="target_epsilon"):
        noise_multiplier_for(0.0, 1e-5, lambda z: [Releases(z)])
    for wrong in ((0.0, 1), (1.0, -1), (1.0, 1, "poisson", 0.0), (1.0, 1, "fixed", 0.5)):
        with pytest.raises(UserError):
            Releases(*wrong)  # type: ignore[arg-type]
