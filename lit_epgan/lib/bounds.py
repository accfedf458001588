"""Bounds of arguments: each function refuses the first that is beyond them, by name.

NaN is beyond every bound, and None is an argument that was left out. The message names the owner's class, or says
``data.`` where the owner is that word.
"""

import math
from collections.abc import Sequence

from lit_epgan.lib.errors import UserError


def at_least(least: float, owner: object, /, **values: float | None) -> None:
    """Refuse arguments below a bound."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise _refusal(owner, name, value, f"be at least {least}")


def not_empty(owner: object, /, **values: float | None) -> None:
    """Refuse arguments that are left empty."""
    for name, value in values.items():
        if value is None:
            raise _refusal(owner, name, value, "be given")


def above(bound: float, owner: object, /, **values: float | None) -> None:
    """Refuse arguments that are not above a bound."""
    for name, value in values.items():
        if value is not None and not value > bound:
            raise _refusal(owner, name, value, f"be above {bound}")


def within(interval: str, owner: object, /, **values: float | None) -> None:
    """Refuse arguments outside of an interval such as ``[0, 1)``, whose ends belong to it where its brackets say so."""
    low, high = map(float, interval[1:-1].split(","))
    for name, value in values.items():
        if value is None or (low < value < high) or (value == low and interval[0] == "["):
            continue
        if value != high or interval[-1] == ")":
            first = f"be {'at least' if interval[0] == '[' else 'above'} {low:g} and finite"
            raise _refusal(owner, name, value, first if high == math.inf else f"lie in {interval}")


def one_of(choices: Sequence[str], owner: object, /, **values: str) -> None:
    """Refuse arguments that are none of the choices."""
    for name, value in values.items():
        if value not in choices:
            raise _refusal(owner, name, repr(value), f"be {', '.join(choices[:-1])} or {choices[-1]}")


def _refusal(owner: object, name: str, value: object, wanted: str) -> UserError:
    kind = type(owner).__name__
    whose = f"{owner}." if isinstance(owner, str) else f"{kind}' " if kind.endswith("s") else f"{kind}'s "
    return UserError(f"{whose}{name} is {value}; it must {wanted}")
