"""``python -m lit_epgan federate``: a configuration's fit as a federation of processes, carried by NVIDIA FLARE."""

import argparse
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from lit_epgan.carriers.protocol import FederateSettings
from lit_epgan.cli.lightning_cli import FederatedCLI
from lit_epgan.cli.run_setup import fit_networks, make_room, say
from lit_epgan.datamodules.elsewhere import place
from lit_epgan.fit.ends import SENT, refuse_idle_policy
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.runs.checkpoints import newest_whole, require_whole
from lit_epgan.runs.config_files import resolve_configs
from lit_epgan.runs.run_folder import CHECKPOINTS, INSTITUTIONS, SERVER_LOG, default_folder, read_end

EVALUATION = "evaluation.csv"  # in an evaluation's folder
WORKSPACE = "flare"  # FLARE's own files, in the run's folder
MISSING = "federate needs NVIDIA FLARE, which is not installed: pip install -e '.[flare]'."
USAGE = """usage: python -m lit_epgan federate --config NAME.yaml [OPTIONS] [--KEY VALUE ...]
       python -m lit_epgan federate --request NAME
       python -m lit_epgan federate --sites MEMBERS.yaml [--requests FOLDER] [--kits FOLDER]
       python -m lit_epgan federate --assemble KIT
       python -m lit_epgan federate --site KIT --config NAME.yaml [--KEY VALUE ...]
       python -m lit_epgan federate --server KIT --operator KIT --config NAME.yaml [OPTIONS] [--KEY VALUE ...]

Trains what `fit` trains with the same words. The server and each client are processes of their own, which share
nothing but messages, carried by NVIDIA FLARE.

Without --site and --server all of them run on this machine. The run's folder holds the server's run, and
institutions/SITE each client's log, and sent.csv: all that has left it.

  --request NAME             makes a member's private key, NAME.key, and a request for a certificate, NAME.csr
  --sites MEMBERS.yaml       signs the requests of the server, each site and the operator, and writes a kit for each
                             (certificate, settings, no key); who is not in MEMBERS.yaml any more is revoked
  --requests FOLDER          which holds the requests; the current one by default
  --kits FOLDER              where kits go; kits by default
  --assemble KIT             moves the private key NAME.key from the current folder into the kit
  --site KIT                 takes part as a site, in every training, until stopped; the configuration says where its
                             own data are
  --server KIT               runs the server for one training; needs the kit of the --operator, who starts it

  --evaluate FILE            trains nothing: each client tests this checkpoint (or `last`) on its own test data, and the
                             server prints a table and writes it to evaluation/evaluation.csv
  --dry_run                  list what each institution would send first, and send nothing
  --least N                  institutions without which the run ends; 1 by default
  --patience SECONDS         that an institution may take for an answer, or it is left out; an hour by default
  --gather SECONDS           that the start waits for institutions; then it goes on with at least N; an hour by default
  --half_messages            large tensors travel as bfloat16, in half their bytes; each number within .4 %
  --secure_aggregation       the server sees sums of the institutions' reports alone; at least three take part
  --ckpt_path last           goes on where the federation was stopped
  --federation.policy FILE   what the institutions let happen to their data
  --KEY VALUE                overrides a key of the configuration, as with fit"""


class Described(FederatedCLI):
    """Reads a configuration, and builds what it describes; nothing is trained, nothing is written."""

    folder: Path
    federation: Any

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        root = config.trainer.default_root_dir
        self.folder = Path(root or default_folder([str(path) for path in config.config or []])).resolve()
        self.settings, self.accept_changes = {}, False
        fit_networks(config, self._words, str(self.subcommand))
        config.trainer.logger = False

    def _run_subcommand(self, subcommand: str) -> None:
        self.federation = self._get(self.config_init, "federation")
        if self.federation is None:
            raise UserError("federate needs a federation: the configuration has none.")

    def clients(self) -> list[str]:
        """Names of the clients that hold data, which is set up to know them."""
        self.datamodule.prepare_data()
        self.datamodule.setup("fit")
        return [self.datamodule.client_names[k] for k in self.datamodule.active]


def federate(args: Sequence[str]) -> int:
    """Run the command; a UserError says if FLARE is missing, or who has ended early."""
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    own, rest = _own(list(args))
    if own.request is not None or own.sites is not None or own.assemble is not None:
        return _certify(own, rest)
    words = resolve_configs(["fit", *rest])
    if own.site is not None:
        return _attend(own, words)
    if own.server is not None:
        return _serve(own, words)
    return _simulate(own, words)


