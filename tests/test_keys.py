"""Keys by which institutions agree on pads: whose key is whose is checked by certificates, and no key serves twice."""

import hashlib
import hmac
import secrets
from datetime import datetime, timedelta, tzinfo

import numpy as np
import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from scipy import stats

from lit_epgan.carriers import keys
from lit_epgan.carriers.flare import certificates
from lit_epgan.carriers.keys import Announced, ExchangeKey, Identity, Words, add_pad, pad_key
from lit_epgan.carriers.secure_aggregation import Numbers, fixed_point, floating_point, largest
from lit_epgan.lib.errors import UserError
from tests.certificates import Root, written
from tests.refusals import assert_refused

ROOT = Root()
NAMES = ("anna", "berta", "clara")
SIGNED = {name: ROOT.identity(name) for name in NAMES}


def exchange_keys(round_: int = 3, exchange: int = 1, signed: bool = True) -> dict[str, ExchangeKey]:
    return {name: ExchangeKey(name, round_, exchange, SIGNED[name] if signed else None) for name in NAMES}


def told(found: dict[str, ExchangeKey]) -> dict[str, Announced]:
    return {name: key.announced for name, key in found.items()}


@pytest.mark.parametrize("signed", [True, False])
def test_each_pair_agrees_on_a_pad_that_one_adds_and_the_other_subtracts(signed):
    found = exchange_keys(signed=signed)
    announced = told(found)
    pads = {name: key.pads(announced) for name, key in found.items()}
    of_pairs: dict[bytes, list[bool]] = {}
    for own in pads.values():
        for key, adds in own:
            of_pairs.setdefault(key, []).append(adds)
    assert len(of_pairs) == 3
    assert all(sorted(signs) == [False, True] for signs in of_pairs.values())


def test_pads_depend_on_the_exchange():
    first, second = exchange_keys(), exchange_keys()
    pads = {pad.key for found in (first, second) for pad in found["anna"].pads(told(found))}
    assert len(pads) == 4
    # keys of one exchange in another one's place, without signatures that would tell
    anna, berta = (ExchangeKey(name, 3, 1) for name in ("anna", "berta"))
    announced = {"anna": anna.announced, "berta": berta.announced}
    berta._round = 4
    assert anna.pads(announced)[0].key != berta.pads(announced)[0].key


def test_a_key_serves_once_and_must_be_ones_own():
    found = exchange_keys()
    found["anna"].pads(told(found))
    assert_refused("round 3, exchange 1 has been masked before", found["anna"].pads, told(found))
    found = exchange_keys(signed=False)
    wrong = told(found) | {"anna": found["clara"].announced}
    assert_refused("another key in this institution's name", found["anna"].pads, wrong)


def forged(announced: Announced) -> Announced:
    return announced._replace(key=ExchangeKey("berta", 3, 1).announced.key)


REFUSED = [
    (lambda own: ExchangeKey("berta", 3, 1).announced, "it is not signed"),
    (forged, "its signature is wrong"),
    (lambda own: own._replace(signature="00" * 70), "its signature is wrong"),
    (lambda own: ExchangeKey("berta", 2, 1, SIGNED["berta"]).announced, "its signature is wrong, of another exchange"),
    (lambda own: ExchangeKey("berta", 3, 0, SIGNED["berta"]).announced, "its signature is wrong, of another exchange"),
    (lambda own: ExchangeKey("berta", 3, 1, SIGNED["clara"]).announced, "its certificate is not the one"),
    (lambda own: ExchangeKey("berta", 3, 1, Root().identity("berta")).announced, "its certificate is not the one"),
    (lambda own: own._replace(certificate="anything"), "key of 'berta' is refused"),
    (lambda own: own._replace(key="anything"), "key of 'berta' is refused"),
]


@pytest.mark.parametrize(("wrong", "why"), REFUSED)
def test_a_key_that_is_not_its_institutions_is_refused_by_name(wrong, why):
    """A replayed one, one signed by somebody else, one of another federation, none."""
    found = exchange_keys()
    announced = told(found)
    announced["berta"] = wrong(announced["berta"])
    with pytest.raises(UserError, match="the key of 'berta' is refused") as refused:
        found["anna"].pads(announced)
    assert why in str(refused.value)


