"""Where the name of a configuration leads: the working directory first, then the configs that come with the package.

An experiment is a file of ``configs/``; one of ``configs/algorithms/`` goes on top of it, by another ``--config``.
"""

import contextlib
import difflib
from pathlib import Path

import lit_epgan
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.yaml_files import load_yaml

ALGORITHMS = "algorithms"
STUDIES = "studies"
INSPECTIONS = "inspect_"  # how their names begin: they stand beside the experiments


def config_folders() -> list[Path]:
    """``configs/`` of the working directory, and the package's own, in a checkout and in a wheel alike."""
    return [Path("configs"), Path(lit_epgan.__file__).parent / "configs"]


NEAR = 3  # names that are suggested


def known_configs(kind: str = "") -> list[str]:
    """Names that ``find_config`` finds in the configs folders, e.g. ``digits.yaml``, or of a kind (``algorithms``,
    ``studies``, or ``inspect_`` for the inspections) ``studies/demo.yaml``."""
    pattern = "*.yaml" if kind in ("", INSPECTIONS) else f"{kind}/*.yaml"
    found = {path.relative_to(folder).as_posix() for folder in config_folders() for path in folder.glob(pattern)}
    if kind in ("", INSPECTIONS):
        found = {name for name in found if name.startswith(INSPECTIONS) == (kind == INSPECTIONS)}
    return sorted(found)


def find_config(name: str, studies: bool = False) -> Path:
    """The file that ``name`` means; a UserError names those that are nearest."""
    candidates = [Path(name), *(folder / name for folder in config_folders())]
    for path in candidates:
        if path.is_file():
            return path
    known = known_configs(STUDIES) if studies else [*known_configs(), *known_configs(ALGORITHMS)]
    pair = [] if studies else _experiment_and_algorithm(name)
    near = [" --config ".join(pair)] if pair else _nearest(name, known)
    hint = f" Did you mean {', '.join(near[:-1])}{' or ' if len(near) > 1 else ''}{near[-1]}?" if near else ""
    raise UserError(
        f"There is no config {name!r} in the working directory or in configs/.{hint} `python -m lit_epgan --help` "
        "lists all."
    )


def _nearest(name: str, known: list[str]) -> list[str]:
    """The known names that are nearest, their folders left out or not, the nearest first; none if none is near."""
    meant = {Path(each).name: each for each in known} | {each: each for each in known}
    near = [meant[close] for close in difflib.get_close_matches(name, meant, n=NEAR, cutoff=0.5)]
    return list(dict.fromkeys(near))


def config_name(path: Path) -> str:
    """What a user types for it: ``digits.yaml``, or ``algorithms/scaffold.yaml``."""
    return f"{ALGORITHMS}/{path.name}" if path.parent.name == ALGORITHMS else path.name


def _experiment_and_algorithm(name: str) -> list[str]:
    """The two files that a name such as ``digits_scaffold.yaml`` may stand for; none if it is no such name."""
    experiments, algorithms = known_configs(), known_configs(ALGORITHMS)
    stem = Path(name).stem
    for position in [i for i, letter in enumerate(stem) if letter == "_"][::-1]:
        pair = [f"{stem[:position]}.yaml", f"{ALGORITHMS}/{stem[position + 1 :]}.yaml"]
        if pair[0] in experiments and pair[1] in algorithms:
            return pair
    return []


def with_bases(path: Path, seen: tuple[Path, ...] = ()) -> list[Path]:
    """A configuration's files, the ones it starts from (its key ``base``, a name or a list of names) first. UserError:
    a base does not exist, or leads back to itself; or a file is no configuration (``load_yaml``)."""
    if path in seen:
        raise UserError(f"{path.name} starts from itself, by way of its `base`: leave one of them out.")
    try:
        content = load_yaml(path)
    except OSError:
        return [path]  # the parser says what is wrong with it
    if not isinstance(content, dict):
        found = "is empty" if content is None else "has no keys"
        raise UserError(f"{path} {found}: a configuration is keys and their values, such as `base: digits.yaml`.")
    base = content.get("base")
    names = base if isinstance(base, list) else [base] if base else []
    return [*(file for name in names for file in with_bases(find_config(str(name)), (*seen, path))), path]


def _check_part(path: Path) -> None:
    """Raise a UserError for a file of a part, as in ``--model NAME.yaml``, that is no YAML to be read."""
    if path.suffix in (".yaml", ".yml"):
        with contextlib.suppress(OSError):  # the parser says what is wrong with it
            load_yaml(path)


def resolve_configs(args: list[str]) -> list[str]:
    """Command-line words with every ``--config NAME`` (``-c``) replaced by the files it means, bases first."""
    resolved: list[str] = []
    words = iter(args)
    for word in words:
        flag, equals, value = word.partition("=")
        name = value if equals else next(words, None) if flag in ("--config", "-c") else None
        if flag not in ("--config", "-c") or name is None:
            _check_part(Path(value or word))
            resolved.append(word)
            continue
        for path in with_bases(find_config(name)):
            resolved += [flag, str(path)]
    return resolved
