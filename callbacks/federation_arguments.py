"""What FederationCallback is given, where it is no object of the kind that is asked for."""

from typing import Any

from lit_epgan.errors import UserError


def check_kind(name: str, given: Any, kind: type, example: str) -> None:
    """Refuse anything but an object of a class; None is what was left out.

    Args:
        name: of the argument.
        given: its value.
        kind: the class.
        example: how such an object is made.

    Raises:
        UserError: it is the class itself, its name, or something else.
    """
    if given is None or isinstance(given, kind):
        return
    if isinstance(given, type):
        wrong = f"the class {given.__name__}, not an object of it: write {given.__name__}()"
    elif isinstance(given, str):
        wrong = f"the text {given!r}: write an object, such as {example}"
    else:
        wrong = f"of the type {type(given).__name__}, no {kind.__name__}: write an object, such as {example}"
    raise UserError(f"FederationCallback's {name} is {wrong}.")