class InTwoYears(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(tz) + timedelta(days=730)


def test_a_certificate_that_has_run_out_and_a_key_whose_secrets_are_known_are_refused(monkeypatch):
    """The point of order 1: X25519 of it is zero, whatever the other key is (RFC 7748, section 6.1)."""
    anna = ExchangeKey("anna", 3, 1)
    assert_refused("the key of 'berta' is refused", anna.pads, {"anna": anna.announced, "berta": Announced("00" * 32)})
    found = exchange_keys()
    monkeypatch.setattr("lit_epgan.carriers.keys.datetime", InTwoYears)
    assert_refused("the key of 'berta' is refused: its certificate is not valid today", found["anna"].pads, told(found))


def test_an_identity_is_read_from_a_kits_folder(tmp_path):
    folder = written(ROOT.files("anna"), tmp_path / "startup")
    assert Identity.of_folder(folder, "anna").name == "anna"
    assert_refused("is of 'anna', and this institution is 'berta'", Identity.of_folder, folder, "berta")
    (folder / "client.key").write_bytes(ROOT.files("clara")["client.key"])
    assert_refused("the private key is another certificate's", Identity.of_folder, folder, "anna")
    (folder / "client.key").write_text("nothing")
    assert_refused("cannot be used", Identity.of_folder, folder, "anna")
    (folder / "client.key").unlink()
    assert_refused(r"client\.key", Identity.of_folder, folder, "anna")


def test_flares_sites_find_their_certificates(tmp_path):
    context = FLContext()
    assert certificates(context) == ""
    (tmp_path / "startup").mkdir()
    (tmp_path / "local").mkdir()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path)))
    assert certificates(context) == ""
    (tmp_path / "startup").rmdir()
    folder = written(ROOT.files("anna"), tmp_path / "startup")
    assert certificates(context) == str(folder)


def words(*values: int) -> Words:
    return np.array([value % 2**64 for value in values], dtype=np.uint64)


def masked(numbers: list[Numbers]) -> list[Words]:
    rows = [fixed_point(each) for each in numbers]
    for j in range(len(rows)):
        for k in range(j + 1, len(rows)):
            key = secrets.token_bytes(32)
            add_pad(rows[j], key, True)
            add_pad(rows[k], key, False)
    return rows


def test_a_number_is_rounded_to_a_multiple_of_2_to_the_minus_32():
    numbers = np.array([0.0, 1.0, -1.0, 2.0**-32, 2.0**-34, -(2.0**-32), 2.5, -1e6])
    found = fixed_point(numbers)
    assert found.tolist() == words(0, 2**32, -(2**32), 1, 0, -1, 5 * 2**31, -(10**6) * 2**32).tolist()
    assert floating_point(found).tolist() == [0.0, 1.0, -1.0, 2.0**-32, 0.0, -(2.0**-32), 2.5, -1e6]


@pytest.mark.parametrize("clients", [1, 3, 7])
def test_masked_numbers_sum_to_the_sum_of_the_numbers(clients):
    """Within K 2^-33 of the exact sum; integers exactly."""
    generator = np.random.default_rng(clients)
    numbers = [np.append(generator.normal(size=50) * 10.0 ** (k - 3), [k + 1.0, -1e7]) for k in range(clients)]
    total = floating_point(np.sum(masked(numbers), axis=0, dtype=np.uint64))
    exact = np.sum(numbers, axis=0)
    assert (np.abs(total - exact) <= clients * 2.0**-33 + 1e-15 * np.abs(exact)).all()
    assert total[-2:].tolist() == [clients * (clients + 1) / 2, -clients * 1e7]


@pytest.mark.parametrize("clients", [1, 3, 1000])
def test_numbers_of_the_largest_size_do_not_wrap(clients):
    """All at their largest, all of one sign: 2^30, to one part of 2^53."""
    one = fixed_point(np.array([largest(clients), -largest(clients)]))
    with np.errstate(over="ignore"):
        found = floating_point(one * np.uint64(clients))
    np.testing.assert_allclose(found, [2.0**30, -(2.0**30)], rtol=1e-12)
    with np.errstate(over="ignore"):
        wrapped = floating_point(one * np.uint64(3 * clients))
    assert wrapped[0] < 0  # three times as much does


def test_the_pad_is_the_keystream_of_rfc_8439(monkeypatch):
    """Appendix A.1, test vector 1: key and nonce of zeros, counter 0."""
    row = np.zeros(8, dtype=np.uint64)
    add_pad(row, bytes(32), True)
    expected = (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert row.astype("<u8").tobytes().hex() == expected
    key = bytes(range(32))
    whole, parts = np.zeros(100, dtype=np.uint64), np.zeros(100, dtype=np.uint64)
    add_pad(whole, key, True)
    monkeypatch.setattr(keys, "CHUNK", 16)
    add_pad(parts, key, True)
    assert parts.tolist() == whole.tolist()
    assert len(set(whole.tolist())) == 100


def test_a_pads_key_follows_from_the_secret_and_is_taken_off_by_who_subtracts_it():
    """HKDF-SHA256 worked out by RFC 5869: extract with a salt of zeros, one block of expand."""
    extracted = hmac.digest(bytes(32), b"secret", hashlib.sha256)
    expected = hmac.digest(extracted, b"purpose\x01", hashlib.sha256)
    assert pad_key(b"secret", b"purpose") == expected
    assert pad_key(b"secret", b"another purpose") != expected
    row = words(5, -7, 2**63)
    add_pad(row, bytes(32), True)
    add_pad(row, bytes(32), False)
    assert row.tolist() == words(5, -7, 2**63).tolist()
    # bytes of masked zeros against equal shares of all 256 values; the key is fixed, so the outcome is
    row = fixed_point(np.zeros(2**15))
    add_pad(row, bytes(range(32)), False)
    counts = np.bincount(np.frombuffer(row.tobytes(), np.uint8), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-3
