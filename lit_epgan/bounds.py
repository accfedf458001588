"""Bounds of arguments."""

from lit_epgan.errors import UserError


def at_least(least: float, owner: object, **values: float | None) -> None:
    """Refuse arguments below a bound; NaN is below every one, and None is an argument that was left out. The message
    names the owner's class, or says ``data.`` where the owner is that word."""
    for name, value in values.items():
        if value is not None and not value >= least:
            whose = f"{owner}." if isinstance(owner, str) else f"{type(owner).__name__}'s "
            raise UserError(f"{whose}{name} is {value}; it must be at least {least}.")
