"""What a run is made from and leaves on disk: configurations, its folder, checkpoints, its numbers, its loggers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_epgan.runs.loggers import MetricsFile, WandbHistory

__all__ = ["MetricsFile", "WandbHistory"]
_MODULES = {"MetricsFile": "metrics_file", "WandbHistory": "wandb_history"}


def __getattr__(name: str) -> Any:
    """Import a logger when it is asked for: a study plans its runs without the seconds that Lightning takes."""
    if name in _MODULES:
        return getattr(import_module(f"lit_epgan.runs.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
