"""The primary model: whose mistakes are looked into."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan import tensor_file
from lit_epgan.errors import UserError
from lit_epgan.inspection.records import Records
from lit_epgan.randomness import generator_for, isolated, seed_on_host

CHUNK = 2048  # records in the model at a time


class Primary:
    """Labels by any LightningModule with ``predict_step``.

    Args:
        module: the model; it is put into evaluation mode.
    """

    def __init__(self, module: LightningModule) -> None:
        self.module = module.eval()

    @torch.no_grad()
    def __call__(self, records: Records) -> Tensor:
        """The predicted labels (n,), int64, on the CPU.

        Raises:
            UserError: ``predict_step`` gives no labels.
        """
        chunks = zip(*(entry.split(CHUNK) for entry in records.entries), strict=True)
        device = self.module.device
        found = []
        for number, chunk in enumerate(chunks):
            answer = self.module.predict_step([each.to(device) for each in chunk], number)
            found.append(labels(answer, len(chunk[0])).cpu())
        return torch.cat(found)


def labels(answer: Any, n: int) -> Tensor:
    """The labels (n,) in what ``predict_step`` gives: its entry ``class``, whole numbers (n,), or logits (n, classes).

    Raises:
        UserError: it is none of these.
    """
    if isinstance(answer, dict) and "class" in answer:
        answer = answer["class"]
    if isinstance(answer, Tensor) and len(answer) == n:
        if answer.dim() == 2:
            return answer.argmax(1)
        if answer.dim() == 1 and not answer.is_floating_point():
            return answer.long()
    raise UserError(
        "the primary model's predict_step gives no labels: a dictionary with the entry `class`, whole numbers (rows,) "
        "or logits (rows, classes) are expected"
    )


def loaded(module: LightningModule, checkpoint: str | Path) -> LightningModule:
    """The module with a checkpoint's parameters; the file is read as data and runs no code.

    Raises:
        UserError: the file is missing, damaged, or of another model.
    """
    content = tensor_file.load(checkpoint)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise UserError(f"the checkpoint {checkpoint} holds no state_dict, as Lightning writes it")
    try:
        module.load_state_dict(content["state_dict"])
    except RuntimeError as error:
        first = next(line.strip() for line in [*str(error).splitlines()[1:], str(error)] if line.strip())
        raise UserError(f"the checkpoint {checkpoint} is of another model than primary: {first}") from error
    return module


def trained(module: LightningModule, public: Records, epochs: int, batch_size: int, seed: int) -> LightningModule:
    """The module trained by its own training step on public records; the global random streams stay as they were.

    Args:
        module: any that trains on [x, label, ...].
        public: the records.
        epochs: passes over them.
        batch_size: rows of a batch.
        seed: of shuffling and of what the module draws.
    """
    loader = DataLoader(
        TensorDataset(*public.entries), batch_size, shuffle=True, generator=generator_for(seed, "inspection", "order")
    )
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with isolated(), torch.enable_grad(), _quietly():
        seed_on_host(seed)
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", enable_model_summary=False, **quiet)
        trainer.fit(module, loader)
    return module


@contextmanager
def _quietly() -> Iterator[None]:
    """What Lightning says of devices, loggers and loops is no part of an inspection."""
    loggers = [logging.getLogger(f"lightning.{name}") for name in ("pytorch", "fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
