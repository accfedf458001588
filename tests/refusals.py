"""What a user's mistake is answered with."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_epgan.lib.errors import UserError


def assert_refused(message: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> None:
    __tracebackhide__ = True
    with pytest.raises(UserError, match=message):
        call(*args, **options)
