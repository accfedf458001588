"""A language model as a LightningModule: the next word of a sentence, or the next byte of a word."""

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single
from lit_epgan.networks.language import CIFGLanguageNetwork, Ranked, most_probable, sampled

TALLIED = 3  # negative log-likelihood, right predictions, symbols


class LanguageModel(LightningModule):
    """Minimises the cross-entropy of the next symbol, a mean over the symbols of a batch.

    A batch is (symbols, mask): int64 (batch, T), each row from its begin to its end, and bool (batch, T), where there
    is something. What a client trains on is its own, so the loss is a mean over each user's symbols, and a federation's
    mean over users counts every user alike under differential privacy (Augenstein et al. 2020, algorithm 2).

    Evaluation logs ``cross_entropy`` of a symbol, ``perplexity``, its exponential, and ``accuracy``, the share of
    symbols that were the most probable, in [0, 1].

    Args:
        network: symbols -> scores of the next.
        optimizer: of all parameters.
    """

    def __init__(self, network: CIFGLanguageNetwork, optimizer: OptimizerCallable = torch.optim.SGD) -> None:
        super().__init__()
        self.network, self.optimizer = network, optimizer
        self._tally: list[Tensor] = []

    def on_fit_start(self) -> None:
        """Refuse data of other symbols than the network's, where the data module says which there are."""
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        symbols = getattr(data, "symbols", None)
        if symbols is not None and len(symbols) != self.network.symbols:
            raise UserError(
                f"the data have {len(symbols)} symbols, the network {self.network.symbols}: set its symbols to "
                f"{len(symbols)}."
            )

    def forward(self, symbols: Tensor) -> Tensor:
        """Scores (batch, T, symbols) of what follows each of ``symbols``, int64 (batch, T)."""
        return self.network(symbols)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, following = self._scored(batch)
        return F.cross_entropy(scores, following)

    def on_validation_epoch_start(self) -> None:
        self._tally.clear()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        scores, following = self._scored(batch)
        loss = F.cross_entropy(scores, following, reduction="sum")
        right = (scores.argmax(1) == following).sum()
        self._tally.append(torch.stack([loss, right.to(loss), loss.new_tensor(len(following))]))

    def on_validation_epoch_end(self) -> None:
        tally = torch.stack(self._tally).double().sum(0) if self._tally else torch.zeros(TALLIED, device=self.device)
        loss, right, count = self.trainer.strategy.reduce(tally, reduce_op="sum")
        cross_entropy = loss / count
        scores = {"cross_entropy": cross_entropy, "perplexity": cross_entropy.exp(), "accuracy": right / count}
        self.log_dict({name: value.float() for name, value in scores.items()})

    def on_test_epoch_start(self) -> None:
        self.on_validation_epoch_start()

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validation_step(batch, batch_idx)

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())

    def sample(self, count: int, longest: int, generator: torch.Generator | None = None) -> list[list[int]]:
        """``count`` sentences or words drawn from the model, as numbers without their ends."""
        return sampled(self.network, count, longest, generator)

    def most_probable(self, count: int, longest: int, width: int = 4096) -> Ranked:
        """The ``count`` sentences or words of the highest joint probability (Augenstein et al. 2020, equation 1)."""
        return most_probable(self.network, count, longest, width)

    def _scored(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Scores (n, symbols), in single precision at least, and what followed (n,), where something did."""
        symbols, mask = batch
        there = mask[:, 1:]
        return at_least_single(self(symbols[:, :-1])[there]), symbols[:, 1:][there]
