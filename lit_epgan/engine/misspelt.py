"""Hooks that nobody would call, because their names are not quite the base's."""

import difflib
from types import FunctionType

from lit_epgan.errors import UserError

NEAR = 0.75  # how alike two names are, of 1
OURS = "lit_epgan."


def check_hooks(kind: type, base: type) -> None:
    """Refuse a user's class with a method whose name is nearly a hook's, where the class lacks the hook itself.

    Args:
        kind: the class.
        base: whose methods are the hooks.

    Raises:
        UserError: names the method and the hook.
    """
    own = [each for each in kind.__mro__ if issubclass(each, base) and not each.__module__.startswith(OURS)]
    if not own:
        return
    given = {name for each in own for name, value in vars(each).items() if isinstance(value, FunctionType)}
    known = {name for each in kind.__mro__ if each not in own for name in dir(each)}
    hooks = [name for name in dir(base) if not name.startswith("_") and name not in given]
    for name in sorted(given - known):
        close = [] if name.startswith("_") else difflib.get_close_matches(name, hooks, n=1, cutoff=NEAR)
        if close:
            raise UserError(
                f"{kind.__name__}.{name} is never called: did you mean the hook {close[0]}? A method of your own may "
                f"be called _{name}."
            )
