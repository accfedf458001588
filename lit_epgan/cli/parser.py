"""The parser as this package uses it: YAML read back as it was, values checked, messages in one sentence."""

import difflib
import importlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_dumper, set_loader
from lightning.pytorch import Trainer

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import meant
from lit_epgan.runs.yaml_files import load_yaml

PARTS = ("model", "data", "federation", "trainer")
SEEDS = 2**32  # as many as NumPy takes


class _Dumper(yaml.SafeDumper):
    """PyYAML's, with quotes around every string that the parser would read as something else."""


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if _is_plain(value) else '"')


def _is_plain(value: str) -> bool:
    try:
        return bool(get_loader("yaml")(value) == value)
    except (yaml.YAMLError, TypeError):  # the reader trips over "0:"
        return False


_Dumper.add_representer(str, _string)


def quoted(data: Any) -> str:
    """``data`` as YAML in which a string such as ``7876e627``, which the parser would read as a number, is quoted."""
    return yaml.dump(data, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def quote_numbers() -> None:
    """Let the strings of what the parser prints and saves be read back as they were."""
    set_dumper("yaml", quoted)


def read_null() -> None:
    """Let ``--a.b.c null`` set c to null where a and b are classes.

    The parser gives the value of a key within a class within a class to a parser of its own as Python's text: None.
    """
    read = get_loader("yaml")

    def read_with_none(text: str) -> Any:
        return None if text.strip() == "None" else read(text)

    set_loader("yaml", read_with_none, (yaml.YAMLError,))


def parse_error(error: Exception, args: list[str], parser: ArgumentParser) -> str:
    """One sentence for what jsonargparse says of the command line or a config, with the nearest of the known keys."""
    text = str(error)
    where = r"(?:Group '(.+)' does not accept option|^Option|[Uu]nrecognized arguments:)"
    unknown = re.search(where + r" '?([^\s'=]+)", text)
    if unknown:
        key = ".".join(filter(None, [unknown[1], unknown[2].lstrip("-")]))
        keys = [action.dest for action in parser._actions if "help" not in action.dest]
        near = _nearest(key, keys + _keys_of_classes(args))
        hint = f"did you mean {near}?" if near else "`fit --help` lists the keys."
        return f"There is no key {key}; {hint}"
    return _deepest_cause(text) or " ".join(text.split())


def _nearest(key: str, known: list[str]) -> str | None:
    """The known key most like ``key``: its first word is matched first, so that a long tail cannot outweigh it."""
    head, _, tail = key.partition(".")
    if tail and head not in PARTS:
        heads = difflib.get_close_matches(head, PARTS, n=1)
        if heads:
            return f"{heads[0]}.{tail}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return next(iter([*close, *(name for name in known if name.rsplit(".", 1)[-1] == key)]), None)


@dataclass
class _Place:
    """Where in the tree a line stands."""

    indent: int
    key: str = ""
    owner: str = ""
    types: list[str] = field(default_factory=list)


def _deepest_cause(text: str) -> str | None:
    path: list[_Place] = []  # the lines above this one, outermost first
    best: str | None = None
    deepest = -1
    for line in filter(str.strip, text.splitlines()):
        body = line.lstrip(" -")
        indent = len(line) - len(body)
        path = [place for place in path if place.indent < indent]
        if key := re.match(r'Parser key "([^"]*)":?', body):
            path.append(_Place(indent, key=key[1]))
            body = body[key.end() :].strip()
        if owner := re.match(r"Problem with given class_path '([^']*)'", body):
            path.append(_Place(indent, owner=owner[1]))
        if within := re.search(r'callable class: Parser key "([^"]*)":', body):
            path.append(_Place(indent, key=within[1]))
        unmeant = re.search("NoneType|path but|import path", body)  # what else could have stood there
        if (kind := re.match(r"Expected an? ([^.]*|.*\])$", body)) and path and not unmeant:
            path[-1].types.append(kind[1])
        if indent > deepest and (sentence := _cause(body, path)):
            best, deepest = sentence, indent
    return best


def _cause(line: str, path: list[_Place]) -> str | None:
    """The sentence for one line of jsonargparse's, or None if that line is no cause."""
    key = ".".join(place.key for place in path if place.key)
    owner = next((place.owner for place in reversed(path) if place.owner), "")
    if match := re.match(r"Option '([^']+)' is not accepted", line):
        return _unknown_argument(key, match[1], owner)
    if match := re.match(r"Expected an? (.+?)\.? Got value: (.*?)(?:\. Got value: .*)?$", line):
        return f"{key} is {_written(match[2])}, but {plain_type(match[1])} is expected."
    if (match := re.match(r"Given value: (.*?)(?:\. Got value: .*)?$", line)) and path and path[-1].types:
        return f"{key} is {_written(match[1])}, but {' or '.join(map(plain_type, path[-1].types))} is expected."
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", line):
        room = importlib.import_module(match[1])
        classes = [name for name in dir(room) if isinstance(getattr(room, name), type)]
        hint = meant(match[2], classes, "", f"{match[1]}.", cutoff=0.5)
        return f"{key}: there is no class {match[1]}.{match[2]}" + (f"; {hint}" if hint else ".")
    if match := re.match(r"No module named '([^']+)'", line):
        return f"{key}: there is no module {match[1]}."
    if match := re.match(r"the following arguments are required: (.*)", line):
        return (
            f"{key}: {owner or 'it'} needs {match[1]}." if key else f"{match[1]} is missing: give --config NAME.yaml."
        )
    if match := re.match(r"Import path does not correspond to a subclass of (.*)", line):
        return f"{key}: a subclass of {match[1]} is expected."
    return None


def _unknown_argument(key: str, name: str, owner: str) -> str:
    known = _arguments_of(owner)
    all_ = f"{owner} takes {', '.join(known)}." if known else "a class is given by class_path and init_args."
    return f"There is no key {key}.{name}; {meant(name, known, all_, f'{key}.', cutoff=0.5)}"


def _written(value: str) -> str:
    return "null" if value == "None" else repr(value)


def plain_type(text: str) -> str:
    """``<class 'float'>`` and ``typing.Literal['a', 'b']`` as a person says them."""
    if choices := re.search(r"Literal\[(.*)\]", text):
        return f"one of {choices[1]}"
    names = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text"}
    plain = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    return names.get(plain, plain)


def _keys_of_classes(args: list[str]) -> list[str]:
    """``model.KEY`` and the like, of the classes that the config files on the command line name."""
    found: dict[str, str] = {}
    for flag, value in pairwise(args):
        path = Path(value)
        if flag not in ("--config", "-c") or not path.is_file():
            continue
        content = load_yaml(path) or {}
        found |= {part: content[part]["class_path"] for part in PARTS if "class_path" in (content.get(part) or {})}
    return [f"{part}.{name}" for part, class_path in found.items() for name in _arguments_of(class_path)]


def _arguments_of(class_path: str) -> list[str]:
    """Names of a class's arguments, those it hands on to its bases included."""
    parser = ArgumentParser(exit_on_error=False)
    module, _, name = class_path.rpartition(".")
    try:
        parser.add_class_arguments(getattr(importlib.import_module(module), name), "it", fail_untyped=False)
    except (ImportError, AttributeError, ValueError):
        return []
    return sorted({action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("it.")})


def check_values(config: Namespace) -> None:
    """Refuse null where a key has another type, and numbers that are not finite unless such a one is the default."""
    seed = config.get("seed_everything")
    if not isinstance(seed, bool) and seed is not None and not 0 <= seed < SEEDS:
        raise UserError(f"seed_everything is {seed}; it must lie between 0 and {SEEDS - 1}.")
    root = config.trainer.default_root_dir
    if root is not None and ("://" in root or (Path(root).exists() and not Path(root).is_dir())):
        raise UserError(f"trainer.default_root_dir is {root}, but a folder of this machine is expected.")
    _check_arguments("trainer", Trainer, config.get("trainer"))
    for part in ("model", "data", "federation"):
        _check_class(part, config.get(part))


def _check_class(key: str, node: Any) -> None:
    if not isinstance(node, Namespace) or not isinstance(node.get("class_path"), str):
        return
    module, _, name = node.class_path.rpartition(".")
    owner = getattr(import_module(module), name, None)
    if isinstance(owner, type):
        _check_arguments(key, owner, node.get("init_args"))


def _check_arguments(key: str, owner: type, arguments: Any) -> None:
    for name, value in vars(arguments or Namespace()).items():
        for item in value if isinstance(value, list | tuple) else [value]:
            _check_class(f"{key}.{name}", item)
            if isinstance(item, float) and not math.isfinite(item) and not _is_default(owner, name, item):
                raise UserError(f"{key}.{name} is {item}, but a finite number is expected.")
        if value is None and (wanted := _other_than_null(owner, name)):
            raise UserError(f"{key}.{name} is null, but {wanted} is expected.")


def _is_default(owner: type, name: str, value: float) -> bool:
    return any(repr(parameter.default) == repr(value) for parameter, _ in _parameters(owner, name))


def _other_than_null(owner: type, name: str) -> str | None:
    """The type that the argument has to have, if null is none of it."""
    for parameter, hints in _parameters(owner, name):
        hint = hints.get(name)
        allowed = hint in (None, Any, object, type(None)) or type(None) in get_args(hint) or parameter.default is None
        return None if allowed or not (hint in (int, float, bool, str) or get_args(hint)) else plain_type(str(hint))
    return None


def _parameters(owner: type, name: str) -> Iterator[tuple[inspect.Parameter, dict[str, Any]]]:
    """The argument as the class says it, or the first of its bases that has it by name."""
    for cls in owner.__mro__:
        init = cls.__dict__.get("__init__")
        if init is None or not inspect.isfunction(init):
            continue
        parameter = inspect.signature(init).parameters.get(name)
        if parameter is not None:
            try:
                yield parameter, get_type_hints(init)
            except (NameError, TypeError):  # an annotation that only a type checker can read
                return
