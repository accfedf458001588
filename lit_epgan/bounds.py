"""Bounds of arguments."""

from lit_epgan.errors import UserError


def at_least(least: float, owner: object, **values: float | None) -> None:
    """Raise a UserError that names the first of the owner's arguments below ``least``; NaN is, and None is left out."""
    for name, value in values.items():
        if value is not None and not value >= least:
            raise UserError(f"{type(owner).__name__}'s {name} is {value}; it must be at least {least}.")
