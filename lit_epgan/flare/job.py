"""A federation as a FLARE job. The job says who takes part and on which terms; what to train is no part of it."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_epgan.flare.controller import NOTES, RoundController
from lit_epgan.flare.executor import SeatExecutor
from lit_epgan.remote.link import Terms

NAME = "lit_epgan"
CONTROLLER, EXECUTOR = (f"{kind.__module__}.{kind.__qualname__}" for kind in (RoundController, SeatExecutor))
FETCH = 0.1  # seconds between two questions of a site for work


def write_job(folder: Path, institutions: Mapping[str, str], terms: Terms, resumes: bool) -> Path:
    """Write the job; its folder. It holds no code, which sites would refuse.

    Args:
        folder: where to.
        institutions: by FLARE's name of a site, the client that it is.
        terms: the federation's.
        resumes: whether all go on from their last checkpoints.
    """
    told = {"terms": asdict(terms), "resumes": resumes}
    controller = {"path": CONTROLLER, "args": {"institutions": dict(institutions), **told}}
    job = folder / NAME
    at_server, at_site = f"{NAME}_server", f"{NAME}_site"
    _write(
        job / "meta.json",
        name=NAME,
        resource_spec={},
        min_clients=min(terms.least, len(institutions)),
        deploy_map={at_server: ["server"], at_site: list(institutions)},
    )
    _write(job / at_server / "config/config_fed_server.json", workflows=[{"id": "controller", **controller}])
    executor = {"tasks": [NOTES], "executor": {"path": EXECUTOR, "args": told}}
    _write(job / at_site / "config/config_fed_client.json", executors=[executor], default_task_fetch_interval=FETCH)
    return job


def _write(path: Path, **told: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    both = {} if path.name == "meta.json" else {"format_version": 2, "components": []}
    path.write_text(json.dumps({**both, **told}, indent=2))
