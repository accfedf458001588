"""What a generative module asks of Lightning's evaluation loops."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lit_epgan.modules.gan import GAN
from tests.generative import Images, gan, trainer


class Batches(Callback):
    """Counts the held-out batches that Lightning fetches."""

    def __init__(self) -> None:
        self.validated = self.tested = 0

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.validated += not trainer.sanity_checking

    def on_test_batch_start(self, *_: Any) -> None:
        self.tested += 1


class SmallBatches(Images):
    """Twenty held-out images in four batches."""

    def val_dataloader(self) -> DataLoader:
        return self._loader(slice(40, 60), 5)

    test_dataloader = val_dataloader


class Judged(GAN):
    """Has a validation step of its own."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("rows", float(len(batch[0])))


def test_held_out_images_that_no_step_looks_at_are_not_walked(tmp_path: Path) -> None:
    """One batch a round is fetched, so that validation happens and callbacks can look."""
    seen = Batches()
    run = trainer(tmp_path, seen)
    run.fit(gan(), SmallBatches())
    assert seen.validated == 2
    run.validate(gan(), SmallBatches(), verbose=False)
    run.test(gan(), SmallBatches(), verbose=False)
    assert (seen.validated, seen.tested) == (3, 1)
    assert (run.limit_val_batches, run.limit_test_batches) == (1.0, 1.0)  # all, for whatever is evaluated next


def test_a_step_of_ones_own_sees_all_batches(tmp_path: Path) -> None:
    module = gan()
    module.__class__ = Judged
    seen = Batches()
    trainer(tmp_path, seen).fit(module, SmallBatches())
    assert seen.validated == 2 * 4


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches"])
def test_what_is_switched_off_stays_off(name: str, tmp_path: Path) -> None:
    run = trainer(tmp_path, **{name: 0})
    run.fit(gan(), SmallBatches())
    assert getattr(run, name) == 0
