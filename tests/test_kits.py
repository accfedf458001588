"""Kits for machines of their own: what they hold, and a federation by them, with mutual TLS, on this machine."""

import csv
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from PIL import Image

from lit_epgan.carriers.fit import VARIABLE, FitPlan
from lit_epgan.carriers.kits import Members, provision, sites_of, store_in
from lit_epgan.cli.main import main
from lit_epgan.errors import UserError
from tests.processes import ROOT, environment
from tests.same_weights import assert_same, last_checkpoint

MEMBERS = "name: trial\nserver: {{host: localhost, port: {port}}}\nsites: [{sites}]\noperator: op@example.org\n"


def members(folder: Path, sites: str = "east, north", port: int = 8002) -> Path:
    path = folder / "members.yaml"
    path.write_text(MEMBERS.format(port=port, sites=sites))
    return path


def read(kit: Path, name: str) -> Any:
    return json.loads((kit / "local" / name).read_text())


def test_a_kit_for_each_and_no_more_rights_than_needed(tmp_path: Path) -> None:
    made = provision(Members.read(members(tmp_path)), tmp_path / "kits")
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
    assert (
        json.loads((made["east"] / "startup" / "fed_client.json").read_text())["client"]["connection_security"]
        == "mtls"
    )


def test_a_site_is_added_under_the_same_authority(tmp_path: Path) -> None:
    kits = tmp_path / "kits"
    provision(Members.read(members(tmp_path)), kits)
    before = (kits / "east" / "startup" / "client.key").read_bytes()
    assert set(provision(Members.read(members(tmp_path, "east, north, south")), kits)) == {"south"}
    assert (kits / "east" / "startup" / "client.key").read_bytes() == before
    root = x509.load_pem_x509_certificate((kits / "east" / "startup" / "rootCA.pem").read_bytes())
    new = x509.load_pem_x509_certificate((kits / "south" / "startup" / "client.crt").read_bytes())
    new.verify_directly_issued_by(root)  # raises
    assert sites_of(kits / "localhost") == ("east", "north", "south")
    assert {p.name for p in (kits / "authority" / "trial").iterdir()} == {"state"}  # nobody's keys but its own


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
    ],
)
def test_members_that_cannot_be_are_refused(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "members.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=why):
        Members.read(path)
    assert main(["federate", "--sites", str(path), "--kits", str(tmp_path / "kits")]) == 2
    assert not (tmp_path / "kits").exists()


def test_a_servers_jobs_lie_where_it_says(tmp_path: Path) -> None:
    kit = provision(Members.read(members(tmp_path)), tmp_path / "kits")["localhost"]
    store_in(kit, tmp_path / "store")
    assert "/tmp/nvflare" not in (kit / "local" / "resources.json").read_text()


def test_a_wrong_kit_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = provision(Members.read(members(tmp_path)), tmp_path / "kits")
    scans = ["--config", "digits_classifier.yaml"]
    assert main(["federate", "--site", str(made["localhost"]), *scans]) == 2
    assert "is no site's kit" in capsys.readouterr().err
    assert main(["federate", "--server", str(made["east"]), "--operator", "op", *scans]) == 2
    assert "is no server's kit" in capsys.readouterr().err
    assert main(["federate", "--server", str(made["localhost"]), *scans]) == 2
    assert "needs --operator" in capsys.readouterr().err
    assert main(["federate", "--site", str(made["east"]), *scans]) == 2
    assert "a site is one client" in capsys.readouterr().err


def test_what_a_process_does_is_told_on_its_own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = FitPlan(["--config", "a.yaml"], "/here", str(tmp_path), "fit.log", "east")
    plan.write(tmp_path / "fits", "east")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fits"))
    assert FitPlan.read("east") == plan
    assert not plan.has_checkpoint
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").touch()
    assert plan.has_checkpoint
    with pytest.raises(UserError, match="was not started by"):
        FitPlan.read("north")


# A federation by kits -------------------------------------------------------------------------------------------------

CLASSES = "[a, b, c]"
DATA = """data:
  class_path: lit_epgan.datamodules.FolderDataModule
  init_args: {{path: {path}, image_size: 4, color: grayscale, classes: {classes}, batch_size: 2}}
"""
AGREED = """seed_everything: 0
federation: {class_path: lit_epgan.callbacks.FederationCallback, init_args: {algorithm: lit_epgan.federated.SCAFFOLD}}
model:
  class_path: lit_epgan.modules.Classifier
  init_args:
    backbone: {class_path: lit_epgan.networks.MLPBackbone, init_args: {data_shape: [1, 4, 4], hidden: [5]}}
    head: {class_path: torch.nn.Linear, init_args: {in_features: 5, out_features: 3}}
    optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
trainer: {max_epochs: 2, accelerator: cpu, logger: false, callbacks: [lit_epgan.callbacks.RoundCheckpoint]}
"""


def place_images(folder: Path) -> None:
    """Eight images of two sites, each of which lacks a class, and manifests of one and of both."""
    rows = [(f"{site}{i}.png", site, "abc"[i % 2 + (site == "north")]) for site in ("east", "north") for i in range(4)]
    for k, (name, *_) in enumerate(rows):
        Image.new("L", (4, 4), 30 * k).save(folder / name)
    for whose in ("east", "north", "both"):
        with (folder / f"{whose}.csv").open("w", newline="") as file:
            own = [row for row in rows if whose in (row[1], "both")]
            csv.writer(file).writerows([("path", "client", "label"), *own])
        (folder / f"{whose}.yaml").write_text(DATA.format(path=folder / f"{whose}.csv", classes=CLASSES))
    (folder / "agreed.yaml").write_text(AGREED)


def started(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    log = (folder / "terminal.log").open("ab")
    command = [sys.executable, "-m", "lit_epgan", "federate", *words, "--config", str(folder.parent / "agreed.yaml")]
    # the folder of the run is told, for a site's configuration is named last
    command += ["--trainer.default_root_dir", str(folder / "run")]
    paths = {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, cwd=folder, env=environment() | paths, stdout=log, stderr=log, start_new_session=True
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


@pytest.mark.slow
def test_machines_with_data_of_their_own_come_to_the_model_of_one_job(tmp_path: Path) -> None:
    """Control variates and all; each site lacks a class; no site's manifest is known elsewhere."""
    place_images(tmp_path)
    kits = provision(Members.read(members(tmp_path, port=free_port())), tmp_path / "kits")
    sites = [
        started(tmp_path / f"at_{s}", "--site", str(kits[s]), "--config", str(tmp_path / f"{s}.yaml"))
        for s in ("east", "north")
    ]
    try:
        server = started(
            tmp_path / "server", "--server", str(kits["localhost"]), "--operator", str(kits["op@example.org"])
        )
        assert server.wait(300) == 0, (tmp_path / "server" / "terminal.log").read_text()
        assert all(site.poll() is None for site in sites)  # they wait for the next training
    finally:
        for site in sites:
            os.killpg(site.pid, signal.SIGTERM)
            site.wait(60)
    both = ["--config", str(tmp_path / "agreed.yaml"), "--config", str(tmp_path / "both.yaml")]
    assert main(["fit", *both, "--trainer.default_root_dir", str(tmp_path / "alone")]) == 0
    assert_same(last_checkpoint(tmp_path / "server" / "run"), last_checkpoint(tmp_path / "alone"), relative=0)
    assert "The model is in" in (tmp_path / "server" / "terminal.log").read_text()
    assert (tmp_path / "at_east" / "run" / "sent.csv").is_file()
    told = b"".join(path.read_bytes() for path in (tmp_path / "server").rglob("*") if path.is_file())
    assert b"east0.png" not in told
    assert b"east.csv" not in told
