"""What FLARE reads: kits of certificates, keys and settings for a federation of sites, and a federation as a job."""

import contextlib
import io
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner

from lit_epgan.carriers.flare import MESSAGES, FitExecutor, RoundController
from lit_epgan.carriers.protocol import Terms
from lit_epgan.errors import UserError
from lit_epgan.listing import few
from lit_epgan.runs.yaml_files import load_yaml

JOB = "lit_epgan"
CONTROLLER, EXECUTOR = (f"{kind.__module__}.{kind.__qualname__}" for kind in (RoundController, FitExecutor))
FETCH = 0.1  # seconds between two questions of a site for work
MEMBERS = "members.json"  # in the server's kit
AUTHORITY = "authority"  # the folder that can make further kits
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
ORGANISATION = "federation"
HEARTBEAT = 60  # seconds without a sign of life after which a site counts as gone
# what the operator may do at a site: start and stop jobs; no shell, no files, no code
RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        "project_admin": {
            "submit_job": "any", "manage_job": "any", "view": "any", "operate": "any",
            "clone_job": "none", "download_job": "none", "shell_commands": "none", "byoc": "none",
        }
    },
}  # fmt: skip


def write_job(folder: Path, institutions: Mapping[str, str], terms: Terms, resumes: bool) -> Path:
    """Write the job; its folder. It holds no code, which sites would refuse.

    ``institutions`` are clients by FLARE's names of their sites; with ``resumes`` all go on from their checkpoints.
    """
    told = {"terms": asdict(terms), "resumes": resumes}
    controller = {"path": CONTROLLER, "args": {"institutions": dict(institutions), **told}}
    job = folder / JOB
    at_server, at_site = f"{JOB}_server", f"{JOB}_site"
    deployed = {at_server: ["server"], at_site: list(institutions)}
    least = min(terms.least, len(institutions))
    write(job / "meta.json", {"name": JOB, "resource_spec": {}, "min_clients": least, "deploy_map": deployed})
    both = {"format_version": 2, "components": []}
    workflows = [{"id": "controller", **controller}]
    write(job / at_server / "config/config_fed_server.json", {**both, "workflows": workflows})
    executors = [{"tasks": [MESSAGES], "executor": {"path": EXECUTOR, "args": told}}]
    fetch = {"executors": executors, "default_task_fetch_interval": FETCH}
    write(job / at_site / "config/config_fed_client.json", {**both, **fetch})
    return job


@dataclass(frozen=True)
class Members:
    """Who takes part.

    Attributes:
        name: of the federation.
        host, port: where the server is reached.
        sites: their names.
        operator: who starts trainings, as an e-mail address.
    """

    name: str
    host: str
    port: int
    sites: list[str]
    operator: str

    @classmethod
    def read(cls, path: Path) -> "Members":
        """The members that a file lists. UserError: the file is not as it should be."""
        example = "name: hospitals, server: {host: fl.example.org, port: 8002}, sites: [north, south], operator: a@b.c"
        try:
            told = load_yaml(path)
            members = cls(
                str(told["name"]), str(told["server"]["host"]), int(told["server"]["port"]),
                [str(site) for site in told["sites"]], str(told["operator"]),
            )  # fmt: skip
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} does not list a federation ({error}); it needs {example}") from error
        strange = [name for name in (members.name, *members.sites) if not NAME.fullmatch(name)]
        if strange or not members.sites:
            raise UserError(f"{path}: {few(strange) or 'no site'} cannot be a name; use letters, digits, - and _")
        if members.host in members.sites or len(set(members.sites)) < len(members.sites):
            raise UserError(f"{path}: the server and all sites need names of their own")
        if "@" not in members.operator:
            raise UserError(f"{path}: the operator is {members.operator!r}; give an e-mail address")
        return members

    def project(self) -> dict[str, Any]:
        """The same as FLARE has it."""
        builders = "workspace.WorkspaceBuilder", "static_file.StaticFileBuilder", "cert.CertBuilder"
        who = [{"name": self.host, "type": "server", "fed_learn_port": self.port}]
        who += [{"name": site, "type": "client"} for site in self.sites]
        who += [{"name": self.operator, "type": "admin", "role": "project_admin"}]
        return {
            "api_version": 3,
            "name": self.name,
            "description": self.name,
            "participants": [each | {"org": ORGANISATION} for each in who],
            "builders": [
                {"path": f"nvflare.lighter.impl.{each}", "args": {"scheme": "grpc"} if "static" in each else {}}
                for each in builders
            ],
        }


def provision(members: Members, folder: Path) -> dict[str, Path]:
    """Write the kits that are not there yet; the new kits' folders by name.

    The first call makes the authority, later ones add members under it.
    """
    project = members.project()
    with contextlib.redirect_stdout(io.StringIO()):
        provisioner = Provisioner(str(folder / AUTHORITY), prepare_builders(project))
        context = provisioner.provision(prepare_project(project))
    (folder / AUTHORITY).chmod(0o700)
    made = Path(context["current_prod_dir"])
    kits: dict[str, Path] = {}
    for name in [members.host, *members.sites, members.operator]:
        if not (folder / name).exists():
            shutil.move(made / name, folder / name)
            (folder / name).chmod(0o700)
            kits[name] = folder / name
    shutil.rmtree(made)
    write(folder / members.host / "local" / MEMBERS, {"sites": members.sites})
    for name, kit in kits.items():
        if name != members.operator:
            _settle(kit, name == members.host)
    return kits


def _settle(kit: Path, server: bool) -> None:
    """Nothing runs there but its end of a federation.

    The server learns soon of a site that is gone. Nothing leaves a site but its answers.
    """
    resources: dict[str, Any] = json.loads((kit / "local" / "resources.json.default").read_text())
    resources["class_allow_list"] = [CONTROLLER if server else EXECUTOR]
    if server:
        resources["servers"][0]["heart_beat_timeout"] = HEARTBEAT
    else:
        resources["allow_log_streaming"] = False
        resources["components"] = [c for c in resources["components"] if c["id"] != "site_log_streamer"]
    write(kit / "local/resources.json", resources)
    write(kit / "local/authorization.json", RIGHTS)


def sites_of(kit: Path) -> tuple[str, ...]:
    """The names of all sites, as the server's kit has them. UserError: it is no server's kit."""
    return tuple(read(kit, f"local/{MEMBERS}", "server")["sites"])


def read(kit: Path, file: str, whose: str) -> dict[str, Any]:
    """A JSON file of a kit. UserError: it is not there, so that this is no server's, site's or operator's kit."""
    if not (kit / file).is_file():
        raise UserError(f"{kit} is no {whose}'s kit: {kit / file} does not exist")
    return json.loads((kit / file).read_text())


def store_in(kit: Path, folder: Path) -> None:
    """Let a server's jobs lie in a folder, by its absolute path, which FLARE asks for."""
    path = kit / "local" / "resources.json"
    resources = json.loads(path.read_text())
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(folder / "snapshots")
    jobs = next(each for each in resources["components"] if each["id"] == "job_manager")
    jobs["args"]["uri_root"] = str(folder / "jobs")
    write(path, resources)


def write(path: Path, what: dict[str, Any]) -> None:
    """Write JSON, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what, indent=2) + "\n")
