"""Certificates and kits for machines of their own, and a federation by them, with mutual TLS, on this machine."""

import json
import shutil
from datetime import datetime, timedelta, tzinfo

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.private.fed.utils.identity_utils import IdentityAsserter, IdentityVerifier

from lit_epgan.carriers.authority import Authority, assemble, certificate_of, check_kit, request
from lit_epgan.carriers.fit import VARIABLE, FitPlan
from lit_epgan.carriers.flare_process import know
from lit_epgan.carriers.keys import MemberList
from lit_epgan.carriers.kits import Members, provision, sites_of, store_in
from lit_epgan.cli.main import main
from tests.refusals import assert_refused

MEMBERS = "name: trial\nserver: {{host: localhost, port: {port}}}\nsites: [{sites}]\noperator: op@example.org\n"


def members(folder, sites: str = "east, north", port: int = 8002):
    path = folder / "members.yaml"
    path.write_text(MEMBERS.format(port=port, sites=sites))
    return path


def kits_of(path, *renewed: str):
    """Whole kits of all members, as if each had asked for its own; of those who are ``renewed``, with new keys."""
    told, requests = Members.read(path), path.parent / "requests"
    requests.mkdir(exist_ok=True)
    new = [name for name in told.owners if name in renewed or not (requests / f"{name}.csr").exists()]
    for name in new:
        request(name, requests)
    kits = provision(told, path.parent / "kits", requests).kits
    for name in new:
        assemble(kits[name], requests)
    return kits


def read(kit, name: str):
    return json.loads((kit / "local" / name).read_text())


def test_a_kit_for_each_and_no_more_rights_than_needed(tmp_path):
    made = kits_of(members(tmp_path))
    assert set(made) == {"localhost", "east", "north", "op@example.org"}
    site = read(made["east"], "resources.json")
    assert site["class_allow_list"] == ["lit_epgan.carriers.flare.FitExecutor"]
    assert site["class_list_enforcement_mode"] == "enforce"
    assert site["allow_log_streaming"] is False
    assert "site_log_streamer" not in {each["id"] for each in site["components"]}
    assert read(made["localhost"], "resources.json")["class_allow_list"] == ["lit_epgan.carriers.flare.RoundController"]
    for kit in ("east", "north", "localhost"):
        rights = read(made[kit], "authorization.json")["permissions"]
        assert set(rights) == {"project_admin"}
        assert {rights["project_admin"][each] for each in ("byoc", "shell_commands", "download_job")} == {"none"}
    assert sites_of(made["localhost"]) == ("east", "north")
    for kit in (*made.values(), tmp_path / "kits" / "authority"):
        assert kit.stat().st_mode & 0o077 == 0  # keys: for nobody else on this machine
    client = json.loads((made["east"] / "startup" / "fed_client.json").read_text())["client"]
    assert client["connection_security"] == "mtls"


def test_a_private_key_is_where_its_owner_has_made_it_and_nowhere_else(tmp_path):
    path, here = members(tmp_path), tmp_path / "requests"
    here.mkdir()
    for name in ("localhost", "east", "north", "op@example.org"):
        request(name, here)
    secrets = {each.name: each.read_text() for each in here.glob("*.key")}
    assert len(set(secrets.values())) == 4
    kits = provision(Members.read(path), tmp_path / "kits", here).kits
    told = "".join(each.read_text() for each in (tmp_path / "kits").rglob("*") if each.is_file())
    assert told.count("PRIVATE KEY") == 2  # the authority's own, in two lines
    assert not any(secret in told for secret in secrets.values())
    for name, kit in kits.items():
        assert_refused(f"lacks its key: .*where {name}.key is", check_kit, kit)
        assemble(kit, here)
        assert "The certificate holds until" in check_kit(kit)
    keys = list(tmp_path.rglob("*.key"))
    assert len(keys) == 5
    assert all(key.stat().st_mode & 0o777 == 0o600 for key in keys)


