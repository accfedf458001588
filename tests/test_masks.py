"""Masked numbers look random one by one, and sum to what was masked."""

import hashlib
import hmac
import secrets

import numpy as np
import pytest
from scipy import stats

from lit_epgan.carriers import keys
from lit_epgan.carriers.keys import Words, add_pad, pad_key
from lit_epgan.carriers.secure_aggregation import Numbers, fixed_point, floating_point, largest


def words(*values: int) -> Words:
    return np.array([value % 2**64 for value in values], dtype=np.uint64)


def masked(numbers: list[Numbers]) -> list[Words]:
    """Every client's fixed-point numbers, with the pads of all pairs."""
    rows = [fixed_point(each) for each in numbers]
    for j in range(len(rows)):
        for k in range(j + 1, len(rows)):
            key = secrets.token_bytes(32)
            add_pad(rows[j], key, True)
            add_pad(rows[k], key, False)
    return rows


def test_a_number_is_rounded_to_a_multiple_of_2_to_the_minus_32() -> None:
    numbers = np.array([0.0, 1.0, -1.0, 2.0**-32, 2.0**-34, -(2.0**-32), 2.5, -1e6])
    found = fixed_point(numbers)
    assert found.tolist() == words(0, 2**32, -(2**32), 1, 0, -1, 5 * 2**31, -(10**6) * 2**32).tolist()
    assert floating_point(found).tolist() == [0.0, 1.0, -1.0, 2.0**-32, 0.0, -(2.0**-32), 2.5, -1e6]


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_masked_numbers_sum_to_the_sum_of_the_numbers(clients: int) -> None:
    """Within K 2^-33 of the exact sum; integers exactly."""
    generator = np.random.default_rng(clients)
    numbers = [np.append(generator.normal(size=50) * 10.0 ** (k - 3), [k + 1.0, -1e7]) for k in range(clients)]
    total = floating_point(np.sum(masked(numbers), axis=0, dtype=np.uint64))
    exact = np.sum(numbers, axis=0)
    assert (np.abs(total - exact) <= clients * 2.0**-33 + 1e-15 * np.abs(exact)).all()
    assert total[-2:].tolist() == [clients * (clients + 1) / 2, -clients * 1e7]


@pytest.mark.parametrize("clients", [1, 3, 1000])
def test_numbers_of_the_largest_size_do_not_wrap(clients: int) -> None:
    """All at their largest, all of one sign: 2^30, to one part of 2^53."""
    one = fixed_point(np.array([largest(clients), -largest(clients)]))
    with np.errstate(over="ignore"):
        found = floating_point(one * np.uint64(clients))
    np.testing.assert_allclose(found, [2.0**30, -(2.0**30)], rtol=1e-12)
    with np.errstate(over="ignore"):
        wrapped = floating_point(one * np.uint64(3 * clients))
    assert wrapped[0] < 0  # three times as much does


def test_the_pad_is_the_keystream_of_rfc_8439() -> None:
    """Appendix A.1, test vector 1: key and nonce of zeros, counter 0."""
    row = np.zeros(8, dtype=np.uint64)
    add_pad(row, bytes(32), True)
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert row.astype("<u8").tobytes().hex() == expected


def test_a_long_pad_is_one_keystream(monkeypatch: pytest.MonkeyPatch) -> None:
    key = bytes(range(32))
    whole, parts = np.zeros(100, dtype=np.uint64), np.zeros(100, dtype=np.uint64)
    add_pad(whole, key, True)
    monkeypatch.setattr(keys, "CHUNK", 16)
    add_pad(parts, key, True)
    assert parts.tolist() == whole.tolist()
    assert len(set(whole.tolist())) == 100


def test_a_pad_is_taken_off_by_who_subtracts_it() -> None:
    row = words(5, -7, 2**63)
    add_pad(row, bytes(32), True)
    add_pad(row, bytes(32), False)
    assert row.tolist() == words(5, -7, 2**63).tolist()


def test_a_pads_key_follows_from_the_secret_and_its_purpose() -> None:
    """HKDF-SHA256 worked out by RFC 5869: extract with a salt of zeros, one block of expand."""
    extracted = hmac.digest(bytes(32), b"secret", hashlib.sha256)
    expected = hmac.digest(extracted, b"purpose\x01", hashlib.sha256)
    assert pad_key(b"secret", b"purpose") == expected
    assert pad_key(b"secret", b"another purpose") != expected


def test_masked_numbers_are_uniform() -> None:
    """Bytes of masked zeros against equal shares of all 256 values; the key is fixed, so the outcome is."""
    row = fixed_point(np.zeros(2**15))
    add_pad(row, bytes(range(32)), False)
    counts = np.bincount(np.frombuffer(row.tobytes(), np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3
