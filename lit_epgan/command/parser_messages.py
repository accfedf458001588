"""jsonargparse's messages, trees of lines whose deepest one is the cause, as one sentence with the nearest key."""

import difflib
import importlib
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from lit_epgan.runs.yaml_files import load_yaml

PARTS = ("model", "data", "federation", "trainer")


def parse_error(text: str, args: list[str], keys: list[str]) -> str:
    """One sentence for what jsonargparse says about the command line or a config.

    Args:
        text: Its message.
        args: The command line; the config files named there say whose arguments ``--model.KEY`` may mean.
        keys: The keys of the command's parser.
    """
    unknown = re.search(r"does not accept option '([^']+)'|[Uu]nrecognized arguments: (\S+)", text)
    if unknown:
        key = (unknown[1] or unknown[2]).lstrip("-").split("=")[0]
        return unknown_key(key, keys + _keys_of_classes(args))
    return _deepest_cause(text) or " ".join(text.split())


def unknown_key(key: str, known: list[str]) -> str:
    """The sentence for a key that no one knows, with the nearest of those known."""
    near = nearest(key, known)
    hint = f"; did you mean {near}?" if near else "; `fit --help` lists the keys."
    return f"There is no key {key}{hint}"


def nearest(key: str, known: list[str]) -> str | None:
    """The known key most like ``key``: its first word is matched first, so that a long tail cannot outweigh it."""
    head, _, tail = key.partition(".")
    if tail and head not in PARTS:
        heads = difflib.get_close_matches(head, PARTS, n=1)
        if heads:
            return f"{heads[0]}.{tail}"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    same_ending = [name for name in known if name.rsplit(".", 1)[-1] == key]
    return same_ending[0] if same_ending else None


@dataclass
class _Place:
    """Where in the tree a line stands."""

    indent: int
    key: str = ""
    owner: str = ""
    types: list[str] = field(default_factory=list)


def _deepest_cause(text: str) -> str | None:
    path: list[_Place] = []  # the lines above this one, outermost first
    best: tuple[int, str] | None = None
    for line in filter(str.strip, text.splitlines()):
        body = line.lstrip(" -")
        indent = len(line) - len(body)
        path = [place for place in path if place.indent < indent]
        if key := re.match(r'Parser key "([^"]*)":?', body):
            path.append(_Place(indent, key=key[1]))
            body = body[key.end() :].strip()
        if owner := re.match(r"Problem with given class_path '([^']*)'", body):
            path.append(_Place(indent, owner=owner[1]))
        if (kind := re.match(r"Expected an? ([^.]*|.*\])$", body)) and path and "NoneType" not in body:
            path[-1].types.append(kind[1])
        sentence = _cause(body, path)
        if sentence and (best is None or indent > best[0]):
            best = (indent, sentence)
    return best[1] if best else None


def _cause(line: str, path: list[_Place]) -> str | None:
    """The sentence for one line of jsonargparse's, or None if that line is no cause."""
    key = ".".join(place.key for place in path if place.key)
    owner = next((place.owner for place in reversed(path) if place.owner), "")
    if match := re.match(r"Option '([^']+)' is not accepted", line):
        return _unknown_argument(key, match[1], owner)
    if match := re.match(r"Expected an? (.+?)\.? Got value: (.*)", line):
        return f"{key} is {_written(match[2])}, but {plain_type(match[1])} is expected."
    if (match := re.match(r"Given value: (.*)", line)) and path and path[-1].types:
        return f"{key} is {_written(match[1])}, but {' or '.join(map(plain_type, path[-1].types))} is expected."
    if match := re.match(r"module '([^']+)' has no attribute '([^']+)'", line):
        close = difflib.get_close_matches(match[2], _classes_in(match[1]), n=1, cutoff=0.5)
        return f"{key}: there is no class {match[1]}.{match[2]}" + (
            f"; did you mean {match[1]}.{close[0]}?" if close else "."
        )
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
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {key}.{close[0]}?"
    elif known:
        hint = f"{owner} takes {', '.join(known)}."
    else:
        hint = "a class is given by class_path and init_args."
    return f"There is no key {key}.{name}; {hint}"


def _written(value: str) -> str:
    return "null" if value == "None" else repr(value)


def plain_type(text: str) -> str:
    """``<class 'float'>`` and ``typing.Literal['a', 'b']`` as a person says them."""
    if choices := re.search(r"Literal\[(.*)\]", text):
        return f"one of {choices[1]}"
    names = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a text"}
    plain = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    return names.get(plain, plain)


# What could have been meant


def _keys_of_classes(args: list[str]) -> list[str]:
    classes = _classes_of(args)
    return [f"{part}.{name}" for part, class_path in classes.items() for name in _arguments_of(class_path)]


def _classes_of(args: list[str]) -> dict[str, str]:
    """``{"model": class_path, ...}`` as the config files on the command line say."""
    found: dict[str, str] = {}
    for flag, value in pairwise(args):
        path = Path(value)
        if flag not in ("--config", "-c") or not path.is_file():
            continue
        content = load_yaml(path) or {}
        found |= {part: content[part]["class_path"] for part in PARTS if "class_path" in (content.get(part) or {})}
    return found


def _arguments_of(class_path: str) -> list[str]:
    """Names of a class's arguments, those it hands on to its bases included."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_class_arguments(_import(class_path), "it", fail_untyped=False)
    except (ImportError, AttributeError, ValueError):
        return []
    return sorted({action.dest.split(".")[1] for action in parser._actions if action.dest.startswith("it.")})


def _classes_in(module: str) -> list[str]:
    room = importlib.import_module(module)
    return [name for name in dir(room) if isinstance(getattr(room, name), type)]


def _import(class_path: str) -> Any:
    module, _, name = class_path.rpartition(".")
    return getattr(importlib.import_module(module), name)
