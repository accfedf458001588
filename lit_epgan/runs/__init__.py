"""What a run is made from and leaves on disk: configurations, its folder, checkpoints, its numbers, its loggers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_epgan.runs.loggers import MetricsFile, MLflowHistory, WandbHistory

__all__ = ["MLflowHistory", "MetricsFile", "WandbHistory"]


def __getattr__(name: str) -> Any:
    """Import a logger when it is asked for: a study plans its runs without the seconds that Lightning takes."""
    if name in __all__:
        return getattr(import_module("lit_epgan.runs.loggers"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
