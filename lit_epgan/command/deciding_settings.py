"""The settings that decide a run's numbers: kept in its checkpoints, compared before a run is gone on with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_epgan import tensor_file
from lit_epgan.errors import UserError

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


class DecidingSettings(Callback):
    """Keeps the settings in every checkpoint.

    Args:
        settings: as ``deciding_settings`` gives them.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add the settings to the checkpoint."""
        checkpoint[ENTRY] = self.settings


def deciding_settings(config: Mapping[str, Any]) -> Settings:
    """The settings that decide a run's numbers, by the keys that a user types, their values as JSON.

    Args:
        config: of a command, as nested dicts.
    """
    trainer = config.get("trainer") or {}
    parts = {name: config[name] for name in PARTS if name in config}
    flat = dict(_flat(parts, "")) | dict(_flat({name: trainer.get(name) for name in TRAINER}, "trainer."))
    return {name: json.dumps(value, default=str) for name, value in flat.items()}


def refuse_changes(path: str | Path, settings: Settings) -> None:
    """Compare the settings with those of the run that the checkpoint is of, where it says them.

    Raises:
        UserError: names what differs, its old and its new value.
    """
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
