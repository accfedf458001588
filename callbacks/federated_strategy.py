"""Several ranks, each with its own clients: Lightning's process launcher without gradient synchronisation."""

from typing import Any

import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry


class FederatedStrategy(DDPStrategy):
    """One process per device as under DDP, but every rank trains clients of its own; ranks meet at the round's end."""

    def configure_ddp(self) -> None:
        """Every rank starts from rank 0's parameters; gradients are not synchronised."""
        assert self.model is not None
        for tensor in self.model.state_dict().values():
            torch.distributed.broadcast(tensor, 0)  # every rank starts from rank 0's parameters

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the strategy known by the name ``federated``."""
        strategy_registry.register("federated", cls, description="each rank trains its own clients of the round")


if "federated" not in StrategyRegistry:
    FederatedStrategy.register_strategies(StrategyRegistry)
