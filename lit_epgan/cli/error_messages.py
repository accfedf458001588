"""A mistake of the user in one sentence, whichever library has found it: with the key or the file at fault."""

import errno
import math
import re
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import lit_epgan
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.config_files import config_folders

CONFIG_FLAGS = ("--config", "-c")
TINY, HUGE = 1e-9, 1e9


@dataclass(frozen=True)
class UserSetting:
    """One value that the user gave: its key as on the command line, without ``init_args``; the value as YAML has it;
    and the config file as source, empty for the command line."""

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


def user_settings(words: list[str]) -> list[UserSetting]:
    """Everything that the words of the command line give, the last first."""
    found: list[UserSetting] = []
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


def _of_file(path: Path) -> list[UserSetting]:
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


def _leaves(key: str, value: Any) -> Iterator[UserSetting]:
    """Every value under ``key``; those of a list's mappings have the list's key."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(key if name in ("init_args", "dict_kwargs") else f"{key}.{name}".lstrip("."), inner)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for item in value:
            yield from _leaves(key, item)
    else:
        yield UserSetting(key, value)


def _number(value: Any, holds: Callable[[float], bool]) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and holds(value)


def _absurd(number: float) -> bool:
    return number not in (0, -1) and not TINY <= number <= HUGE


VALUES: tuple[type[BaseException], ...] = (  # what a value that cannot be makes a library raise
    *(ValueError, TypeError, RuntimeError, IndexError, ArithmeticError, MemoryError, OSError),
    *(MisconfigurationException, ModuleNotFoundError),
)
OURS = [Path(lit_epgan.__file__).parent.resolve()]
OURS += [(OURS[0] / link).resolve() for link in ("callbacks", "datamodules")]
LIBRARIES = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
TOO_LARGE = re.compile(
    r"can't allocate memory|[Uu]nable to allocate|[Ss]torage size|bad_?alloc|[Oo]verflow|too large|array is too big|"
    r"invalid shape dimension|cannot fit"
)
LONGEST = 300


def explain_by_setting(error: BaseException, given: list[UserSetting]) -> str | None:
    """The sentence for an exception that a given value explains; None where none does, or the user's own code raised.

    A value explains it if the failing call has an argument, or its network an attribute, of the key's name and the same
    value, the first of ``given`` before the others. Of the calls further out only values at a limit are looked for; if
    no call has one, absurd ones are named.
    """
    error = _first(error)
    if not isinstance(error, VALUES) or any(_is_users(frame) for frame, _ in walk_tb(error.__traceback__)):
        return None
    key = culprit(error, given)
    if key is not None:
        return f"{key.key} is {key.text}: {_reason(error)}"
    suspects = [one for one in given if one.is_absurd]
    return f"{_reason(error)} ({_written(suspects)})" if suspects else None


def with_key(sentence: str, error: BaseException, given: list[UserSetting]) -> str:
    """A sentence about a mistake, with the key before it where it does not name the value at fault."""
    if any(_names(sentence, one) for one in given if one.is_limit):
        return sentence
    key = culprit(error, given)
    if key is not None:
        return sentence if _names(sentence, key) else f"{key.key} is {key.text}: {sentence}"
    suspects = [one for one in given if one.is_absurd]
    return f"{sentence.rstrip('.')} ({_written(suspects)})." if suspects else sentence


def with_file(sentence: str, given: list[UserSetting]) -> str:
    """A sentence that names a key, with the config file before it that gave the key, unless the command line did."""
    for one in given:  # a key of one word may be any word of the sentence
        if "." in one.key and re.search(rf"(?<![\w.-]){re.escape(one.key)}(?![\w-]|\.\w)", sentence):
            return f"{one.source}: {sentence}" if one.source and one.source not in sentence else sentence
    return sentence


def culprit(error: BaseException, given: list[UserSetting]) -> UserSetting | None:
    """The given value that the failing call, or if it is seldom meant one around it, has under the key's name."""
    near = True
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        for one in sorted(given, key=lambda one: not one.is_limit):
            if (near or one.is_limit) and _has(frame, one):
                return one
        near = near and not _is_within(frame, OURS)  # up to the first call of ours
    return None


