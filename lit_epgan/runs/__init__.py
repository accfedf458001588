"""What a run is made from and leaves on disk: configurations, its folder, checkpoints, its table of numbers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_epgan.runs.metrics_file import MetricsFile

__all__ = ["MetricsFile"]


def __getattr__(name: str) -> Any:
    """Import the logger when it is asked for: a study plans its runs without the seconds that Lightning takes."""
    if name == "MetricsFile":
        from lit_epgan.runs.metrics_file import MetricsFile

        return MetricsFile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
