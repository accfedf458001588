"""Sizes that networks are built with."""

from lit_epgan.errors import UserError


def check_positive(network: str, **sizes: int) -> None:
    """Refuse sizes below one.

    Args:
        network: what is built, for the message.
        sizes: by name.

    Raises:
        UserError: names the first.
    """
    for name, size in sizes.items():
        if size < 1:
            raise UserError(f"{name}={size} cannot be: {network} needs {name} of at least 1.")
