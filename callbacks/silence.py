"""What a module logs in a private run's training, thrown away."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from lit_epgan.networks.modes import LOGGING as LOGGING


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