def _simulate(own: argparse.Namespace, words: list[str]) -> int:
    found = Described(words)
    names, (folder, words) = found.clients(), _evaluating(found, own, words)
    flare = _flare("deployment")
    resumes = _room(folder, own)
    say(f"A server and {len(names)} institutions ({few(names)}), carried by NVIDIA FLARE. All is in {folder}")
    with followed(folder / SERVER_LOG):
        flare.simulate(words[1:], folder, names, folder / WORKSPACE, _terms(own), resumes)
    return _ended(folder, own)


def _serve(own: argparse.Namespace, words: list[str]) -> int:
    if own.operator is None:
        raise UserError("--server needs --operator KIT, the kit of who starts the training.")
    deployment, kits, plans = _flare("deployment"), _flare("kits"), _flare("fit")
    kit = Path(own.server)
    names, operator = kits.sites_of(kit), Path(own.operator)
    if not any(word.split("=")[0] == "--data" for word in words):
        words = [*words, "--data", "lit_epgan.datamodules.Elsewhere"]
    found = Described(words)
    refuse_idle_policy(found.federation.policy)
    folder, words = _evaluating(found, own, words)
    for each in (operator, kit):
        told = _flare("authority").check_kit(each)
    resumes = _room(folder, own)
    log = folder / SERVER_LOG
    words = [*words[1:], "--trainer.default_root_dir", str(folder)]
    plan = plans.FitPlan(words, str(Path.cwd()), str(folder), str(log))
    say(f"The server of {len(names)} sites ({few(names)}). All is in {folder}")
    say(told)
    with followed(log):
        deployment.serve(kit, operator, plan, _terms(own, names), resumes, say)
    return _ended(folder, own)


def _attend(own: argparse.Namespace, words: list[str]) -> int:
    deployment, plans = _flare("deployment"), _flare("fit")
    kit = Path(own.site)
    site, told = deployment.site_of(kit), _flare("authority").check_kit(kit)
    found = Described(words)
    found.clients()
    place(found.datamodule, [site, "elsewhere"], site)
    folder = found.folder
    words = plans.at_institution([*words[1:], "--trainer.default_root_dir", str(folder)])
    plan = plans.FitPlan(words, str(Path.cwd()), str(folder), str(folder / "fit.log"), site)
    say(f"{site} takes part until it is stopped. {folder} holds fit.log, and {SENT}: all that has left. Ctrl-C stops.")
    say(told)
    with followed(folder / "fit.log"):
        deployment.attend(kit, plan, say)
    return 0


def _certify(own: argparse.Namespace, rest: list[str]) -> int:
    """What has to do with certificates; nothing is trained."""
    if rest:
        raise UserError(f"--request, --sites and --assemble train nothing: {' '.join(rest)} has no meaning there.")
    authority = _flare("authority")
    if own.request is not None:
        path, digest = authority.request(own.request, Path())
        say(
            f"{own.request}.key: stays here, where nobody else can read it. `federate --assemble KIT` will look for it."
        )
        say(f"{path}: to who keeps the authority. By telephone, so that nobody puts another in its place: {digest}")
    elif own.assemble is not None:
        name, members = authority.assemble(Path(own.assemble), Path())
        say(f"{own.assemble} is whole: {name}'s key is in it. Nobody else is to read it.")
        say(f"Members: {members.digest}. By telephone: all others see the same ({', '.join(members.sites)}).")
    else:
        _provision(own)
    return 0


def _provision(own: argparse.Namespace) -> None:
    kits = _flare("kits")
    members, folder = kits.Members.read(Path(own.sites)), Path(own.kits)
    done = kits.provision(members, folder, Path(own.requests))
    for name, digest in done.signed.items():
        say(f"{done.kits[name]}: to {name}, for it has a new certificate. First, by telephone, ask {name}: {digest}")
    for name in done.revoked:
        say(f"{name} is revoked, as soon as all others have the new list.")
    for name in members.owners:
        if name not in done.kits:
            say(f"{name} has no certificate: let it run `federate --request {name}` and send {name}.csr.")
        else:
            say(f"{name}'s certificate holds until {done.ends[name]:%Y-%m-%d}.")
    say(f"{folder / kits.MEMBERS}: to all, into KIT/startup (a new kit has it). Members: {done.members.digest}")
    say(f"{folder / kits.AUTHORITY}: to nobody. It can sign; keep it where no network reaches it.")


