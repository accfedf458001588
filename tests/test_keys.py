"""Keys by which institutions agree on pads: whose key is whose is checked by certificates, and no key serves twice."""

from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace

from lit_epgan.carriers.flare import certificates
from lit_epgan.carriers.keys import Announced, ExchangeKey, Identity
from lit_epgan.errors import UserError
from tests.certificates import Root, written

ROOT = Root()
NAMES = ("anna", "berta", "clara")
SIGNED = {name: ROOT.identity(name, curve=name == "berta") for name in NAMES}


def keys(round_: int = 3, exchange: int = 1, signed: bool = True) -> dict[str, ExchangeKey]:
    return {name: ExchangeKey(name, round_, exchange, SIGNED[name] if signed else None) for name in NAMES}


def told(found: dict[str, ExchangeKey]) -> dict[str, Announced]:
    return {name: key.announced for name, key in found.items()}


@pytest.mark.parametrize("signed", [True, False])
def test_each_pair_agrees_on_a_pad_that_one_adds_and_the_other_subtracts(signed: bool) -> None:
    """Three institutions with RSA and elliptic-curve certificates, or with none."""
    found = keys(signed=signed)
    announced = told(found)
    pads = {name: key.pads(announced) for name, key in found.items()}
    of_pairs: dict[bytes, list[bool]] = {}
    for own in pads.values():
        for key, adds in own:
            of_pairs.setdefault(key, []).append(adds)
    assert len(of_pairs) == 3
    assert all(sorted(signs) == [False, True] for signs in of_pairs.values())


def test_another_exchange_has_other_pads() -> None:
    first, second = keys(), keys()
    pads = {pad.key for found in (first, second) for pad in found["anna"].pads(told(found))}
    assert len(pads) == 4


def test_pads_depend_on_the_exchange_even_where_the_secret_is_the_same() -> None:
    """Keys of one exchange in another one's place, without signatures that would tell."""
    anna, berta = (ExchangeKey(name, 3, 1) for name in ("anna", "berta"))
    announced = {"anna": anna.announced, "berta": berta.announced}
    berta._round = 4
    assert anna.pads(announced)[0].key != berta.pads(announced)[0].key


def test_a_key_serves_once() -> None:
    found = keys()
    found["anna"].pads(told(found))
    with pytest.raises(UserError, match="round 3, exchange 1 has been masked before"):
        found["anna"].pads(told(found))


def test_its_own_key_must_be_among_them() -> None:
    found = keys(signed=False)
    wrong = told(found) | {"anna": found["clara"].announced}
    with pytest.raises(UserError, match="another key in this institution's name"):
        found["anna"].pads(wrong)


def forged(announced: Announced) -> Announced:
    """The server's own key with the institution's signature."""
    return announced._replace(key=ExchangeKey("berta", 3, 1).announced.key)


REFUSED: list[tuple[Callable[[Announced], Announced], str]] = [
    (lambda own: ExchangeKey("berta", 3, 1).announced, "it is not signed"),
    (forged, "its signature is wrong"),
    (lambda own: own._replace(signature="00" * 70), "its signature is wrong"),
    (
        lambda own: ExchangeKey("berta", 2, 1, SIGNED["berta"]).announced,
        "its signature is wrong, or of another exchange",
    ),
    (
        lambda own: ExchangeKey("berta", 3, 0, SIGNED["berta"]).announced,
        "its signature is wrong, or of another exchange",
    ),
    (lambda own: ExchangeKey("berta", 3, 1, SIGNED["clara"]).announced, "its certificate is of 'clara'"),
    (lambda own: ExchangeKey("berta", 3, 1, Root().identity("berta")).announced, "not of this federation's root"),
    (lambda own: own._replace(certificate="anything"), "key of 'berta' is refused"),
    (lambda own: own._replace(key="anything"), "key of 'berta' is refused"),
]


@pytest.mark.parametrize(("wrong", "why"), REFUSED)
def test_a_key_that_is_not_its_institutions_is_refused_by_name(
    wrong: Callable[[Announced], Announced], why: str
) -> None:
    """A replayed one, one signed by somebody else, one of another federation, none."""
    found = keys()
    announced = told(found)
    announced["berta"] = wrong(announced["berta"])
    with pytest.raises(UserError, match="the key of 'berta' is refused") as refused:
        found["anna"].pads(announced)
    assert why in str(refused.value)


def test_a_certificate_that_has_run_out_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = keys()
    monkeypatch.setattr("lit_epgan.carriers.keys.datetime", InTwoYears)
    with pytest.raises(UserError, match="the key of 'berta' is refused: its certificate is not valid today"):
        found["anna"].pads(told(found))


class InTwoYears(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return datetime.now(tz) + timedelta(days=730)


def test_a_key_of_which_every_secret_is_known_is_refused() -> None:
    """The point of order 1: X25519 of it is zero, whatever the other key is (RFC 7748, section 6.1)."""
    anna = ExchangeKey("anna", 3, 1)
    with pytest.raises(UserError, match="the key of 'berta' is refused"):
        anna.pads({"anna": anna.announced, "berta": Announced("00" * 32)})


def test_an_identity_is_read_from_a_kits_folder(tmp_path: Path) -> None:
    folder = written(ROOT.files("anna"), tmp_path / "startup")
    assert Identity.of_folder(folder, "anna").name == "anna"
    with pytest.raises(UserError, match="is of 'anna', and this institution is 'berta'"):
        Identity.of_folder(folder, "berta")
    (folder / "client.key").write_bytes(ROOT.files("clara")["client.key"])
    with pytest.raises(UserError, match="the private key is another certificate's"):
        Identity.of_folder(folder, "anna")
    (folder / "client.key").write_text("nothing")
    with pytest.raises(UserError, match="cannot be used"):
        Identity.of_folder(folder, "anna")
    (folder / "client.key").unlink()
    with pytest.raises(UserError, match=r"client\.key"):
        Identity.of_folder(folder, "anna")


def test_flares_sites_find_their_certificates(tmp_path: Path) -> None:
    """In a kit's folder ``startup``; under the simulator there are none."""
    context = FLContext()
    assert certificates(context) == ""
    (tmp_path / "startup").mkdir()
    (tmp_path / "local").mkdir()
    context.set_prop(FLContextKey.WORKSPACE_OBJECT, Workspace(str(tmp_path)))
    assert certificates(context) == ""
    (tmp_path / "startup").rmdir()
    folder = written(ROOT.files("anna"), tmp_path / "startup")
    assert certificates(context) == str(folder)
