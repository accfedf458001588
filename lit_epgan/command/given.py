"""What the user gave: the keys of the command line and of config files that are not the package's own."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lit_epgan.runs.config_files import config_folders

CONFIG_FLAGS = ("--config", "-c")
TINY, HUGE = 1e-9, 1e9


@dataclass(frozen=True)
class Given:
    """One value that the user gave.

    Attributes:
        key: as it is written on the command line, without ``init_args``.
        value: as YAML has it.
        source: the config file; empty for the command line.
    """

    key: str
    value: Any
    source: str = ""

    @property
    def name(self) -> str:
        """The key's last component: an argument's name."""
        return self.key.rpartition(".")[2]

    @property
    def text(self) -> str:
        """The value as it is written in YAML."""
        text = "null" if self.value is None else yaml.safe_dump(self.value, default_flow_style=True, width=math.inf)
        return text.removesuffix("\n").removesuffix("...").strip()

    @property
    def is_limit(self) -> bool:
        """Whether it is, or has in it, a value at which much ends: null, 0, below 0, or an absurd one."""
        return self.is_absurd or any(item in (None, "") or _number(item, lambda x: x <= 0) for item in self._items)

    @property
    def is_absurd(self) -> bool:
        """Whether it is, or has in it, a number that nobody means: not finite, tiny, huge, or below 0 and not -1."""
        return any(_number(item, _absurd) for item in self._items)

    @property
    def _items(self) -> list[Any]:
        return self.value if isinstance(self.value, list) else [self.value]


def given_by(words: list[str]) -> list[Given]:
    """Everything that the words of the command line give, the last first."""
    found: list[Given] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("-"):
            continue
        value = value if equals else next(rest, "")
        if flag in CONFIG_FLAGS:
            found += _of_file(Path(value))
        else:
            found += _leaves(flag.lstrip("-").rstrip("+").replace(".init_args", ""), _parsed(value))
    return found[::-1]


def _of_file(path: Path) -> list[Given]:
    own = config_folders()[-1].resolve()
    if own in path.resolve().parents or not path.is_file():
        return []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):  # which is the mistake that is told
        return []
    return [replace(one, source=str(path)) for one in _leaves("", _parsed(text))]


def _parsed(text: str) -> Any:
    from jsonargparse import get_loader

    try:
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(text, get_loader("yaml")(text))
    except (yaml.YAMLError, TypeError):
        return text


def _leaves(key: str, value: Any) -> Iterator[Given]:
    """Every value under ``key``; those of a list's mappings have the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(key if name in ("init_args", "dict_kwargs") else f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _leaves(key, item)
    else:
        yield Given(key, value)


def _number(value: Any, holds: Callable[[float], bool]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and holds(value)


def _absurd(number: float) -> bool:
    return number not in (0, -1) and not TINY <= number <= HUGE
