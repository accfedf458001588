"""A run killed after its last checkpoint is resumed with no round left: its loggers are rewound all the same."""

from pathlib import Path

from lightning.pytorch.loggers import CSVLogger

from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from tests.federations import federation, fit
from tests.modules import Regression


class Rewound(CSVLogger):
    """Notes the rounds to which it is rewound."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.to: list[int] = []

    def rewind(self, epoch: int) -> None:
        self.to.append(epoch)


def test_the_loggers_are_rewound_once(tmp_path: Path) -> None:
    found = []
    for again in (False, True):
        logger = Rewound(tmp_path)
        resumed = {"ckpt_path": tmp_path / "checkpoints" / "last.ckpt"} if again else {}
        callbacks = [RoundCheckpoint(tmp_path / "checkpoints")]
        fit(
            Regression(),
            federation(),
            rounds=2,
            callbacks=callbacks,
            logger=logger,
            enable_checkpointing=True,
            **resumed,
        )
        found.append(logger.to)
    assert found == [[0], [2]]
