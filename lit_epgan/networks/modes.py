"""A module in evaluation mode, or silent, for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

LOGGING = ("log", "log_dict")


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, ``module`` is in evaluation mode; afterwards each of its parts is in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


@contextmanager
def replaced_logging(module: nn.Module, *functions: Callable[..., None]) -> Iterator[None]:
    """Inside, these take the place of the ``log`` and ``log_dict`` of ``module``."""
    shadowed: dict[str, Any] = {n: module.__dict__[n] for n in LOGGING if n in module.__dict__}
    module.__dict__.update(zip(LOGGING, functions, strict=True))
    try:
        yield
    finally:
        for name in LOGGING:
            del module.__dict__[name]
        module.__dict__.update(shadowed)


@contextmanager
def silent(module: nn.Module) -> Iterator[None]:
    """Inside, what ``module`` logs is thrown away, as in a training step beside the epoch."""
    with replaced_logging(module, _nothing, _nothing):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a module logs has no place here."""