def _first(error: BaseException) -> BaseException:
    """What was raised first: the parser wraps it."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
    return error


def _names(sentence: str, one: UserSetting) -> bool:
    return re.search(rf"\b{re.escape(one.name)}\b", sentence) is not None


def _has(frame: FrameType, one: UserSetting) -> bool:
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if one.name in arguments and _same(frame.f_locals.get(one.name), one.value):
        return True
    if one.value is None:
        return False  # where nothing was given, much is None by itself
    # a data module has many keys as attributes: an ordinary value says something only of what a network is made of
    any_owner = one.is_absurd and _is_within(frame, OURS)
    found = [frame.f_locals.get(name) for name in arguments]
    owners = [owner for owner in found if isinstance(owner, nn.Module) or (any_owner and hasattr(owner, "__dict__"))]
    return any(one.name in vars(owner) and _same(vars(owner)[one.name], one.value) for owner in owners)


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, list):
        return isinstance(found, list | tuple) and len(found) == len(value) and all(map(_same, found, value))
    if isinstance(found, bool) or not isinstance(found, int | float | str | None):
        return False
    return found == value or (found != found and value != value) or str(found) == str(value)


def _is_users(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return not file.startswith("<") and not _is_within(frame, [*OURS, *LIBRARIES])


def _is_within(frame: FrameType, folders: list[Path]) -> bool:
    file = Path(frame.f_code.co_filename).resolve()
    return any(folder in file.parents for folder in folders)


def _reason(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, MemoryError) or TOO_LARGE.search(text):
        size = re.search(r"allocate (\d+) bytes", text)
        return f"that needs {int(size[1]) / 2**30:,.0f} GiB of memory" if size else "that needs too much memory"
    first = " ".join(text.split("\nException raised from")[0].split())
    first = first if len(first) <= LONGEST else first[:LONGEST] + "..."
    return f"{first or type(error).__name__}"


def _written(given: list[UserSetting]) -> str:
    return "given " + ", ".join(f"--{one.key} {one.text}" for one in given)


def own_error(error: BaseException | None) -> UserError | None:
    """What one of our classes said of its arguments: the parser wraps it where a key may also be none."""
    while error is not None and not isinstance(error, UserError):
        error = error.__cause__
    return error


def explain(error: Exception) -> str | None:
    """One sentence for a mistake of the user; None where the exception is nobody's mistake but the program's."""
    text = str(error)
    if isinstance(error, RuntimeError) and "loading state_dict" in text:
        lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
        first = (lines[0][:200] if lines else text).rstrip(" .")
        return f"The checkpoint is one of another model: {first}. Give the config it was trained with."
    if isinstance(error, MisconfigurationException):
        return " ".join(text.split())
    if isinstance(error, torch.OutOfMemoryError):
        return "The device's memory is full: lower --data.batch_size, or use more devices."
    if type(error).__module__.startswith("wandb.errors"):
        reason = " ".join(text.split()).rstrip(".")
        return f"Weights & Biases cannot be used: {reason}. Mend that, or set WANDB_MODE=offline in the environment."
    return disk_error(error)


REMEDIES = {
    errno.ENOSPC: "Make room there",
    errno.EDQUOT: "Make room within your quota there",
    errno.EFBIG: "Raise the limit of a file's size (ulimit -f)",
    errno.EROFS: "That place can only be read: name another with --trainer.default_root_dir",
}
OF_THE_DISK = {*REMEDIES, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOLCK}


def disk_error(error: BaseException) -> str | None:
    """What could not be written or read, why, and what to do; None where no file is the cause.

    An error that another one followed on the way out, as where a logger closes, counts too.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, UserError):
        if isinstance(seen, OSError) and (seen.filename or seen.errno in OF_THE_DISK):
            what = seen.filename2 or seen.filename or "A file that a library writes"
            remedy = REMEDIES.get(seen.errno or 0)
            return f"{what} could not be written: {seen.strerror}. {remedy}." if remedy else f"{what}: {seen.strerror}."
        hidden = seen.__context__ if isinstance(seen, OSError | RuntimeError) else None
        seen = seen.__cause__ or hidden
    return None
