"""What is settled before a run: folder, loggers, checkpoints, strategy, its networks' images, and its settings."""

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from lit_epgan.fit.loop import steps_logged
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import meant, printable
from lit_epgan.runs.run_folder import (
    CHECKPOINTS,
    MLFLOW_ID,
    holds_a_run,
    is_first_rank,
    move_aside,
    wandb_has_key,
    wandb_id,
)

LOGGERS = {  # the short names of --trainer.logger+
    "tensorboard": {
        "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
        "init_args": {"save_dir": ".", "default_hp_metric": False},  # else -1 at step 0 of every resume
    },
    "mlflow": {"class_path": "lit_epgan.runs.MLflowHistory", "init_args": {"experiment_name": "lit_epgan"}},
    "wandb": {"class_path": "lit_epgan.runs.WandbHistory", "init_args": {"project": "lit_epgan"}},
}
MLFLOW = ("MLFlowLogger", "MLflowHistory")
PACKAGES = {"TensorBoardLogger": ["tensorboard", "tensorboardX"], **{name: ["mlflow"] for name in MLFLOW}}
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

    A Weights & Biases or MLflow run is named by the method and the seed. Each evaluation is a run of its own, so that
    its numbers do not stand among the rounds of the training run. A resumed fit goes on in the same run.
    """
    trainer = config.trainer
    if trainer.logger in (None, True):
        trainer.logger = Namespace(class_path="lit_epgan.runs.MetricsFile", init_args=Namespace(file="metrics.csv"))
    loggers = trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]
    for logger in loggers:
        if not isinstance(logger, Namespace):  # False
            continue
        arguments = logger.init_args
        name = logger.class_path.rsplit(".", 1)[-1]
        if arguments.get("save_dir") in (None, "."):
            arguments.save_dir = str(folder)
            if name == "TensorBoardLogger" and arguments.get("version") is None:
                _place_tensorboard(logger, None if subcommand == "fit" else subcommand, config.ckpt_path)
        if name in MLFLOW:
            _place_mlflow(arguments, folder, subcommand)
        if name == "MetricsFile" and subcommand != "fit":
            arguments.file = f"{subcommand}_{arguments.file}"
        if name in ("WandbLogger", "WandbHistory"):
            _check_wandb_keys(logger.get("dict_kwargs") or {})
            _place_wandb(arguments, folder, subcommand)
            if arguments.get("name") is None and "WANDB_NAME" not in os.environ:
                arguments.name = _run_name(config, folder, subcommand)
        elif name in MLFLOW and arguments.run_name is None:
            arguments.run_name = _run_name(config, folder, subcommand)


def refuse_missing_packages(trainer: Namespace) -> None:
    """Raise a UserError for a logger whose package is not installed."""
    for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        name = logger.class_path.rsplit(".", 1)[-1] if isinstance(logger, Namespace) else ""
        packages = PACKAGES.get(name, [])
        if packages and not any(map(importlib.util.find_spec, packages)):
            raise UserError(f"trainer.logger: {name} needs a package: run `pip install {packages[0]}`.")


def with_loggers(words: Sequence[str]) -> list[str]:
    """The words with the logger of ``--trainer.logger+ tensorboard`` (or mlflow, wandb) as the parser knows it."""
    keys, known = ("--trainer.logger", "--trainer.logger+"), []
    for position, word in enumerate(words):
        key, equals, name = word.rpartition("=")
        of = key if equals else words[position - 1] if position else ""
        logger = LOGGERS.get(name.lower()) if of in keys else None
        known.append(word if logger is None else f"{key}{equals}{json.dumps(logger)}")
    return known


def _place_tensorboard(logger: Namespace, evaluation: str | None, checkpoint: str | None) -> None:
    """A fit's events in one folder, what a killed process wrote after the checkpoint left out; an evaluation's in one
    within."""
    logger.init_args.version = evaluation or ""
    if checkpoint is not None and evaluation is None:
        steps = steps_logged(tensor_file.outline(checkpoint))
        logger.dict_kwargs = {**(logger.get("dict_kwargs") or {}), "purge_step": steps}


def _place_mlflow(arguments: Namespace, folder: Path, subcommand: str) -> None:
    if arguments.tracking_uri is None:  # MLflow's newer versions refuse a folder of files
        arguments.tracking_uri = f"sqlite:///{(folder / 'mlflow.db').absolute()}"
    if arguments.artifact_location is None:
        arguments.artifact_location = str((folder / "mlruns").absolute())
    known = folder / MLFLOW_ID
    if subcommand == "fit" and arguments.run_id is None and known.is_file():
        arguments.run_id = known.read_text(encoding="utf-8").strip()


def _check_wandb_keys(given: Mapping[str, Any]) -> None:
    import wandb

    known = list(inspect.signature(wandb.init).parameters)
    for name in given:
        if name not in known:
            hint = meant(name, known, f"there are {', '.join(known)}.")
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


def fit_networks(config: Namespace, words: list[str], subcommand: str) -> None:
    """Let the networks take what ``data`` gives: set ``image_size`` and ``channels``, or ``data_shape``, where it has
    switches of images; ``data_shape`` and the head's ``out_features``, where it finds them in a table."""
    data = config.get("data") or Namespace()
    arguments = data.get("init_args") or {}
    model = config.get("model") or Namespace()
    if "image_size" in arguments and "color" in arguments:
        channels, size = 3 if arguments["color"] == "rgb" else 1, arguments["image_size"]
        wanted = {"image_size": size, "channels": channels, "data_shape": [channels, size, size]}
        told = f"The networks take images of {channels} x {size} x {size}, as data.color and data.image_size say."
        instead, outputs = "give --data.image_size and --data.color instead", {}
    elif hasattr(locate(data.get("class_path") or ""), "data_shape"):
        table = _table(data, config.ckpt_path if subcommand != "fit" else None)
        wanted, outputs = {"data_shape": table.data_shape}, {"out_features": table.outputs}
        told = f"The network takes {table.data_shape[0]} inputs and gives {table.outputs}, as the table's columns say."
        instead = "leave it out"
    else:
        return
    for word in words:
        key = word.split("=")[0].lstrip("-")
        if key.startswith("model.") and key.rpartition(".")[2] in {**wanted, **outputs}:
            raise UserError(f"{key} follows the data: {instead}.")
    changed = [_set(arguments, wanted) for arguments in _networks(model)]
    changed.append(_set((model.get("init_args.head") or Namespace()).get("init_args") or Namespace(), outputs))
    if any(changed):
        say(told)