def test_a_site_is_added_under_the_same_authority(tmp_path):
    kits = tmp_path / "kits"
    kits_of(members(tmp_path))
    before = (kits / "east" / "startup" / "client.crt").read_bytes()
    known = MemberList.read(kits / "members.json")
    assert set(kits_of(members(tmp_path, "east, north, south"))) >= {"south"}
    assert (kits / "east" / "startup" / "client.crt").read_bytes() == before
    root = x509.load_pem_x509_certificate((kits / "east" / "startup" / "rootCA.pem").read_bytes())
    new = x509.load_pem_x509_certificate((kits / "south" / "startup" / "client.crt").read_bytes())
    new.verify_directly_issued_by(root)  # raises
    assert sites_of(kits / "localhost") == ("east", "north", "south")
    assert MemberList.read(kits / "members.json").digest != known.digest


def test_a_renewed_certificate_has_a_new_key_and_the_old_one_is_revoked(tmp_path):
    kits = kits_of(members(tmp_path))
    old = tmp_path / "old"
    shutil.copytree(kits["east"], old)
    kits = kits_of(members(tmp_path), "east")
    check_kit(kits["east"])
    check_kit(old)  # which has not heard of it
    shutil.copy(kits["east"] / "startup" / "members.json", old / "startup")
    assert_refused("is revoked. python -m lit_epgan federate --request east", check_kit, old)


def test_who_is_no_member_any_more_is_revoked_and_its_key_is_signed_no_more(tmp_path):
    kits_of(members(tmp_path, "east, north, south"))
    path, requests = members(tmp_path), tmp_path / "requests"
    done = provision(Members.read(path), tmp_path / "kits", requests)
    assert done.revoked == ["south"]
    assert set(done.members.sites) == {"east", "north"}
    again = Members.read(members(tmp_path, "east, north, south"))
    assert_refused("this key has been revoked or replaced", provision, again, tmp_path / "kits", requests)


def test_a_request_that_is_not_its_members_is_refused(tmp_path):
    authority = Authority(tmp_path / "authority", "trial")
    asked, _ = request("east", tmp_path)
    assert_refused("no request of north: its name is east", authority.sign, "north", asked)
    plain = x509.load_pem_x509_csr(asked.read_bytes()).public_bytes(Encoding.DER)
    forged = x509.load_der_x509_csr(plain[:-1] + bytes([plain[-1] ^ 1]))
    asked.write_bytes(forged.public_bytes(Encoding.PEM))
    assert_refused("no request of east: its key has not signed it", authority.sign, "east", asked)
    asked.write_text("anything")
    assert_refused("is no request", authority.sign, "east", asked)
    assert_refused("east.key exists, and a key is not overwritten", request, "east", tmp_path)
    assert_refused("no member's name", request, "e" * 65, tmp_path)


def test_flare_lets_those_in_whose_certificates_are_on_the_list(tmp_path, monkeypatch):
    """FLARE's own check takes whatever the authority has signed, be it revoked or replaced."""
    monkeypatch.setattr(IdentityVerifier, "verify_common_name", IdentityVerifier.verify_common_name)
    kits = kits_of(members(tmp_path))
    old = {"asserter_cert": certificate_of(kits["east"])}
    asserts = IdentityAsserter(*(str(kits["east"] / "startup" / f"client.{end}") for end in ("key", "crt")))
    told = {"asserted_cn": "east", "nonce": "1", "signature": asserts.sign_common_name("1")}
    verifier = IdentityVerifier(str(kits["localhost"] / "startup" / "rootCA.pem"))
    know(kits["localhost"] / "startup" / "members.json")
    assert verifier.verify_common_name(**told, **old)
    with pytest.raises(ValueError, match="the certificate of north is not the one that"):
        verifier.verify_common_name(**told | {"asserted_cn": "north"}, **old)
    kits_of(members(tmp_path), "east")
    with pytest.raises(ValueError, match="it may be revoked"):
        verifier.verify_common_name(**told, **old)


def test_another_requests_key_is_no_key_of_the_kit(tmp_path):
    kits_of(members(tmp_path))
    kit = tmp_path / "kits" / "east"
    request("east", tmp_path)
    assert_refused("not the key that the certificate in .*east was requested with", assemble, kit, tmp_path)
    assert_refused("is no kit of a federation's member", assemble, tmp_path, tmp_path)


def test_a_certificate_that_has_run_out_or_will_is_said_to_its_owner(tmp_path, monkeypatch):
    kit = kits_of(members(tmp_path))["east"]
    assert "That is soon" not in check_kit(kit)
    monkeypatch.setattr("lit_epgan.carriers.authority.datetime", InDays(340))
    assert "That is soon: python -m lit_epgan federate --request east" in check_kit(kit)
    monkeypatch.setattr("lit_epgan.carriers.authority.datetime", InDays(-1 / 24))
    assert "That is soon" not in check_kit(kit)  # a clock an hour behind the authority's
    for days in (361, -2):
        monkeypatch.setattr("lit_epgan.carriers.authority.datetime", InDays(days))
        assert_refused("and this machine's clock says .* --request east", check_kit, kit)


