"""Training the server's model on the server, by the module's own training step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lit_epgan.callbacks.federation_state import FederationState
from lit_epgan.engine import Server, Workplace
from lit_epgan.engine.workplace import load_server
from lit_epgan.networks.modes import silent


class ServerTraining:
    """Trains from the server's parameters; the server then holds the result, buffers included.

    Its optimizers start afresh, or, where clients keep theirs from round to round, go on as the server's own. The
    module sees what it sees in a client's segment, except that nothing it logs is kept.

    Args:
        module: the module.
        server: whose parameters are trained.
        place: the module's flat parameters, buffers and optimizers.
        state: keeps the server's own optimizers' state.
    """

    def __init__(self, module: LightningModule, server: Server, place: Workplace, state: FederationState) -> None:
        self.module, self.server, self.place, self.state = module, server, place, state

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A context in which the module holds the server's model, in training mode; what it ends as is the server's."""
        module, place = self.module, self.place
        load_server(place, self.server.parameters, self.state.server_optimizers)
        modes = {part: part.training for part in module.modules()}
        module.train()
        try:
            with silent(module), torch.enable_grad():
                yield
        finally:
            for part, mode in modes.items():
                part.training = mode
        place.flat.adopt()
        self.server.parameters.copy_(place.flat.vector)
        place.tensors.adopt(self.server.round)
        self.state.server_optimizers = place.optimizers.collect()

    def __call__(self, batches: Iterable[Any]) -> None:
        """One training step on each batch."""
        with self.holding():
            for index, batch in enumerate(batches):
                self._step(batch, index)

    def _step(self, batch: Any, index: int) -> None:
        output = self.module.training_step(batch, index)
        if not self.module.automatic_optimization or output is None:
            return
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        optimizers = [each.optimizer for each in self.place.optimized]
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
