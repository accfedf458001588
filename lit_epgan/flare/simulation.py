"""A federation on one machine, by FLARE's simulator: a process for the server and one for each site."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lit_epgan.flare.job import CONTROLLER, EXECUTOR, write_job
from lit_epgan.flare.plan import SERVER, VARIABLE, Plan, at_institution
from lit_epgan.remote.link import Terms
from lit_epgan.runs.run_folder import INSTITUTIONS, SERVER_LOG

SIMULATOR = "nvflare.private.fed.app.simulator.simulator"
FITS = "fits"  # in the run's folder: what each process is to do


def allow(folder: Path, classes: list[str]) -> None:
    """Let FLARE build these classes alone."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "resources.json").write_text(json.dumps({"format_version": 2, "class_allow_list": classes}))


def simulate(
    words: Sequence[str], folder: Path, names: Sequence[str], workspace: Path, terms: Terms, resumes: bool
) -> None:
    """Run it to its end.

    Args:
        words: of the fit, after ``fit``.
        folder: the run's.
        names: the clients' that hold data; each is a site.
        workspace: FLARE's own files.
        terms: the federation's.
        resumes: whether all go on from their last checkpoints.
    """
    root, here, fits = "--trainer.default_root_dir", str(Path.cwd()), folder / FITS
    sites = {f"site-{k + 1}": name for k, name in enumerate(names)}
    Plan([*words, root, str(folder)], here, str(folder), str(folder / SERVER_LOG)).write(fits, SERVER)
    for site, name in sites.items():
        own = folder / INSTITUTIONS / site
        plan = Plan(at_institution([*words, root, str(own)]), here, str(own), str(own / "fit.log"), name)
        plan.write(fits, site)
    with tempfile.TemporaryDirectory() as made:
        job = write_job(Path(made), sites, terms, resumes)
        allow(workspace / "local", [CONTROLLER, EXECUTOR])
        options = ["-w", str(workspace), "-c", ",".join(sites), "-t", str(len(sites)), "-l", "ERROR"]
        command = [sys.executable, "-m", SIMULATOR, str(job), *options]
        subprocess.run(command, env=os.environ | {VARIABLE: str(fits)}, check=False)
