"""What a mechanism does around a fit: what a private one silences and refuses, how it begins and ends."""

from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lit_epgan.callbacks.private_run import (
    drawn_by_coins,
    refuse_late_changes,
    refuse_what_tells,
    without_callbacks_that_tell,
)
from lit_epgan.callbacks.silence import without_training_logs
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import Algorithm, Mechanism, Plan, Sampler
from lit_epgan.engine.mechanisms import LocalPlan
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.errors import UserError


class MechanismInFit:
    """A federation's mechanism, from the set-up to the end of a fit; without one it does nothing.

    Args:
        mechanism: what is done to whole reports, or to local steps.
    """

    def __init__(self, mechanism: Mechanism | None) -> None:
        self.mechanism = mechanism
        self._local: LocalPlan | None = None

    @property
    def by_record(self) -> bool:
        """Whether it is at work at the clients, and not on what they send."""
        return self.mechanism is not None and self.mechanism.by_record

    def set_up(self, trainer: Trainer, module: LightningModule) -> None:
        """Leave out what tells of single clients or records.

        Raises:
            UserError: the module does what a private run must not do.
        """
        if self.mechanism is None:
            return
        if self.mechanism.private or self.mechanism.by_record:
            without_callbacks_that_tell(trainer)
            without_training_logs(module)
        if self.by_record:
            refuse_late_changes(module)

    def prepare(self, datamodule: FederatedDataModule, tensors: ModuleState, optimizer_state: str) -> None:
        """Refuse settings by which more than the protected model would leave, and see to it how records are drawn.

        A Trainer makes a fit's first batch before ``begin``: coins have to be there by then.

        Raises:
            UserError: naming the setting.
        """
        if self.mechanism is None:
            return
        if self.mechanism.private:
            refuse_what_tells(datamodule, tensors, optimizer_state)
        self._local = drawn_by_coins(datamodule, self.mechanism.noise_seed) if self.by_record else None

    def begin(
        self,
        trainer: Trainer,
        algorithm: Algorithm,
        sampler: Sampler,
        datamodule: FederatedDataModule,
        state: dict[str, Any],
    ) -> None:
        """Tell the mechanism what is planned, and print what it guarantees; which round comes next is known by now.

        Raises:
            UserError: what is planned must not be done, or nobody knows how long it goes on.
        """
        if self.mechanism is None:
            return
        if (self.mechanism.private or self.by_record) and (trainer.max_epochs is None or trainer.max_epochs < 0):
            raise UserError(
                f"{type(self.mechanism).__name__} has to know how many rounds there will be, for each of them costs "
                "epsilon: set trainer.max_epochs"
            )
        rounds = range(trainer.current_epoch, trainer.max_epochs or 0)
        exchanges = algorithm.exchanges(rounds.start, rounds.stop)
        folder, resumed = Path(trainer.default_root_dir), trainer.current_epoch > 0
        clients = len(datamodule.active)
        self.mechanism.begin(Plan(sampler, clients, exchanges, folder, resumed, state, rounds, self._local))
        if (promised := self.mechanism.guarantee()) is not None:
            rank_zero_info(f"{type(self.mechanism).__name__}: {promised}")

    def end(self) -> None:
        """Nothing more is released."""
        if self.mechanism is not None:
            self.mechanism.end()
