"""Where the name of a configuration leads: the working directory first, then the configs that come with the package."""

import difflib
from pathlib import Path

from lit_epgan.errors import UserError


def config_folders() -> list[Path]:
    """``configs/`` of the working directory, and the one beside this package, in a checkout and in a wheel alike."""
    return [Path("configs"), Path(__file__).resolve().parent.parent / "configs"]


def known_configs(studies: bool = False) -> list[str]:
    """Names that ``find_config`` finds in the configs folders, e.g. ``digits.yaml``, or ``studies/demo.yaml``."""
    pattern = "studies/*.yaml" if studies else "*.yaml"
    return sorted({path.relative_to(folder).as_posix() for folder in config_folders() for path in folder.glob(pattern)})


def find_config(name: str, studies: bool = False) -> Path:
    """The file that ``name`` means.

    Raises:
        UserError: There is none; the message lists those there are and the nearest name.
    """
    candidates = [Path(name), *(folder / name for folder in config_folders())]
    for path in candidates:
        if path.is_file():
            return path
    known = known_configs(studies)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else ""
    there = ", ".join(known) or "none"
    raise UserError(f"There is no config {name!r} in the working directory or in configs/.{hint} There are: {there}.")


def resolve_configs(args: list[str]) -> list[str]:
    """Command-line words with the name after every ``--config`` (``-c``) replaced by the file it means."""
    resolved = list(args)
    for i, word in enumerate(args):
        flag, equals, value = word.partition("=")
        if flag not in ("--config", "-c"):
            continue
        if equals:
            resolved[i] = f"{flag}={find_config(value)}"
        elif i + 1 < len(args):
            resolved[i + 1] = str(find_config(args[i + 1]))
    return resolved
