"""Which of the values that the user gave made a library, or our code, fail: the one sentence that names its key."""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

import lit_epgan
from lit_epgan.command.given import Given

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


def blame(error: BaseException, given: list[Given]) -> str | None:
    """The sentence for an exception that a given value explains; None where none does, or the user's own code raised.

    A value explains it if the failing call has an argument, or its network an attribute, of the key's name and the same
    value. Of the calls further out only values at a limit are looked for; if no call has one, absurd ones are named.

    Args:
        error: What was raised.
        given: The values, the one to be preferred first.
    """
    error = _first(error)
    frames = list(_frames(error.__traceback__))
    if not isinstance(error, VALUES) or any(_is_users(frame) for frame in frames):
        return None
    key = culprit(error, given)
    if key is not None:
        return f"{key.key} is {key.text}: {_reason(error)}"
    suspects = [one for one in given if one.is_absurd]
    return f"{_reason(error)} ({_written(suspects)})" if suspects else None


def with_key(sentence: str, error: BaseException, given: list[Given]) -> str:
    """A sentence about a mistake, with the key before it where it does not name the value at fault."""
    if any(_names(sentence, one) for one in given if one.is_limit):
        return sentence
    key = culprit(error, given)
    if key is not None:
        return sentence if _names(sentence, key) else f"{key.key} is {key.text}: {sentence}"
    suspects = [one for one in given if one.is_absurd]
    return f"{sentence.rstrip('.')} ({_written(suspects)})." if suspects else sentence


def with_file(sentence: str, given: list[Given]) -> str:
    """A sentence that names a key, with the config file before it that gave the key, unless the command line did."""
    for one in given:  # a key of one word may be any word of the sentence
        if "." in one.key and re.search(rf"(?<![\w.-]){re.escape(one.key)}(?![\w-]|\.\w)", sentence):
            return f"{one.source}: {sentence}" if one.source and one.source not in sentence else sentence
    return sentence


def culprit(error: BaseException, given: list[Given]) -> Given | None:
    """The given value that the failing call, or if it is seldom meant one around it, has under the key's name."""
    near = True
    for frame in reversed(list(_frames(error.__traceback__))):
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


def _names(sentence: str, one: Given) -> bool:
    return re.search(rf"\b{re.escape(one.name)}\b", sentence) is not None


def _frames(traceback: TracebackType | None) -> Iterator[FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _has(frame: FrameType, one: Given) -> bool:
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


def _written(given: list[Given]) -> str:
    return "given " + ", ".join(f"--{one.key} {one.text}" for one in given)
