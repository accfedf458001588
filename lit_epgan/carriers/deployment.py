"""A federation of machines, started from their kits; and one on a single machine, by FLARE's simulator."""

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from nvflare.fuel.flare_api.api_spec import SessionClosed
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from lit_epgan.carriers.fit import SERVER, VARIABLE, FitPlan, at_institution
from lit_epgan.carriers.flare_process import LEAVING, end_below
from lit_epgan.carriers.kits import CONTROLLER, EXECUTOR, read, store_in, write, write_job
from lit_epgan.carriers.protocol import FederateSettings
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.runs.run_folder import INSTITUTIONS, SERVER_LOG

SIMULATOR = "nvflare.private.fed.app.simulator.simulator"
RUN_FITS = "fits"  # in the run's folder: what each process is to do
T = TypeVar("T")
STORE = "store"  # of jobs, in the server's kit: gone with each start
FITS = "local/fits"  # in a kit
LOOK = 1.0  # seconds between two looks
FLARE_LOG = "flare.log"  # in a kit: what FLARE's process has printed
REFUSED = {  # by what FLARE says of it
    b"registration rejected": "The server does not let this site in: its list of members has another certificate of "
    "this name, or none. Ask who keeps the authority, and compare the list's digits with the other sites.",
    b"CERTIFICATE_VERIFY_FAILED": "What answers at the server's address has no certificate of this kit's authority: "
    "it is another federation's, or the kit is.",
}
PROCESS = "lit_epgan.carriers.flare_process"
PROGRAMS = {
    "server": ("nvflare.private.fed.app.server.server_train", "fed_server.json"),
    "site": ("nvflare.private.fed.app.client.client_train", "fed_client.json"),
}


def simulate(
    words: Sequence[str], folder: Path, names: Sequence[str], workspace: Path, terms: FederateSettings, resumes: bool
) -> None:
    """Run a fit with these words after ``fit`` to its end, its own files in ``folder`` and FLARE's in ``workspace``.

    ``names`` are the clients' that hold data; each is a site. With ``resumes`` all go on from their last checkpoints.
    """
    root, here, fits = "--trainer.default_root_dir", str(Path.cwd()), folder / RUN_FITS
    sites = {f"site-{k + 1}": name for k, name in enumerate(names)}
    FitPlan([*words, root, str(folder)], here, str(folder), str(folder / SERVER_LOG)).write(fits, SERVER)
    for site, name in sites.items():
        own = folder / INSTITUTIONS / site
        plan = FitPlan(at_institution([*words, root, str(own)]), here, str(own), str(own / "fit.log"), name)
        plan.write(fits, site)
    with tempfile.TemporaryDirectory() as made:
        job = write_job(Path(made), sites, terms, resumes)
        write(workspace / "local/resources.json", {"format_version": 2, "class_allow_list": [CONTROLLER, EXECUTOR]})
        options = ["-w", str(workspace), "-c", ",".join(sites), "-t", str(len(sites)), "-l", "ERROR"]
        command = [sys.executable, "-m", SIMULATOR, str(job), *options]
        subprocess.run(command, env=os.environ | {VARIABLE: str(fits)}, check=False)


def attend(kit: Path, plan: FitPlan, say: Callable[[str], None]) -> None:
    """Take part as a site, training after training, until stopped; its fits go by ``plan``. UserError: it is no site's
    kit, or FLARE's client has ended."""
    plan.write(kit / FITS, plan.name)
    log = kit / FLARE_LOG
    begin, said = log.stat().st_size if log.is_file() else 0, set[str]()
    with running("site", kit) as client:
        while (code := client.poll()) is None:
            time.sleep(LOOK)
            with log.open("rb") as file:
                file.seek(begin)
                told = file.read()
            begin += told.rfind(b"\n") + 1
            for why in (each for sign, each in REFUSED.items() if sign in told and each not in said):
                say(why)
                said.add(why)
    raise UserError(f"FLARE's client has ended with {code}: {log} says why")


