"""MOON: a client's representation is drawn to the server's, and away from its own of the last round."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server
from lit_epgan.precision import at_least_single


def contrast(now: Tensor, server: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """-log[e^{s(z, z_server) / T} / (e^{s(z, z_server) / T} + e^{s(z, z_previous) / T})], s the cosine; mean over rows.

    (Li, He and Song 2021, equation 3.) Representations are (rows, ...), flattened.
    """
    now, server, previous = (at_least_single(z).flatten(1) for z in (now, server, previous))
    similar = [F.cosine_similarity(now, other) for other in (server, previous)]
    logits = torch.stack(similar, 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


class MOON(FederatedAlgorithm):
    """Model-contrastive federated learning (Li, He and Song 2021, algorithm 1): the loss plus ``mu`` contrast.

    The representation is what a named submodule gives for whatever it is given in the training step's pass; the
    server's and the client's last one are evaluated on the same inputs. A client's first round is FedAvg's.

    Price: FedAvg's bytes. Two more forward passes of the submodule in each step; the client stores its last parameters.

    Args:
        representation: dotted name of the submodule before the classifier, as in ``backbone``.
        mu: weight of the contrast.
        temperature: T.

    Raises:
        UserError: if an argument is out of its range, or there is no such submodule.
    """

    def __init__(self, representation: str, mu: float = 1.0, temperature: float = 0.5) -> None:
        if not mu >= 0 or not temperature > 0:
            raise UserError(f"MOON's mu and temperature are {mu} and {temperature}; give mu >= 0 and temperature > 0")
        self.representation = representation
        self.mu = mu
        self.temperature = temperature
        self._handle: RemovableHandle | None = None

    def start_fit(self, server: Server) -> None:
        known = [name for name, _ in server.module.named_modules() if name]
        if self.representation not in known:
            raise UserError(
                f"{type(server.module).__name__} has no submodule {self.representation!r} to take the representation "
                f"from: choose one of {', '.join(known)}"
            )

    def start_client(self, client: Client) -> None:
        self._caught: tuple[tuple[Any, ...], dict[str, Any], Tensor] | None = None
        if self.mu == 0 or "previous" not in client.state:
            return
        self._server = self._tensors(client, client.server.parameters)
        self._previous = self._tensors(client, client.state["previous"])
        self._handle = self._network(client).register_forward_hook(self._catch, with_kwargs=True)

    def extra_loss(self, client: Client) -> Tensor | None:
        if self._caught is None:
            return None
        (inputs, named, now), self._caught = self._caught, None
        with torch.no_grad(), self._autocast:  # as the module's own pass
            server, previous = (self._evaluate(client, each, inputs, named) for each in (self._server, self._previous))
        return self.mu * contrast(now, server, previous, self.temperature)

    def end_client(self, client: Client) -> None:
        self._leave()
        client.state["previous"] = client.parameters.clone()

    def end_fit(self, server: Server) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _catch(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        device = output.device.type
        self._autocast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        self._caught = inputs, named, output

    def _evaluate(
        self, client: Client, tensors: dict[str, Tensor], inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor:
        caught = self._caught
        output: Tensor = functional_call(self._network(client), tensors, inputs, named)
        self._caught = caught  # this pass went through the hook, too
        return output

    def _network(self, client: Client) -> nn.Module:
        return client.server.module.get_submodule(self.representation)

    def _tensors(self, client: Client, vector: Tensor) -> dict[str, Tensor]:
        """The submodule's parameters in a flat vector, and copies of its buffers, by their names in it."""
        prefix = self.representation + "."
        named = client.server.flat.as_dict(vector)
        parameters = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
        return parameters | {name: buffer.clone() for name, buffer in self._network(client).named_buffers()}
