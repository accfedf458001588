"""Which records train and which test, where nobody has said so: of every class a fifth are for testing."""

from typing import Literal

import torch
from torch import Tensor

from lit_epgan.lib.randomness import generator_for

Split = Literal["fixed", "tuning", "by_seed"]


def split_by_class(labels: Tensor, split_seed: int, split: Split = "fixed", own_seed: int = 0) -> tuple[Tensor, Tensor]:
    """The rows that train and the rows that test, int64: of each class of ``labels`` (n,), int64, 80 % and 20 %, as
    ``split_seed`` permutes it. ``tuning`` takes the last fifth of each class's training rows in the place of its test
    rows; ``by_seed`` draws the test rows anew among all but these, by ``own_seed``."""
    generator = torch.Generator().manual_seed(split_seed)
    own = generator_for(split_seed, own_seed, "split")
    train, test = [], []
    for label in labels.unique():
        rows = torch.nonzero(labels == label).flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        cut, tuned = int(0.8 * len(rows)), int(0.64 * len(rows))
        first, tuning, last = rows[:tuned], rows[tuned:cut], rows[cut:]
        if split == "tuning":
            last = tuning
        else:
            first = torch.cat([first, tuning])
        if split == "by_seed":
            others = torch.cat([rows[:tuned], last])
            others = others[torch.randperm(len(others), generator=own)]
            first, last = torch.cat([tuning, others[: -len(last)]]), others[-len(last) :]
        train.append(first)
        test.append(last)
    return torch.cat(train), torch.cat(test)
