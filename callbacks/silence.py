"""Running a module's training step beside the epoch: nothing it logs is kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

LOGGING = ("log", "log_dict")


@contextmanager
def silent(module: LightningModule) -> Iterator[None]:
    """Within, what the module logs is thrown away."""
    shadowed: dict[str, Any] = {n: module.__dict__[n] for n in LOGGING if n in module.__dict__}
    for name in LOGGING:
        module.__dict__[name] = _nothing
    try:
        yield
    finally:
        for name in LOGGING:
            del module.__dict__[name]
        module.__dict__.update(shadowed)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a module logs has no place here."""
