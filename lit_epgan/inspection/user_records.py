"""Users' records as a few tensors, and the primary model, whose mistakes are looked into.

What each client would compute alone is computed for many users at once.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for, isolated, seed_on_host

BLOCK = 256  # users in memory at a time
CHUNK = 2048  # records in the primary model at a time


@dataclass(frozen=True)
class Records:
    """The records of some users, one user's after another's.

    Entries (n, ...) are what a record is made of: x, the label, and whatever else the data set gives. ``user`` (n,),
    int64, says whose each is, from 0, of ``users``, those without a record included; ``predicted`` (n,), int64, are the
    primary model's labels, where there is one.
    """

    entries: tuple[Tensor, ...]
    user: Tensor
    users: int
    predicted: Tensor | None = None

    @classmethod
    def of(cls, datasets: Sequence[Dataset]) -> "Records":
        """All records of the users' data sets, in their order. UserError: nobody has a record."""
        held = [_entries(dataset) for dataset in datasets]
        counts = torch.tensor([len(own[0]) if own else 0 for own in held])
        if not counts.sum():
            raise UserError("the users hold no record: there is nothing to look at")
        entries = tuple(map(torch.cat, zip(*(own for own in held if own), strict=True)))
        return cls(entries, torch.arange(len(held)).repeat_interleave(counts), len(held))

    @property
    def x(self) -> Tensor:
        """Inputs (n, ...)."""
        return self.entries[0]

    @property
    def y(self) -> Tensor:
        """Labels (n,), if the records have any (``entry``)."""
        return self.entry(1)

    def entry(self, number: int) -> Tensor:
        """What stands at that place of every record, (n, ...). UserError: records have fewer entries."""
        if not 0 <= number < len(self.entries):
            raise UserError(
                f"the selection asks for entry {number} of a record (0 is x, 1 the label), and records have "
                f"{len(self.entries)}"
            )
        return self.entries[number]

    def with_predictions(self, predicted: Tensor) -> "Records":
        """The same with the primary model's labels (n,)."""
        return replace(self, predicted=predicted)

    def correct(self) -> Tensor:
        """Whether the primary model's label is the record's own, (n,), bool. UserError: there is no primary model."""
        if self.predicted is None:
            raise UserError("the selection asks what a primary model gets right: give one, as primary")
        return self.predicted == self.y

    def sums(self, values: Tensor) -> Tensor:
        """Each user's sum (users, ...), float64, of values (n, ...)."""
        totals = torch.zeros(self.users, *values.shape[1:], dtype=torch.float64)
        return totals.index_add_(0, self.user, values.double())


def blocks(users: Mapping[str, Dataset], size: int = BLOCK) -> Iterator[Records]:
    """The users' records, ``size`` users at a time."""
    datasets = list(users.values())
    for first in range(0, len(datasets), size):
        some = datasets[first : first + size]
        if any(map(_length, some)):
            yield Records.of(some)


def _length(dataset: Dataset) -> int:
    if not hasattr(dataset, "__len__"):
        raise UserError("a user's data are a stream of unknown length: give a data set of a known one")
    return len(dataset)


def _entries(dataset: Dataset) -> tuple[Tensor, ...]:
    number = _length(dataset)
    if not number:
        return ()
    if isinstance(dataset, TensorDataset):
        return dataset.tensors
    if hasattr(dataset, "fetch"):
        batch = dataset.fetch(list(range(number)))
    else:
        batch = default_collate([dataset[k] for k in range(number)])
    entries = (batch,) if isinstance(batch, Tensor) else batch
    if not isinstance(entries, list | tuple) or not all(isinstance(each, Tensor) for each in entries):
        raise UserError("records are expected to be tensors, or tuples of them that begin with x and the label")
    return tuple(entries)


class Primary:
    """Labels by any LightningModule with ``predict_step``, in evaluation mode."""

    def __init__(self, module: LightningModule) -> None:
        self.module = module.eval()

    @torch.no_grad()
    def __call__(self, records: Records) -> Tensor:
        """The predicted labels (n,), int64, on the CPU. UserError: ``predict_step`` gives no labels."""
        chunks = zip(*(entry.split(CHUNK) for entry in records.entries), strict=True)
        device = self.module.device
        found = []
        for number, chunk in enumerate(chunks):
            answer = self.module.predict_step([each.to(device) for each in chunk], number)
            found.append(labels(answer, len(chunk[0])).cpu())
        return torch.cat(found)


def labels(answer: Any, n: int) -> Tensor:
    """The labels (n,) in what ``predict_step`` gives: its entry ``class``, whole numbers (n,), or logits (n, classes).
    UserError: it is none of these."""
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
    """The module with a checkpoint's parameters; the file is read as data and runs no code. UserError: the file is
    missing, damaged, or of another model."""
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
    """The module trained by its own training step on public records, [x, label, ...].

    ``seed`` is of shuffling and of what the module draws; the global random streams stay as they were.
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
    with warnings.catch_warnings(action="ignore"):
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
