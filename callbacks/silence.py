"""What a module logs, thrown away: in a training step beside the epoch, and in all of a private run's training."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

LOGGING = ("log", "log_dict")


@contextmanager
def replaced_logging(module: LightningModule, *functions: Callable[..., None]) -> Iterator[None]:
    """Within, these take the place of the module's ``log`` and ``log_dict``."""
    shadowed: dict[str, Any] = {n: module.__dict__[n] for n in LOGGING if n in module.__dict__}
    module.__dict__.update(zip(LOGGING, functions, strict=True))
    try:
        yield
    finally:
        for name in LOGGING:
            del module.__dict__[name]
        module.__dict__.update(shadowed)


@contextmanager
def silent(module: LightningModule) -> Iterator[None]:
    """Within, what the module logs is thrown away."""
    with replaced_logging(module, _nothing, _nothing):
        yield


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a module logs has no place here."""


class Dropping:
    """A module's ``log`` that drops what comes while it trains, at a round's end too: it is of the clients' records.

    Args:
        module: whose it is.
    """

    def __init__(self, module: LightningModule) -> None:
        self.public = False
        self._module, self._log = module, module.log  # of the class, or a guard around it

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log it, if it is public or of validation."""
        if self.public or not self._module.trainer.training:
            self._log(name, value, *args, **options)


def without_training_logs(module: LightningModule) -> None:
    """Drop what the module logs in training."""
    module.log = Dropping(module)  # type: ignore[method-assign]


@contextmanager
def public(module: LightningModule) -> Iterator[None]:
    """Within, what is logged comes of the server's model or of the configuration, and is kept in a private run."""
    log = module.__dict__.get("log")
    if isinstance(log, Dropping):
        log.public = True
    try:
        yield
    finally:
        if isinstance(log, Dropping):
            log.public = False