def _table(data: Namespace, checkpoint: str | None) -> Any:
    """The data module of a table; its columns are prepared as the checkpoint's model had them."""
    if checkpoint is not None:
        name = data.class_path.rpartition(".")[2]
        data.init_args.preparation = tensor_file.outline(checkpoint).get(name, {}).get("preparation")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningDataModule, "data")
    return parser.instantiate_classes(Namespace(data=data)).data


def _networks(part: Any) -> Iterator[Namespace]:
    """The arguments of every class within a part of the configuration that takes images."""
    if not isinstance(part, Namespace):
        return
    if "data_shape" in part or ("image_size" in part and "channels" in part):
        yield part
    for inner in vars(part).values():
        yield from _networks(inner)


def _set(arguments: Namespace, wanted: dict[str, Any]) -> bool:
    """Whether an argument had to be changed."""
    changed = {name: value for name, value in wanted.items() if name in arguments and arguments[name] != value}
    for name, value in changed.items():
        arguments[name] = value
    return bool(changed)


ENTRY = "lit_epgan_settings"
SHOWN = 5  # differences that a sentence names
PARTS = ("seed_everything", "model", "data", "federation", "optimizer", "lr_scheduler")
TRAINER = (
    *("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches", "deterministic"),
    *("limit_train_batches", "overfit_batches", "sync_batchnorm"),
)
# of a part: where things are, and how fast; data.seed is seed_everything
WITHOUT = (
    *("path", "manifest", "chime5", "root", "outside", "download", "cache", "seed"),
    *("num_workers", "workers", "pin_memory", "persistent_workers", "prefetch_factor"),
)
PLACES = ("_dir", "_path", "_root", "_folder", "_file")

Settings = dict[str, str]


class KeepHyperparameters(Callback):
    """Keeps ``hyperparameters`` in every checkpoint."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[ENTRY] = self.settings


def hyperparameters(config: Mapping[str, Any]) -> Settings:
    """The settings that decide a run's numbers, by the keys that a user types, their values as JSON."""
    trainer = config.get("trainer") or {}
    parts = {name: config[name] for name in PARTS if name in config}
    flat = dict(_flat(parts, "")) | dict(_flat({name: trainer.get(name) for name in TRAINER}, "trainer."))
    return {name: json.dumps(value, default=str) for name, value in flat.items()}


def refuse_changes(path: str | Path, settings: Settings) -> None:
    """Raise a UserError if the run that the checkpoint is of had other settings, where it says them."""
    try:
        before: Settings = tensor_file.outline(path).get(ENTRY) or settings
    except tensor_file.CodeError:  # trusted with code that is not run here
        return
    differences = [
        f"{key} was {before.get(key, 'unset')} and is {settings.get(key, 'unset')}"
        for key in sorted(before.keys() | settings.keys())
        if before.get(key) != settings.get(key) and not _of_another_class(key, before, settings)
    ]
    if differences:
        more = f" and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
        raise UserError(
            f"The checkpoint {path} is of a run under other settings: {'; '.join(differences[:SHOWN])}{more}. "
            "Set them back, or go on with the new ones by --accept_changes true."
        )


def _flat(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    """Every leaf by its dotted key; a class stands under its key, its arguments one level below."""
    leaves: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if name in WITHOUT or name.endswith(PLACES):
            continue
        if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
            leaves.append((prefix + name, value["class_path"]))
            value = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
        leaves += _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else [(prefix + name, value)]
    return leaves


def _of_another_class(key: str, before: Settings, now: Settings) -> bool:
    """Whether the key is an argument of a class that differs, which says it all."""
    parents = [key[:dot] for dot, letter in enumerate(key) if letter == "."]
    return any(before.get(parent) != now.get(parent) for parent in parents)
