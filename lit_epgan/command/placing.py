"""Where a run's things go: its folder, loggers and checkpoints, and the processes it is spread over."""

import difflib
import inspect
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from lit_epgan.errors import UserError
from lit_epgan.runs.run_folder import CHECKPOINTS, holds_a_run, is_first_rank, move_aside, wandb_has_key, wandb_id
from lit_epgan.text import printable

WANDB_MODES = ("online", "offline", "shared", "disabled", "dryrun", "run")


def say(sentence: str) -> None:
    """Tell the user on standard error, once for all ranks."""
    if is_first_rank():
        print(printable(sentence), file=sys.stderr, flush=True)


def make_room(folder: Path) -> None:
    """Move a run that the folder holds aside, and say where it is now."""
    if holds_a_run(folder) and is_first_rank():
        aside = move_aside(folder)
        say(
            f"{folder} held a run; it is now {aside}. "
            f"To continue it: --trainer.default_root_dir {aside} --ckpt_path last"
        )


def place_loggers(config: Namespace, folder: Path, subcommand: str) -> None:
    """Let every logger of a run's configuration that has no folder write to the run's.

    A Weights & Biases run is named by the method and the seed. Each evaluation is a run of its own, so that its numbers
    do not stand among the rounds of the training run.
    """
    trainer = config.trainer
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for logger in loggers:
        if not isinstance(logger, Namespace):  # None, True or False
            continue
        arguments = logger.init_args
        name = logger.class_path.rsplit(".", 1)[-1]
        if arguments.get("save_dir") in (None, "."):
            arguments.save_dir = str(folder)
        if name == "MetricsFile" and subcommand != "fit":
            arguments.file = f"{subcommand}_{arguments.file}"
        if name in ("WandbLogger", "WandbHistory"):
            _check_wandb_keys(logger.get("dict_kwargs") or {})
            _place_wandb(arguments, folder, subcommand)
            if arguments.get("name") is None and "WANDB_NAME" not in os.environ:
                arguments.name = _run_name(config, folder, subcommand)


def _check_wandb_keys(given: Mapping[str, Any]) -> None:
    import wandb

    known = list(inspect.signature(wandb.init).parameters)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}."
            raise UserError(f"trainer.logger.{name}: Weights & Biases has no such setting; {hint}")


def _run_name(config: Namespace, folder: Path, subcommand: str) -> str:
    """``digits, FedProx, seed 0``: the folder, the algorithm if there is one, the seed, and what is done if no fit."""
    algorithm = (config.get("federation.init_args.algorithm.class_path") or "").rsplit(".", 1)[-1]
    words = [folder.name, algorithm, f"seed {config.get('seed_everything')}", "" if subcommand == "fit" else subcommand]
    return ", ".join(word for word in words if word)


def _place_wandb(arguments: Namespace, folder: Path, subcommand: str) -> None:
    mode = os.environ.get("WANDB_MODE", "offline")
    if mode not in WANDB_MODES:
        raise UserError(f"WANDB_MODE is {mode!r} in the environment; it must be one of {', '.join(WANDB_MODES)}.")
    if "WANDB_MODE" not in os.environ and not wandb_has_key():
        arguments.offline = True
    arguments.job_type = (subcommand == "fit" and arguments.get("job_type")) or subcommand
    if is_first_rank() and subcommand == "fit":
        arguments.id = arguments.get("id") or wandb_id(folder)  # W&B resumes a known id


def place_checkpoints(trainer: Namespace, folder: Path) -> None:
    """Let every callback that has no folder for checkpoints write to the run's."""
    named = trainer.callbacks or []
    for callback in named if isinstance(named, list) else [named]:
        if "dirpath" in callback.get("init_args", {}) and callback.init_args.dirpath is None:
            callback.init_args.dirpath = str(folder / CHECKPOINTS)


def choose_strategy(trainer: Namespace, federated: bool) -> None:
    """With several processes a federation needs the strategy that leaves clients' gradients alone."""
    if federated and trainer.strategy == "auto" and _processes(trainer) > 1:
        trainer.strategy = "federated"


def _processes(trainer: Namespace) -> int:
    on_gpu = trainer.accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()
    devices = trainer.devices
    if devices in ("auto", -1, "-1"):
        count = torch.cuda.device_count() if on_gpu else 1
    elif isinstance(devices, str) and "," in devices:
        count = len([d for d in devices.split(",") if d.strip()])
    elif isinstance(devices, list):
        count = len(devices)
    else:
        count = int(devices) if str(devices).isdigit() else 1
    return count * int(trainer.num_nodes)