class InDays:
    """A clock that is days ahead."""

    def __init__(self, days: float) -> None:
        self._ahead = timedelta(days)

    def now(self, zone: tzinfo) -> datetime:
        return datetime.now(zone) + self._ahead


def test_the_commands_say_whom_to_tell_what(folder, tmp_path, capsys):
    members(tmp_path)
    assert main(["federate", "--request", "east"]) == 0
    said = capsys.readouterr().err
    assert "east.csr: to who keeps the authority" in said
    assert main(["federate", "--sites", "members.yaml"]) == 0
    told = capsys.readouterr().err
    assert "north has no certificate: let it run `federate --request north`" in told
    assert f"ask east: {said.split()[-1]}" in told  # the same digits at both ends
    assert main(["federate", "--assemble", "kits/east"]) == 0
    assert "kits/east is whole" in capsys.readouterr().err
    assert main(["federate", "--assemble", "kits/east", "--config", "a.yaml"]) == 2
    assert "has no meaning there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sites: [a]", "does not list a federation"),
        (MEMBERS.format(port=8002, sites="a, a"), "names of their own"),
        (MEMBERS.format(port=8002, sites="a, localhost"), "names of their own"),
        (MEMBERS.format(port=8002, sites="../a"), "cannot be a name"),
        (MEMBERS.format(port=8002, sites=""), "no site"),
        (MEMBERS.format(port="many", sites="a"), "does not list a federation"),
        (MEMBERS.format(port=8002, sites="a").replace("op@", "op"), "e-mail address"),
        (MEMBERS.format(port=99999, sites="a"), r"server.port is 99999; it must lie in \[1, 65535\]"),
        (MEMBERS.format(port=8002, sites="a, authority"), "authority cannot be a member's name"),
        (MEMBERS.format(port=8002, sites="a, server"), "server cannot be a member's name"),
        (MEMBERS.format(port=8002, sites="a" * 65), "has 65 letters; a certificate holds names of at most 64"),
        (MEMBERS.format(port=8002, sites="a").replace("localhost", "a" * 70), "has 70 letters"),
        (MEMBERS.format(port=8002, sites="a").replace("localhost", "fl:8002"), "without a port"),
    ],
)
def test_members_that_cannot_be_are_refused(text, why, tmp_path):
    path = tmp_path / "members.yaml"
    path.write_text(text)
    assert_refused(why, Members.read, path)
    assert main(["federate", "--sites", str(path), "--kits", str(tmp_path / "kits")]) == 2
    assert not (tmp_path / "kits").exists()


def test_a_wrong_kit_is_refused_by_name(tmp_path, capsys):
    made = kits_of(members(tmp_path))
    scans = ["--config", "digits_classifier.yaml"]
    assert main(["federate", "--site", str(made["localhost"]), *scans]) == 2
    assert "is no site's kit" in capsys.readouterr().err
    assert main(["federate", "--server", str(made["east"]), "--operator", "op", *scans]) == 2
    assert "is no server's kit" in capsys.readouterr().err
    assert main(["federate", "--server", str(made["localhost"]), *scans]) == 2
    assert "needs --operator" in capsys.readouterr().err
    assert main(["federate", "--site", str(made["east"]), *scans]) == 2
    assert "a site is one client" in capsys.readouterr().err


def test_what_a_process_does_is_told_on_its_own_machine_and_a_servers_jobs_lie_where_it_says(tmp_path, monkeypatch):
    plan = FitPlan(["--config", "a.yaml"], "/here", str(tmp_path), "fit.log", "east")
    plan.write(tmp_path / "fits", "east")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fits"))
    assert FitPlan.read("east") == plan
    assert not plan.has_checkpoint
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert plan.has_checkpoint
    assert_refused("was not started by", FitPlan.read, "north")
    kit = kits_of(members(tmp_path))["localhost"]
    store_in(kit, tmp_path / "store")
    assert "/tmp/nvflare" not in (kit / "local" / "resources.json").read_text()
