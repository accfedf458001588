"""Sequences of numbers of different lengths as a data set: batches are padded, and say where they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lit_epgan.datamodules.clients import BatchDataset


class TokenSequences(BatchDataset):
    """Sequences, each between the symbols that begin and end it, cut after ``longest`` symbols between them.

    A batch is as long as its longest sequence. The end is repeated up to there, where the mask is False.

    Args:
        sequences: lists of numbers.
        begin, end: the two symbols.
        longest: symbols of a sequence that are kept; the end of one that was cut is left out.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], begin: int, end: int, longest: int) -> None:
        rows = [[begin, *sequence[:longest], *([end] if len(sequence) <= longest else [])] for sequence in sequences]
        self.lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        width = int(self.lengths.max()) if rows else 0
        filled = [row + [end] * (width - len(row)) for row in rows]
        self.symbols = torch.tensor(filled, dtype=torch.int64).view(len(rows), width)

    def __len__(self) -> int:
        return len(self.symbols)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sequence, int64 (T,), and its mask, bool (T,), T the data set's longest."""
        symbols = self.symbols[index]
        return symbols, torch.arange(len(symbols)) < self.lengths[index]

    def fetch(self, indices: list[int]) -> list[Tensor]:
        """A batch at once: [symbols, int64 (b, T), mask, bool (b, T)], T the batch's longest."""
        lengths = self.lengths[indices]
        longest = int(lengths.max())
        return [self.symbols[indices, :longest], torch.arange(longest) < lengths[:, None]]
