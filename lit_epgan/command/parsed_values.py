"""What the parser lets through: null and numbers that are not finite, where a key does not allow them; absurd seeds."""

import inspect
import math
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch import Trainer

from lit_epgan.command.parser_messages import plain_type
from lit_epgan.errors import UserError

SEEDS = 2**32  # as many as NumPy takes


def check_values(config: Namespace) -> None:
    """Refuse null where a key has another type, and numbers that are not finite unless such a one is the default.

    Args:
        config: of one subcommand.

    Raises:
        UserError: the first key and its value.
    """
    seed = config.get("seed_everything")
    if not isinstance(seed, bool) and seed is not None and not 0 <= seed < SEEDS:
        raise UserError(f"seed_everything is {seed}; it must lie between 0 and {SEEDS - 1}.")
    _check_root(config.trainer.default_root_dir)
    _check_arguments("trainer", Trainer, config.get("trainer"))
    for part in ("model", "data", "federation"):
        _check_class(part, config.get(part))


def _check_root(root: str | None) -> None:
    if root is not None and ("://" in root or (Path(root).exists() and not Path(root).is_dir())):
        raise UserError(f"trainer.default_root_dir is {root}, but a folder of this machine is expected.")


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