def _flare(module: str) -> Any:
    """A module of ``lit_epgan.carriers``; a UserError where FLARE is not installed."""
    try:
        return importlib.import_module(f"lit_epgan.carriers.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != "nvflare":
            raise
        raise UserError(MISSING) from error


def _evaluating(found: Described, own: argparse.Namespace, words: list[str]) -> tuple[Path, list[str]]:
    """The run's folder and words; those of an evaluation, where one is asked for."""
    if own.evaluate is None:
        return found.folder, words
    if own.ckpt_path is not None:
        raise UserError("--evaluate names the checkpoint: leave --ckpt_path out.")
    path = newest_whole(found.folder / CHECKPOINTS) if own.evaluate == "last" else Path(own.evaluate).resolve()
    require_whole(path, to_train=False)
    return found.folder / "evaluation", [*words, "--ckpt_path", str(path)]


def _room(folder: Path, own: argparse.Namespace) -> bool:
    """Make room for a new run; whether the old one is gone on with."""
    if own.ckpt_path is None:
        make_room(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return False
    if own.ckpt_path != "last":
        raise UserError(
            f"--ckpt_path {own.ckpt_path}: a federation goes on from the `last` checkpoints of all its ends."
        )
    if not any((folder / CHECKPOINTS).glob("*.ckpt")):
        raise UserError(f"{folder / CHECKPOINTS} holds no checkpoint to go on from.")
    return True


def _ended(folder: Path, own: argparse.Namespace) -> int:
    if own.dry_run:
        _tell(folder)
        return 0
    if own.evaluate is not None:
        if not (folder / EVALUATION).is_file():
            raise UserError(f"nothing was evaluated: {folder / SERVER_LOG} says why.")
        return 0
    end = read_end(folder)
    if end is None or not end.finished:
        raise UserError(f"the federation has ended early: {folder / SERVER_LOG} says why.")
    say(f"The model is in {newest_whole(folder / CHECKPOINTS)}")
    return 0


def _own(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command's own words, and those that are left."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--request", "--sites", "--assemble", "--site", "--server", "--operator", "--ckpt_path", "--evaluate"):
        parser.add_argument(name)
    for name in ("--dry_run", "--secure_aggregation", "--half_messages"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--kits", default="kits")
    parser.add_argument("--requests", default=".")
    parser.add_argument("--least", type=int, default=FederateSettings.least)
    parser.add_argument("--patience", type=float, default=FederateSettings.patience)
    parser.add_argument("--gather", type=float, default=FederateSettings.gather)
    try:
        own, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; federate --help lists the options.") from error
    if own.least < 1 or not own.patience > 0 or not own.gather > 0:
        raise UserError(
            f"--least {own.least}, --patience {own.patience:g} and --gather {own.gather:g}: give at least 1, and "
            "more than 0."
        )
    return own, rest


def _terms(own: argparse.Namespace, names: tuple[str, ...] = ()) -> FederateSettings:
    return FederateSettings(
        own.patience, own.gather, own.least, names, own.dry_run, secure=own.secure_aggregation, half=own.half_messages,
        evaluate=own.evaluate is not None,
    )  # fmt: skip


def _tell(folder: Path) -> None:
    """Print what each institution would have sent."""
    import pandas as pd  # only a dry run reads the tables

    for site in sorted((folder / INSTITUTIONS).iterdir()):
        listed = site / SENT
        if not listed.is_file():
            raise UserError(f"{site.name} has nothing to send: {site / 'fit.log'} says why.")
        print(f"{site.name} would send first:\n{pd.read_csv(listed).to_string(index=False, na_rep='')}")
    print("Nothing was sent.")


@contextmanager
def followed(log: Path) -> Iterator[None]:
    """What a process writes to ``log`` meanwhile is printed, too; also where another file takes its place."""
    over = Event()
    before = log.stat() if log.is_file() else None

    def follow() -> None:
        which, at = (before.st_ino, before.st_size) if before is not None else (0, 0)
        while True:
            last = over.wait(0.2)
            if log.is_file():
                with log.open(encoding="utf-8", errors="replace") as file:
                    now = os.fstat(file.fileno()).st_ino
                    file.seek(at if now == which else 0)
                    sys.stderr.write(file.read())
                    which, at = now, file.tell()
            if last:
                return

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
