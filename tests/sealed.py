"""A server that nobody can read while a client works."""

from collections.abc import Callable
from typing import Any

import pytest

from lit_epgan.engine import ClientRunner, Server

WORK = ("run", "fit", "take", "extra_loss", "before_step", "after_step")


class SealBrokenError(AssertionError):
    """A client's work has looked at the server."""


def seal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, whatever a client's work reads of the server raises.

    Returns:
        A list that grows by a word for each call of the runner, so that a test can see that clients have worked.
    """
    depth, calls = [0], list[str]()
    read = Server.__getattribute__

    def guarded(server: Server, name: str) -> Any:
        if depth[0] and not name.startswith("__"):
            raise SealBrokenError(f"a client's work read server.{name}")
        return read(server, name)

    def sealed(name: str) -> Callable[..., Any]:
        method = getattr(ClientRunner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            depth[0] += 1
            try:
                return method(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    monkeypatch.setattr(Server, "__getattribute__", guarded)
    for name in WORK:
        monkeypatch.setattr(ClientRunner, name, sealed(name))
    return calls
