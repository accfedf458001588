"""Sizes that networks are built with."""

from lit_epgan.lib.errors import UserError

MOST = 1_000_000


def check_positive(network: str, **sizes: int) -> None:
    """Refuse sizes below one, and those that no memory holds: a loop over as many would not end."""
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size} cannot be: {network} needs {name} of at least 1.")
        if size > MOST:
            raise UserError(f"{name}={size} cannot be: {network} takes {name} of at most {MOST}.")