def serve(
    kit: Path, operator: Path, plan: FitPlan, terms: FederateSettings, resumes: bool, say: Callable[[str], None]
) -> None:
    """Run the server from its start to the end of one training.

    ``operator`` is the kit of who starts it; with ``resumes`` all go on from their last checkpoints. UserError: a kit
    is of another kind, or too few sites have come."""
    plan.write(kit / FITS, SERVER)
    store = kit.resolve() / STORE
    shutil.rmtree(store, ignore_errors=True)
    store_in(kit, store)
    with running("server", kit) as server, contextlib.closing(Operator(operator, server, terms.gather)) as starts:
        here = _gathered(starts, terms, say)
        job = write_job(store, {site: site for site in here}, terms, resumes)
        token = secrets.token_hex(16)  # the same job, however often it is sent
        starts.follow(starts.ask(lambda session: session.submit_job(str(job), token)))


@contextmanager
def running(role: str, kit: Path) -> Iterator[subprocess.Popen[bytes]]:
    """FLARE's process of a kit, ended at the end with all that it has started. UserError: the kit is of another
    kind."""
    program, settings = PROGRAMS[role]
    read(kit, f"startup/{settings}", role)
    uid = [f"uid={site_of(kit)}"] if role == "site" else []
    options = ["secure_train=true", *uid, "org=federation", "config_folder=config"]
    words = ["-m", str(kit.resolve()), "-s", settings, "--set", *options]
    command = [sys.executable, "-m", PROCESS, str(os.getpid()), program, *words]
    environment = os.environ | {VARIABLE: str((kit / FITS).resolve())}
    with (kit / FLARE_LOG).open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        end_below(process.pid)
        process.terminate()
        try:
            process.wait(LEAVING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def site_of(kit: Path) -> str:
    """The name of a kit's site. UserError: it is no site's kit."""
    return str(read(kit, "startup/fed_client.json", "site")["client"]["fqsn"])


class Operator:
    """Who starts trainings, as FLARE's server, started on this machine, knows them. It may not be reached for
    ``patience`` seconds. UserError: ``kit`` is no operator's, or the server does not start."""

    def __init__(self, kit: Path, server: subprocess.Popen[bytes], patience: float) -> None:
        name = read(kit, "startup/fed_admin.json", "operator")["admin"]["username"]
        self._name, self._kit, self._server, self._patience = str(name), str(kit.resolve()), server, patience
        self._session: Session | None = None

    def ask(self, what: Callable[[Session], T]) -> T:
        """Ask the server, again and again where it is not reached. UserError: it has not been reached for long, or has
        ended."""
        end = time.monotonic() + self._patience
        while True:
            try:
                if self._session is None:
                    self._session = new_secure_session(self._name, self._kit)
                return what(self._session)
            except (ConnectionError, SessionClosed) as error:
                self.close()
                if time.monotonic() > end or self._server.poll() is not None:
                    raise UserError("FLARE's server is not reached: flare.log in its kit says why") from error
                time.sleep(LOOK)

    def follow(self, identity: str) -> None:
        while not str(self.ask(lambda s: s.get_job_meta(identity)).get("status", "")).startswith("FINISHED"):
            time.sleep(LOOK)

    def close(self) -> None:
        if self._session is not None:
            with contextlib.suppress(Exception):  # there may be nobody to say it to
                self._session.close()
            self._session = None


def _gathered(operator: Operator, terms: FederateSettings, say: Callable[[str], None]) -> list[str]:
    """Those who are there when all are, or when they have been waited for; an error where they are too few."""
    end, said = time.monotonic() + terms.gather, ""
    while True:
        connected = {client.name for client in operator.ask(lambda s: s.get_system_info()).client_info}
        here = [name for name in terms.names if name in connected]
        missing = [name for name in terms.names if name not in connected]
        if not missing:
            return here
        if time.monotonic() > end:
            break
        if few(missing) != said:
            said = few(missing)
            say(f"Waiting for {said}.")
        time.sleep(LOOK)
    if len(here) < terms.least:
        raise UserError(
            f"{len(here)} sites have come of at least {terms.least}; {few(missing)} did not call, or were refused: "
            f"then {FLARE_LOG} in the server's kit says why"
        )
    say(f"Begins without {few(missing)}.")
    return here
