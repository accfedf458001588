"""Checkpoints: written with a digest and beside their place; which of a folder to go on from."""

import logging
import os
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Trainer

from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError


class SealedCheckpointIO(TorchCheckpointIO):
    """Lightning's, but a file's bytes are checked before it is read, and none passes through the temporary folder.

    What has a URL, as in ``s3://``, is left to Lightning.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write the file in one step; when this returns, the disk holds it."""
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
        else:
            tensor_file.save(checkpoint, path, durable=True)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint; only ``weights_only=False`` lets a file run code."""
        if "://" in os.fspath(path):
            return super().load_checkpoint(path, map_location, weights_only)
        return tensor_file.load(path, map_location, weights_only is not False)


def seal_checkpoints(trainer: Trainer) -> None:
    """Let the trainer write its checkpoints with a digest, unless it has a way of its own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        own: CheckpointIO = SealedCheckpointIO()
        trainer.strategy.checkpoint_io = own


LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"
TO_EVALUATE = {"state_dict": dict, "epoch": int, "global_step": int, "pytorch-lightning_version": str}
TO_TRAIN = TO_EVALUATE | {"loops": dict, "callbacks": dict, "optimizer_states": list, "lr_schedulers": list}

_log = logging.getLogger(__name__)


def fault(path: Path, to_train: bool = True, trusted: bool = False) -> str | None:
    """What is wrong with a checkpoint, in a few words that follow its name; None if one can go on from it. All of it is
    read. To go on training needs more than the model; of a trusted file, which may hold code, the content is not looked
    at."""
    trouble = tensor_file.fault(path)
    if trouble is not None:
        return trouble
    try:
        content = tensor_file.outline(path)
    except tensor_file.CodeError as error:
        return None if trusted else error.fault
    except tensor_file.TensorFileError as error:
        return error.fault
    return _missing(content, TO_TRAIN if to_train else TO_EVALUATE)


def newest_whole(folder: str | os.PathLike[str], to_train: bool = True, trusted: bool = False) -> Path:
    """The newest whole checkpoint in ``folder``: ``last.ckpt``, else ``previous.ckpt``, else the newest other one.

    One that cannot be gone on from is named in a warning and passed over. A UserError says if there is none.
    """
    folder = Path(folder)
    faulty: list[str] = []
    for path in _newest_first(folder):
        trouble = fault(path, to_train, trusted)
        if trouble is None:
            if faulty:
                _log.warning("%s; resuming from %s%s.", "; ".join(faulty), path, round_of(path))
            return path
        faulty.append(f"{path} {trouble}")
    if faulty:
        raise UserError(f"No whole checkpoint to resume from: {'; '.join(faulty)}. Start again without --ckpt_path.")
    raise UserError(
        f"There is no checkpoint in {folder}. Start without --ckpt_path, "
        "or name the run's folder with --trainer.default_root_dir."
    )


def best_of(folder: str | os.PathLike[str], to_train: bool = True, trusted: bool = False) -> Path:
    """The checkpoint that a ModelCheckpoint with a monitor found best, as the newest checkpoint in ``folder`` knows it.

    A UserError says if there is none, or more than one; the folder may have been moved since.
    """
    folder = Path(folder)
    states = tensor_file.outline(newest_whole(folder, to_train, trusted)).get("callbacks", {}).values()
    monitored = [state for state in states if isinstance(state, dict) and state.get("monitor") is not None]
    best = {str(state["monitor"]): Path(state["best_model_path"]) for state in monitored if state["best_model_path"]}
    if not best:
        raise UserError(
            f"No best checkpoint is known in {folder}: add lightning.pytorch.callbacks.ModelCheckpoint with a monitor "
            "to the trainer's callbacks and fit again, or give --ckpt_path last."
        )
    if len(set(best.values())) > 1:
        each = ", ".join(f"{path} by {monitor}" for monitor, path in best.items())
        raise UserError(f"There are several best checkpoints: {each}. Name one with --ckpt_path.")
    path = next(iter(best.values()))
    path = folder / path.name if (folder / path.name).exists() else path
    require_whole(path, to_train, trusted)
    return path


def require_whole(path: str | os.PathLike[str], to_train: bool = True, trusted: bool = False) -> None:
    """Raise a UserError unless one can go on from the checkpoint; the arguments are ``fault``'s."""
    trouble = fault(Path(path), to_train, trusted)
    if trouble is not None:
        raise UserError(
            f"The checkpoint {path} {trouble}. Name another one, or --ckpt_path last for the newest whole one."
        )


def _missing(content: Any, entries: dict[str, type]) -> str | None:
    """What a checkpoint of these entries should hold and ``content`` does not."""
    if not isinstance(content, dict):
        return f"is no checkpoint: it holds a {type(content).__name__}"
    for name, kind in entries.items():
        if not isinstance(content.get(name), kind):
            purpose = "" if name in TO_EVALUATE else " to train on from"
            return f"is no checkpoint{purpose}: it has no {name}, as Lightning writes it"
    return None


def where_to_go_on(folder: Path) -> str:
    """The sentence that says which checkpoint in ``folder`` a run that has ended goes on from; empty without one."""
    for path in _newest_first(folder):
        if fault(path, trusted=True) is None:
            return f"The last checkpoint is {path}{round_of(path)}; --ckpt_path last goes on from it."
    return ""


def _newest_first(folder: Path) -> list[Path]:
    """Every name of a checkpoint, a link that leads nowhere and a folder included."""
    named = [folder / name for name in (LAST, PREVIOUS) if os.path.lexists(folder / name)]
    others = [path for path in folder.glob("*.ckpt") if path not in named]
    return named + sorted(others, key=lambda path: path.lstat().st_mtime, reverse=True)


def round_of(path: Path) -> str:
    """`` (round 3)``, the number of rounds that a checkpoint's run had finished; empty where it does not say."""
    try:
        return f" (round {tensor_file.outline(path)['epoch']})"
    except tensor_file.TensorFileError:  # trusted with code that is not run here
        return ""
