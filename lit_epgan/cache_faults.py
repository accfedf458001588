"""What becomes of a cache that fails: what is damaged is set aside, what cannot be kept is said once; no run ends."""

import logging
import os
import shutil
from pathlib import Path

_log = logging.getLogger(__name__)
_said: set[Path] = set()


def set_aside(path: Path, fault: str) -> None:
    """Rename what is damaged to ``NAME.damaged``, and say it.

    Args:
        path: a file or folder of the cache.
        fault: what is wrong with it, in words that follow its name.
    """
    aside = path.with_name(f"{path.name}.damaged")
    now = f"it is now {aside.name} and is made again"
    try:
        if aside.is_dir():  # one from before, which a folder cannot replace
            shutil.rmtree(aside)
        os.replace(path, aside)
    except OSError:  # another process was faster, or nothing can be renamed there
        now = "it is made again"
    _log.warning("%s %s; %s.", path, fault, now)


def warn_unkept(folder: Path, error: Exception) -> None:
    """Say, once for the folder, that nothing can be kept there."""
    if folder not in _said:
        _said.add(folder)
        _log.warning(
            "Nothing can be kept in the cache %s (%s): its content is made anew each time.", folder, str(error)
        )
