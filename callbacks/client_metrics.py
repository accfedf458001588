"""Every client's own validation metrics, and the worst client's, beside the mean."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lit_epgan.callbacks.lightning_internals import forward_value, result_metrics
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine.parameters import matches
from lit_epgan.text import printable

HIGHER_IS_BETTER = ("*acc*", "*auroc*", "*f1*", "*precision*", "*recall*", "*iou*", "*psnr*", "*ssim*")


class PersonalLayers(Protocol):
    """What evaluating a client's own model takes."""

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers."""
        ...

    def load_personal(self, client: int) -> None:
        """Give the module a client's personal layers."""
        ...

    def load_server(self) -> None:
        """Make the module the server's again."""
        ...


class ClientMetrics(Callback):
    """Splits what the module logs in ``validation_step`` by client, where clients hold validation data of their own.

    The FederationCallback brings one along; add your own only for other name patterns.

    ``val_loss`` becomes also ``val_loss/client/NAME`` for every client and ``val_loss/worst_client``. A client with
    personal layers is evaluated with its own. Averages weigh batches as Lightning does, by their rows; for a
    torchmetrics object the client's value is the mean of its batches' values.

    Args:
        higher_is_better: name patterns of metrics whose worst client is the lowest; of all others it is the highest.
    """

    def __init__(self, higher_is_better: Sequence[str] = HIGHER_IS_BETTER) -> None:
        self.higher_is_better = tuple(higher_is_better)
        self.federation: PersonalLayers | None = None  # the FederationCallback introduces itself
        self._sums: dict[str, dict[int, tuple[float, float]]] = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to gather, with all clients' personal layers at hand."""
        self._sums = {}
        self._before: dict[str, tuple[float, float]] = {}
        self._federation = None if trainer.sanity_checking else self.federation
        if self._federation is not None:
            self._federation.exchange_personal()

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Take up the personal layers of the client whose first batch this is."""
        marks = self._marks(trainer)
        if marks and marks[0].first and self._federation is not None:
            self._federation.load_personal(marks[0].client)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Note what the batch added to each metric."""
        marks = self._marks(trainer)
        if not marks:
            return
        client = marks.popleft().client
        for name, (value, weight) in self._batch_values(trainer, batch).items():
            total, weights = self._sums.setdefault(name, {}).get(client, (0.0, 0.0))
            self._sums[name][client] = (total + value, weights + weight)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log every client's metrics and the worst client's."""
        if self._federation is not None:
            self._federation.load_server()
        names = [printable(name) for name in trainer.datamodule.client_names] if self._sums else []  # type: ignore[attr-defined]
        for metric, sums in self._sums.items():
            values = {client: total / weight for client, (total, weight) in sums.items() if weight}
            if not values:
                continue
            pl_module.log_dict({f"{metric}/client/{names[k]}": v for k, v in values.items()})
            worst = min if matches(metric, self.higher_is_better) else max
            pl_module.log(f"{metric}/worst_client", worst(values.values()))

    @staticmethod
    def _marks(trainer: Trainer) -> Any:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        return datamodule.validation_marks if isinstance(datamodule, FederatedDataModule) else None

    def _batch_values(self, trainer: Trainer, batch: Any) -> Mapping[str, tuple[float, float]]:
        """What this batch added to each epoch metric: (sum of values times weights, weight)."""
        added = {}
        for result in result_metrics(trainer):
            if not result.meta.on_epoch:
                continue
            name = result.meta.name
            if not result.is_tensor:
                value = forward_value(result)
                if isinstance(value, Tensor) and value.numel() == 1:
                    rows = extract_batch_size(batch)
                    added[name] = (float(value) * rows, float(rows))
            elif result.meta.is_mean_reduction:
                now = (float(result.value), float(result.cumulated_batch_size))
                value, weight = self._before.get(name, (0.0, 0.0))
                added[name] = (now[0] - value, now[1] - weight)
                self._before[name] = now
        return added
