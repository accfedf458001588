"""Releases as a sentence: what a person reads in a ledger, a refusal or a promise."""

import math

import pytest

from lit_epgan.privacy import Releases


@pytest.mark.parametrize(
    ("releases", "sentence"),
    [
        (Releases(2.5), "one release with noise multiplier 2.5, all users take part"),
        (Releases(1.0, 2, unit="record"), "2 releases with noise multiplier 1, all records take part"),
        (
            Releases(1.0, 3, "fixed", 0.1, 500),
            "3 releases with noise multiplier 1, 50 of 500 users, drawn without replacement",
        ),
        (
            Releases(1.0, 1, "poisson", 0.25, unit="record"),
            "one release with noise multiplier 1, each record with probability 0.25",
        ),
        (
            Releases(1.0, 3, separation=2),
            "3 participations with noise multiplier 1, each user at most once in 2 rounds",
        ),
        (
            Releases(1.0, 1, separation=4),
            "one participation with noise multiplier 1, each user at most once in 4 rounds",
        ),
        (Releases(math.inf, epsilon=0.5), "one release, all users take part, and (0.5, 0) of its own"),
        (
            Releases(1.0, delta=1e-6),
            "one release with noise multiplier 1, all users take part, and (0, 1e-06) of its own",
        ),
    ],
)
def test_releases_are_told(releases: Releases, sentence: str) -> None:
    assert str(releases) == sentence
