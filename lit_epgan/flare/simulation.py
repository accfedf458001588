"""A federation as a FLARE job on one machine, by FLARE's simulator: a process for the server and one for each site."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from nvflare.job_config.api import FedJob

from lit_epgan.flare.controller import NOTES, RoundController
from lit_epgan.flare.executor import SeatExecutor
from lit_epgan.remote.link import Terms
from lit_epgan.runs.run_folder import INSTITUTIONS, SERVER_LOG

FETCH = 0.1  # seconds between two questions of a site for work
# an institution's own fit evaluates and logs nothing: the server does
QUIET = {
    "limit_val_batches": "0",
    "logger": "false",
    "enable_progress_bar": "false",
    "callbacks": '[{"class_path": "lit_epgan.callbacks.RoundCheckpoint"}]',
}


def job(words: Sequence[str], folder: Path, names: Sequence[str], terms: Terms) -> FedJob:
    """The job.

    Args:
        words: of the fit, after ``fit``.
        folder: the run's.
        names: the clients' that hold data; each is a site.
        terms: the federation's.
    """
    root, here = "--trainer.default_root_dir", str(Path.cwd())
    made = FedJob("lit_epgan", min_clients=len(names))
    sites = {f"site-{k + 1}": name for k, name in enumerate(names)}
    quiet = [word for key, value in QUIET.items() for word in (f"--trainer.{key}", value)]
    server = [*words, root, str(folder)]
    made.to_server(RoundController(server, here, str(folder / SERVER_LOG), sites, asdict(terms)))
    for site, name in sites.items():
        own = folder / INSTITUTIONS / site
        executor = SeatExecutor([*words, *quiet, root, str(own)], here, str(own / "fit.log"), name, asdict(terms))
        made.to(executor, site, tasks=[NOTES])
        made.to({"default_task_fetch_interval": FETCH}, site)
    return made


def simulate(words: Sequence[str], folder: Path, names: Sequence[str], workspace: Path, terms: Terms) -> None:
    """Run it to its end."""
    job(words, folder, names, terms).simulator_run(str(workspace), log_config="ERROR")
