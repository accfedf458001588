"""``python -m lit_epgan federate``: a configuration's fit as a federation of processes, carried by NVIDIA FLARE."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import pandas

from lit_epgan.callbacks.remote import SENT
from lit_epgan.command.lightning_cli import FederatedCLI
from lit_epgan.command.placing import make_room, say
from lit_epgan.errors import UserError
from lit_epgan.listing import few
from lit_epgan.remote.link import Terms
from lit_epgan.runs.config_files import resolve_configs
from lit_epgan.runs.end import read_end
from lit_epgan.runs.run_folder import INSTITUTIONS, SERVER_LOG, default_folder

WORKSPACE = "flare"  # FLARE's own files, in the run's folder
MISSING = "federate needs NVIDIA FLARE, which is not installed: pip install -e '.[flare]'."
USAGE = """usage: python -m lit_epgan federate --config NAME.yaml [OPTIONS] [--KEY VALUE ...]

Trains what `fit` trains with the same words, as an NVIDIA FLARE job on this machine, by FLARE's simulator.
The server and each client are processes of their own, which share nothing but messages.
The run's folder holds the server's run, and institutions/SITE each client's log, and sent.csv: all that has left it.

  --dry_run                  list what each institution would send first, and send nothing
  --least N                  institutions without which the run ends; 1 by default
  --patience SECONDS         that an institution may take for an answer, or it is left out; an hour by default
  --ckpt_path last           goes on where the federation was stopped
  --federation.policy FILE   what the institutions let happen to their data
  --KEY VALUE                overrides a key of the configuration, as with fit"""


class Clients(FederatedCLI):
    """Reads a configuration, and finds out which clients hold data; nothing is trained, nothing is written."""

    names: list[str]
    folder: Path

    def before_instantiate_classes(self) -> None:
        """Nothing is placed."""
        config = self.config[self.subcommand]
        root = config.trainer.default_root_dir
        self.folder = Path(root or default_folder([str(path) for path in config.config or []]))
        self.settings, self.accept_changes = {}, False
        config.trainer.logger = False

    def _run_subcommand(self, subcommand: str) -> None:
        datamodule = self.datamodule
        if self._get(self.config_init, "federation") is None:
            raise UserError("federate needs a federation: the configuration has none.")
        datamodule.prepare_data()
        datamodule.setup("fit")
        self.names = [datamodule.client_names[k] for k in datamodule.active]


def federate(args: Sequence[str]) -> int:
    """Run the command; 0 if the job has ended well.

    Raises:
        UserError: FLARE is missing, or the fit of the server or of an institution has ended early.
    """
    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    own, rest = _own(list(args))
    words = resolve_configs(["fit", *rest])
    found = Clients(words)
    try:
        from lit_epgan.flare.simulation import simulate
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != "nvflare":
            raise
        raise UserError(MISSING) from error
    folder = found.folder.resolve()
    if found.config.fit.ckpt_path is None:
        make_room(folder)
    folder.mkdir(parents=True, exist_ok=True)
    institutions = f"{len(found.names)} institutions ({few(found.names)})"
    say(f"A server and {institutions}, carried by NVIDIA FLARE. All is in {folder}")
    with followed(folder / SERVER_LOG):
        simulate(words[1:], folder, found.names, folder / WORKSPACE, own)
    if own.dry:
        _tell(folder)
        return 0
    end = read_end(folder)
    if end is None or not end.finished:
        raise UserError(f"the federation has ended early: {folder / SERVER_LOG} and {folder / INSTITUTIONS} say why.")
    return 0


def _own(args: list[str]) -> tuple[Terms, list[str]]:
    """The command's own words, and those that are left.

    Raises:
        UserError: a number is none, or out of its range.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--dry_run", action="store_true")
    parser.add_argument("--least", type=int, default=Terms.least)
    parser.add_argument("--patience", type=float, default=Terms.patience)
    try:
        own, rest = parser.parse_known_args(args)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; federate --help lists the options.") from error
    if own.least < 1 or not own.patience > 0:
        raise UserError(f"--least {own.least} and --patience {own.patience:g}: give at least 1, and more than 0.")
    return Terms(own.patience, own.least, own.dry_run), rest


def _tell(folder: Path) -> None:
    """Print what each institution would have sent.

    Raises:
        UserError: one has come to nothing that it would send.
    """
    for site in sorted((folder / INSTITUTIONS).iterdir()):
        listed = site / SENT
        if not listed.is_file():
            raise UserError(f"{site.name} has nothing to send: {site / 'fit.log'} says why.")
        print(f"{site.name} would send first:\n{pandas.read_csv(listed).to_string(index=False, na_rep='')}")
    print("Nothing was sent.")


@contextmanager
def followed(log: Path) -> Iterator[None]:
    """What a process writes to ``log`` meanwhile is printed, too."""
    over = Event()

    def follow() -> None:
        at = 0
        while True:
            last = over.wait(0.2)
            if log.is_file():
                with log.open(encoding="utf-8", errors="replace") as file:
                    file.seek(at)
                    sys.stderr.write(file.read())
                    at = file.tell()
            if last:
                return

    thread = Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
