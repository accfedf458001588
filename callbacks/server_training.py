"""Training the server's model on the server, by the module's own training step."""

from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lit_epgan.callbacks.round import Workplace
from lit_epgan.callbacks.silence import silent


class ServerTraining:
    """Trains from the server's parameters; the server then holds the result, buffers included.

    Its optimizers start afresh, or, where clients keep theirs from round to round, go on as the server's own. The
    module sees what it sees in a client's segment, except that nothing it logs is kept.
    """

    def __init__(self, module: LightningModule, place: Workplace) -> None:
        self.module, self.place = module, place

    def __call__(self, batches: Iterable[Any]) -> None:
        module, place = self.module, self.place
        place.load_server(place.state.server_optimizers)
        modes = {part: part.training for part in module.modules()}
        module.train()
        try:
            with silent(module), torch.enable_grad():
                for index, batch in enumerate(batches):
                    self._step(batch, index)
        finally:
            for part, mode in modes.items():
                part.training = mode
        place.server.flat.adopt()
        place.server.parameters.copy_(place.server.flat.vector)
        place.tensors.keep_as_server()
        place.state.server_optimizers = place.optimizers.collect()

    def _step(self, batch: Any, index: int) -> None:
        output = self.module.training_step(batch, index)
        if not self.module.automatic_optimization or output is None:
            return
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        for optimizer in self.place.optimizers.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.place.optimizers.optimizers:
            optimizer.step()
