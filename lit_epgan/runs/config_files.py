"""Where the name of a configuration leads: the working directory first, then the configs that come with the package."""

import difflib
from pathlib import Path

import yaml

import lit_epgan
from lit_epgan.errors import UserError


def config_folders() -> list[Path]:
    """``configs/`` of the working directory, and the package's own, in a checkout and in a wheel alike."""
    return [Path("configs"), Path(lit_epgan.__file__).parent / "configs"]


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


def with_bases(path: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    """A configuration's files, the ones it starts from (its key ``base``) first.

    Raises:
        UserError: a base does not exist, or leads back to itself.
    """
    if path in seen:
        raise UserError(f"{path.name} starts from itself, by way of its `base`: leave one of them out.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return [path]  # the parser says what is wrong with it
    base = content.get("base") if isinstance(content, dict) else None
    return [*(with_bases(find_config(str(base)), (*seen, path)) if base else []), path]


def resolve_configs(args: list[str]) -> list[str]:
    """Command-line words with every ``--config NAME`` (``-c``) replaced by the files it means, bases first."""
    resolved: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        name = value if equals else next(words, None) if flag in ("--config", "-c") else None
        if flag not in ("--config", "-c") or name is None:
            resolved.append(word)
            continue
        for path in with_bases(find_config(name)):
            resolved += [flag, str(path)]
    return resolved
