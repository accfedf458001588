"""Checkpoints that survive a kill: saved in one step, checked before they are resumed from."""

import logging
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lit_epgan.atomic import replacing
from lit_epgan.errors import UserError

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"

_log = logging.getLogger(__name__)


def save_atomically(obj: Any, path: str | os.PathLike[str]) -> None:
    """``torch.save(obj, path)`` in one step: after a kill ``path`` is the old file or the new one."""
    with replacing(Path(path), durable=True) as beside:
        torch.save(obj, beside)


def fault(path: Path) -> str | None:
    """What is wrong with the file of a checkpoint, in a few words; None if every byte is as it was saved.

    Reads the whole file: every record in it carries a checksum.
    """
    if not path.is_file():
        return "does not exist"
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            return f"is damaged (checksum of {bad})"
        torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except zipfile.BadZipFile:
        return "is torn or no checkpoint at all"
    except pickle.UnpicklingError as error:
        # whole, but with objects in it that are no tensors: the caller decides whether to trust it
        return None if "Weights only load failed" in str(error) else "is damaged"
    except (RuntimeError, EOFError, OSError, KeyError):
        return "is damaged"
    return None


def newest_whole(folder: str | os.PathLike[str]) -> Path:
    """The newest whole checkpoint in ``folder``: ``last.ckpt``, else ``previous.ckpt``, else the newest other one.

    One that is torn is named in a warning and passed over.

    Raises:
        UserError: There is none: begin a new run, or name another run's folder.
    """
    folder = Path(folder)
    torn: list[str] = []
    for path in _newest_first(folder):
        trouble = fault(path)
        if trouble is None:
            if torn:
                _log.warning("%s; resuming from %s%s.", "; ".join(torn), path, round_of(path))
            return path
        torn.append(f"{path} {trouble}")
    if torn:
        raise UserError(f"No whole checkpoint to resume from: {'; '.join(torn)}. Start again without --ckpt_path.")
    raise UserError(
        f"There is no checkpoint in {folder}. Start without --ckpt_path, "
        "or name the run's folder with --trainer.default_root_dir."
    )


def require_whole(path: str | os.PathLike[str]) -> None:
    """Raise a UserError unless the file is a whole checkpoint."""
    trouble = fault(Path(path))
    if trouble is not None:
        raise UserError(
            f"The checkpoint {path} {trouble}. Name another one, or --ckpt_path last for the newest whole one."
        )


def _newest_first(folder: Path) -> list[Path]:
    named = [folder / name for name in (LAST, PREVIOUS) if (folder / name).is_file()]
    others = [path for path in folder.glob("*.ckpt") if path not in named]
    return named + sorted(others, key=lambda path: path.stat().st_mtime, reverse=True)


def round_of(path: Path) -> str:
    """`` (round 3)``, the number of rounds that a checkpoint's run had finished; empty where it does not say."""
    try:
        epoch = torch.load(path, map_location="meta", weights_only=True, mmap=True).get("epoch")
    except (pickle.UnpicklingError, AttributeError):
        return ""
    return "" if epoch is None else f" (round {epoch})"
