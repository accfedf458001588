"""The one exception that stands for a user's mistake."""


class UserError(Exception):
    """A mistake that the user can mend: its message says what is wrong, where, and what to do.

    The command line prints the message alone and exits with code 2; from Python it is an ordinary exception. Whatever
    is constructed raises it for an argument out of its range, also where its docstring does not say so.
    """


class MissingFileError(UserError):
    """A file or package that the user can put in place; whoever can do without it may go on."""
