"""Every client's own metrics in validation and test, their means and spread, and the worst client's."""

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine.parameters import matches
from lit_epgan.fit.loop import forget_earlier, result_metrics
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few, printable
from lit_epgan.metrics.over_clients import ClientResults, over_clients

# torchmetrics' words where it returns a number for what is not defined, as the AUROC of one class
NOT_DEFINED = ("meaningless", "recall is undefined", "was `nan`", "Returns 0 score", "coefficient to nan")
COUNTS = {  # of a binary ratio, those that its denominator is the sum of; torchmetrics says nothing where it is 0
    "BinaryPrecision": ("tp", "fp"),
    "BinaryRecall": ("tp", "fn"),
    "BinarySpecificity": ("tn", "fp"),
    "BinaryNegativePredictiveValue": ("tn", "fn"),
    **dict.fromkeys(("BinaryF1Score", "BinaryFBetaScore", "BinaryJaccardIndex"), ("tp", "fp", "fn")),
}


class ClientCopies:
    """A copy of every metric or collection of a module, which sees one client's batches alone while the metric itself
    sees them all. Whatever the module's steps give to a metric (``update`` or a call) goes to the copy, too, until
    ``remove``."""

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
        if _is_empty_ratio(each) or any(word in str(warning.message) for warning in told for word in NOT_DEFINED):
            return None
        return float(value) if isinstance(value, Tensor) and value.numel() == 1 else None

    def updated(self) -> dict[str, list[Metric]]:
        """Metrics that have been given anything since ``reset``: the module's own, by the name in the module."""
        given = [c for c in self._copies if any(each.update_called for _, each in c.pairs())]
        return {c.name: [own for own, _ in c.pairs()] for c in given}

    def reset(self) -> None:
        for each in self._copies:
            each.copy.reset()

    def remove(self) -> None:
        """Leave the module's metrics as they were."""
        for each in self._copies:
            each.remove()


def _is_empty_ratio(metric: Metric) -> bool:
    """Whether a binary metric is 0 / 0."""
    kind, counts = type(metric).__name__, getattr(metric, "confmat", None)
    if kind == "BinaryMatthewsCorrCoef" and isinstance(counts, Tensor):
        return bool((counts.sum(0) == 0).any() or (counts.sum(1) == 0).any())
    if isinstance(counts, Tensor) and counts.shape == (2, 2):
        cells = dict(zip(("tn", "fp", "fn", "tp"), counts.flatten(), strict=True))
    else:
        cells = {name: getattr(metric, name, None) for name in ("tn", "fp", "fn", "tp")}
    needed = [cells[name] for name in COUNTS.get(kind, ())]
    return bool(needed) and all(isinstance(each, Tensor) and not each.any() for each in needed)


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


WORDS = re.compile(r"[A-Z]+\d*(?![a-z])|[A-Z]?[a-z]+\d*|\d+")
NO_MEANS = {  # of a metric's name: averaged over batches these are not what they are called
    *("auc", "auroc", "auprc", "ap", "map", "f1", "fbeta", "precision", "recall", "sensitivity", "specificity"),
    *("dice", "iou", "jaccard", "mcc", "kappa", "rmse", "r2", "pearson", "spearman", "ece", "perplexity"),
    *("quantile", "median", "percentile", "fid", "kid"),
}


