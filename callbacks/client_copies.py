"""The module's torchmetrics metrics for one client at a time, exactly and not as means of batches."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

NOT_DEFINED = "meaningless"  # torchmetrics' word where it returns 0 for what is not defined, as AUROC of one class


class ClientCopies:
    """A copy of every metric of a module, which sees one client's batches alone while the metric itself sees them all.

    Whatever the module's steps give to a metric (``update`` or a call) goes to the copy, too, until ``remove``.

    Args:
        module: whose metrics are watched, single ones and collections.
    """

    def __init__(self, module: nn.Module) -> None:
        self._copies: list[_Copy] = [_Copy(name, metric) for name, metric in _outermost(module)]
        self._of = {id(own): each for kept in self._copies for own, each in kept.pairs()}

    def value(self, metric: Metric) -> float | None:
        """The metric of what has come since ``reset``; None where nothing came, or it is not defined or no number."""
        each = self._of.get(id(metric))
        if each is None or not each.update_called:
            return None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                value = each.compute()
            except (ValueError, RuntimeError):  # of too few records, or of one class
                return None
        if any(NOT_DEFINED in str(warning.message) for warning in told):
            return None
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None

    def updated(self) -> dict[str, list[Metric]]:
        """Metrics that have been given anything since ``reset``: the module's own, by the name in the module."""
        given = [c for c in self._copies if any(each.update_called for _, each in c.pairs())]
        return {c.name: [own for own, _ in c.pairs()] for c in given}

    def reset(self) -> None:
        """Another client begins."""
        for each in self._copies:
            each.copy.reset()

    def remove(self) -> None:
        """Leave the module's metrics as they were."""
        for each in self._copies:
            each.remove()


class _Copy:
    """A metric or a collection, and its copy."""

    def __init__(self, name: str, original: Metric | MetricCollection) -> None:
        self.name, self.original, self.copy = name, original, copy.deepcopy(original)
        for _, each in self.pairs():
            each.distributed_available_fn = lambda: False  # every rank evaluates all of a client's data
        self.copy.reset()
        self._inside = False
        self._before: dict[str, Any] = {
            n: original.__dict__[n] for n in ("update", "forward") if n in original.__dict__
        }
        for method in ("update", "forward"):
            original.__dict__[method] = self._seen(getattr(original, method))

    def pairs(self) -> Iterator[tuple[Metric, Metric]]:
        for own, each in zip(self.original.modules(), self.copy.modules(), strict=True):
            if isinstance(own, Metric) and isinstance(each, Metric):
                yield own, each

    def remove(self) -> None:
        for method in ("update", "forward"):
            del self.original.__dict__[method]
        self.original.__dict__.update(self._before)

    def _seen(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # a call updates by itself, once or twice
                return method(*args, **kwargs)
            self._inside = True
            try:
                self.copy.update(*args, **kwargs)
                return method(*args, **kwargs)
            finally:
                self._inside = False

        return seen


def _outermost(module: nn.Module) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """Metrics and collections that are part of no other one, each once."""
    inner: list[str] = []
    for name, each in module.named_modules():
        if any(name.startswith(outer) for outer in inner):
            continue
        if isinstance(each, Metric | MetricCollection):
            inner.append(f"{name}.")
            yield name, each
