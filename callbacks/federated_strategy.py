"""Several ranks, each with its own clients: Lightning's process launcher without gradient synchronisation."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lit_epgan.fit.loop import RankLauncher, leave_out_sigterm_broadcast
from lit_epgan.fit.rank_watch import RankWatch
from lit_epgan.runs.checkpoints import where_to_go_on

ROUND = timedelta(days=30)  # one rank may be at its round for long; the watch knows whether it is still there


class FederatedStrategy(DDPStrategy):
    """One process per device as under DDP, but every rank trains clients of its own; ranks meet at the round's end.

    When a rank ends before its run is over, the others end too, each with a sentence that names it.

    Args:
        patience: seconds without an answer after which a rank counts as gone. A rank that is busy answers.
        rendezvous: seconds that ranks wait for each other at the start.
        timeout: how long ranks that are there wait for each other at a round's end.
        options: those of ``DDPStrategy``.
    """

    def __init__(
        self, patience: float = 30.0, rendezvous: float = 600.0, timeout: timedelta = ROUND, **options: Any
    ) -> None:
        super().__init__(timeout=timeout, **options)
        self.patience, self.rendezvous = patience, rendezvous
        self._watch: RankWatch | None = None

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = RankLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Meet the other ranks; from here on they are watched."""
        if self.num_nodes * self.num_processes == 1:
            super().setup_environment()
            return
        assert self.lightning_module is not None
        leave_out_sigterm_broadcast(self.lightning_module.trainer)
        first = self.node_rank * self.num_processes
        children = getattr(self.launcher, "children", [])
        self._watch = RankWatch(
            first + self.local_rank,
            self.patience,
            self.rendezvous,
            {first + number: child for number, child in enumerate(children, 1)},
            RankLauncher.starter(),
            self._advice,
        )
        self._watch.start()
        super().setup_environment()
        self._watch.meet()

    def _advice(self) -> str:
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                return where_to_go_on(Path(callback.dirpath))
        return ""

    def configure_ddp(self) -> None:
        """Every rank starts from rank 0's parameters; gradients are not synchronised."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)  # every rank starts from rank 0's parameters

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._watch is not None:
            self._watch.failed(exception)

    def teardown(self) -> None:
        """The run is over; the other ranks may take longer."""
        if self._watch is not None:
            self._watch.stop()
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("federated", cls, description="each rank trains its own clients of the round")


if "federated" not in StrategyRegistry:
    FederatedStrategy.register_strategies(StrategyRegistry)