class PersonalLayers(Protocol):
    """What evaluating a client's own model takes."""

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers."""
        ...

    def load_personal(self, client: int) -> None: ...

    def load_server(self) -> None: ...


class ClientMetrics(Callback):
    """Splits what the module logs in ``validation_step`` and ``test_step`` by client, where clients hold data each.

    The FederationCallback brings one along; add your own to say which way metrics are better. Beside ``M`` it logs
    ``M/client/NAME`` for each client, and what ``over_clients`` makes of them: ``M/mean_over_clients``,
    ``M/weighted_mean_over_clients``, ``M/std_over_clients``, ``M/worst_client``, ``M/worst_client_index``. A client
    with personal layers is evaluated with its own.

    A torchmetrics object is computed from each client's own records. A logged tensor is averaged as Lightning does it,
    by the batches' rows. Tensors whose name says that they are no means (``val_f1``) are left out, and that is said.

    Args:
        higher_is_better: names, or name patterns as ``*_score``, of metrics that are better the higher they are.
        lower_is_better: the same of those that are better the lower they are, as ``val_loss``. What stands in neither
            is taken from the torchmetrics object's own ``higher_is_better``, or from the module's, a dictionary by
            name, as ``{"val_loss": False}``, None where no way is. Where nothing says it there is no worst client.

    Attributes:
        results: what the last evaluation has measured at each client.
    """

    tells_of_clients = True  # a private run leaves it out

    def __init__(self, higher_is_better: Sequence[str] = (), lower_is_better: Sequence[str] = ()) -> None:
        self.higher_is_better, self.lower_is_better = tuple(higher_is_better), tuple(lower_is_better)
        self.federation: PersonalLayers | None = None  # the FederationCallback introduces itself
        self.results = ClientResults()
        self._copies: ClientCopies | None = None
        self._client: int | None = None
        self._told: set[str] = set()
        self._own: set[str] = set()  # names logged here, which Lightning lists again in the next round

    # Hooks ------------------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to gather, with all clients' personal layers at hand."""
        forget_earlier(trainer)  # a number for each client, else the time of a batch would grow with the clients
        self._sums: dict[str, dict[int, tuple[float, float]]] = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._logged: dict[str, Metric] = {}
        self._exact: dict[str, dict[int, float]] = {}
        self._undefined: dict[str, list[int]] = {}
        self._unlogged: set[str] = set()
        self._rows: dict[int, int] = {}
        self._client = None
        ways = getattr(pl_module, "higher_is_better", None)
        self._ways: Mapping[str, bool | None] = ways if isinstance(ways, Mapping) else {}
        self.results = ClientResults()
        self._federation = None if trainer.sanity_checking else self.federation
        if self._federation is not None:
            self._federation.exchange_personal()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take up the personal layers of the client whose first batch this is."""
        marks = self._marks(trainer)
        if not marks or not marks[0].first:
            return
        self._end_client()
        self._copies = self._copies or ClientCopies(pl_module)
        self._client = marks[0].client
        if self._federation is not None:
            self._federation.load_personal(self._client)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        marks = self._marks(trainer)
        if not marks:
            return
        client = marks.popleft().client
        self._rows[client] = self._rows.get(client, 0) + rows_of(batch)
        for name, (value, weight) in self._batch_values(trainer).items():
            total, weights = self._sums.setdefault(name, {}).get(client, (0.0, 0.0))
            self._sums[name][client] = (total + value, weights + weight)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log every client's metrics, and what they have in common."""
        self._end_client()
        self._release()
        if self._federation is not None:
            self._federation.load_server()
        if not self._rows:
            return
        self.results = self._found(trainer.datamodule.client_names)  # type: ignore[attr-defined]
        for metric, values in self.results.values.items():
            way = self.results.higher_is_better[metric]
            names = [printable(self.results.names[client]) for client in values]
            logged = {f"{metric}/client/{n}": value for n, value in zip(names, values.values(), strict=True)}
            numbers = over_clients(values, self.results.records, way)
            logged |= {f"{metric}/{name}": number for name, number in numbers.items()}
            self._own |= logged.keys()
            pl_module.log_dict(logged)
        if not trainer.sanity_checking:
            self._say_what_is_missing()

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    # What is measured -------------------------------------------------------------------------------------------------

    @staticmethod
    def _marks(trainer: Trainer) -> Any:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule.validation_marks if isinstance(datamodule, FederatedDataModule) else None

    def _batch_values(self, trainer: Trainer) -> dict[str, tuple[float, float]]:
        """What this batch added to the mean of each logged tensor: (sum of values times weights, weight)."""
        added = {}
        for result in result_metrics(trainer):
            name, meta = result.meta.name, result.meta
            if not meta.on_epoch or name in self._own:
                continue
            if not result.is_tensor:
                self._logged[name] = result.value
            elif not meta.is_mean_reduction or is_no_mean(name):
                self._unlogged.add(name)
            else:
                now = (float(result.value), float(result.cumulated_batch_size))
                value, weight = self._before.get(name, (0.0, 0.0))
                added[name] = (now[0] - value, now[1] - weight)
                self._before[name] = now
        return added

    def _end_client(self) -> None:
        """Compute the torchmetrics objects of the client whose batches are over."""
        if self._client is None or self._copies is None:
            return
        for name, metric in self._logged.items():
            value = self._copies.value(metric)
            if value is None:
                self._undefined.setdefault(name, []).append(self._client)
            else:
                self._exact.setdefault(name, {})[self._client] = value
        logged = {id(metric) for metric in self._logged.values()}
        for name, metrics in self._copies.updated().items():
            if not any(id(metric) in logged for metric in metrics):
                self._unlogged.add(name)
        self._copies.reset()
        self._client = None

    def _release(self) -> None:
        if self._copies is not None:
            self._copies.remove()
            self._copies = None

    def _found(self, names: list[str]) -> ClientResults:
        means = {n: {k: total / w for k, (total, w) in sums.items() if w} for n, sums in self._sums.items()}
        values = {name: each for name, each in (means | self._exact).items() if each}
        ways = {name: self._direction(name) for name in values}
        return ClientResults(list(names), dict(self._rows), values, ways)

    def _direction(self, name: str) -> bool | None:
        higher, lower = matches(name, self.higher_is_better), matches(name, self.lower_is_better)
        if higher and lower:
            raise UserError(f"ClientMetrics: {name} is in higher_is_better and in lower_is_better: leave it in one.")
        if higher or lower:
            return higher
        own: bool | None = getattr(self._logged.get(name), "higher_is_better", None)
        return self._ways.get(name) if own is None else own

    # What is said, each once ------------------------------------------------------------------------------------------

    def _say_what_is_missing(self) -> None:
        undirected = sorted(n for n, w in self.results.higher_is_better.items() if w is None and n not in self._ways)
        if undirected:
            self._say(
                f"no worst client of {few(undirected)}, for nothing says which way is better: add "
                f"ClientMetrics(lower_is_better=[{undirected[0]!r}]), or higher_is_better, to the callbacks"
            )
        for name in sorted(self._unlogged):
            self._say(
                f"{name} is not given for each client, for a mean of batches would not be {name}: log the torchmetrics "
                "object itself in validation_step and test_step, as self.log(name, self.metric)"
            )
        for name, clients in self._undefined.items():
            named = few([printable(self.results.names[client]) for client in clients])
            sentence = f"{name} is not defined on the data of {named}, who count neither in its means nor as its worst"
            self._say(sentence, rank_zero_warn)

    def _say(self, sentence: str, say: Callable[[str], Any] = rank_zero_info) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            say(sentence)


def is_no_mean(name: str) -> bool:
    """Whether a metric's name says that a mean over batches is not what it is called."""
    return any(word.lower() in NO_MEANS for word in WORDS.findall(name))


def rows_of(batch: Any) -> int:
    """Records of a batch; 0 where it does not show them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return extract_batch_size(batch)
        except MisconfigurationException:
            return 0
