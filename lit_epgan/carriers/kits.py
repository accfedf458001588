"""What FLARE reads: kits of certificates, keys and settings for a federation of sites, and a federation as a job."""

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from nvflare.lighter.prov_utils import prepare_builders
from nvflare.lighter.provision import prepare_project
from nvflare.lighter.provisioner import Provisioner
from nvflare.lighter.utils import serialize_cert

from lit_epgan.carriers.authority import LONGEST, ORGANISATION, OWNERS, ROOT, Authority, own_files
from lit_epgan.carriers.fit import SERVER
from lit_epgan.carriers.flare import MESSAGES, FitExecutor, RoundController
from lit_epgan.carriers.keys import MEMBERS, MemberList, fingerprint
from lit_epgan.carriers.protocol import FederateSettings
from lit_epgan.lib import bounds
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.runs.yaml_files import load_yaml

JOB = "lit_epgan"
CONTROLLER, EXECUTOR = (f"{kind.__module__}.{kind.__qualname__}" for kind in (RoundController, FitExecutor))
FETCH = 0.1  # seconds between two questions of a site for work
AUTHORITY = "authority"  # the folder whose key signs requests
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
TAKEN = (AUTHORITY, MEMBERS)  # beside the kits
OPERATORS = "project_admin"  # the role by FLARE's name
HEARTBEAT = 60  # seconds without a sign of life after which a site counts as gone
# what the operator may do at a site: start and stop jobs; no shell, no files, no code
RIGHTS = {
    "format_version": "1.0",
    "permissions": {
        OPERATORS: {
            "submit_job": "any", "manage_job": "any", "view": "any", "operate": "any",
            "clone_job": "none", "download_job": "none", "shell_commands": "none", "byoc": "none",
        }
    },
}  # fmt: skip


def write_job(folder: Path, institutions: Mapping[str, str], terms: FederateSettings, resumes: bool) -> Path:
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
        if taken := [
            name for name in members.owners if name.lower() in TAKEN or (name in members.sites and name == SERVER)
        ]:
            raise UserError(f"{path}: {taken[0]} cannot be a member's name: it stands for something else")
        if len(set(map(str.lower, members.owners))) < len(members.owners):
            raise UserError(f"{path}: the server, all sites and the operator need names of their own")
        if "@" not in members.operator or not OWNERS.fullmatch(members.operator):
            raise UserError(f"{path}: the operator is {members.operator!r}; give an e-mail address")
        if not HOST.fullmatch(members.host):
            raise UserError(f"{path}: the server's host is {members.host!r}; give a name or an address, without a port")
        if long := [name for name in (members.name, *members.owners) if len(name) > LONGEST]:
            raise UserError(
                f"{path}: {long[0]} has {len(long[0])} letters; a certificate holds names of at most {LONGEST}"
            )
        bounds.within("[1, 65535]", f"{path}: server", port=members.port)
        return members

    @property
    def owners(self) -> list[str]:
        """The names of all that have a kit."""
        return [self.host, *self.sites, self.operator]

    def project(self) -> dict[str, Any]:
        """The same as FLARE has it."""
        builders = "workspace.WorkspaceBuilder", "static_file.StaticFileBuilder"  # certificates are the authority's
        who = [{"name": self.host, "type": "server", "fed_learn_port": self.port}]
        who += [{"name": site, "type": "client"} for site in self.sites]
        who += [{"name": self.operator, "type": "admin", "role": OPERATORS}]
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


@dataclass(frozen=True)
class Provisioned:
    """What ``provision`` has done.

    Attributes:
        members: all that are known now.
        kits: the folders of those that have a certificate, by name.
        signed: digests of the requests that have been signed just now, by name.
        revoked: names of those that are members no more.
        ends: the days on which certificates end, by name.
    """

    members: MemberList
    kits: dict[str, Path]
    signed: dict[str, str]
    revoked: list[str]
    ends: dict[str, datetime]


def provision(members: Members, folder: Path, requests: Path) -> Provisioned:
    """Sign the requests that are in a folder, and write a kit, which holds no key, for each member that has a
    certificate. Who is not among the members any more is revoked. The first call makes the authority. UserError: a
    request is not its member's."""
    authority = Authority(folder / AUTHORITY, members.name)
    revoked = [name for name in authority.certificates() if name not in members.owners]
    for name in revoked:
        authority.revoke(name)
    signed = {}
    for name in members.owners:
        if (asked := requests / f"{name}.csr").is_file():
            host, role = name if name == members.host else None, OPERATORS if name == members.operator else None
            signed[name] = authority.sign(name, asked, host, role)
    certificates = authority.certificates()
    told = {name: fingerprint(each) for name, each in certificates.items()}
    known = MemberList(
        {members.name: fingerprint(authority.root)},
        *({name: told[name] for name in whose if name in told}
          for whose in ([members.host], members.sites, [members.operator])),
    )  # fmt: skip
    write(folder / MEMBERS, asdict(known))
    with tempfile.TemporaryDirectory() as made:
        project = members.project()
        with contextlib.redirect_stdout(io.StringIO()):
            context = Provisioner(made, prepare_builders(project)).provision(prepare_project(project))
        for name, certificate in certificates.items():
            kit, startup = folder / name, folder / name / "startup"
            shutil.copytree(Path(context["current_prod_dir"]) / name, kit, dirs_exist_ok=True)
            (startup / own_files(startup)[0]).write_bytes(serialize_cert(certificate))
            (startup / ROOT).write_bytes(serialize_cert(authority.root))
            shutil.copy(folder / MEMBERS, startup)
            if name != members.operator:
                _settle(kit, name == members.host)
    ends = {name: each.not_valid_after_utc for name, each in certificates.items()}
    kits = {name: folder / name for name in certificates}
    return Provisioned(known, kits, {name: digest for name, digest in signed.items() if digest}, revoked, ends)


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
    read(kit, "startup/fed_server.json", "server")
    return tuple(MemberList.read(kit / "startup" / MEMBERS).sites)


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
