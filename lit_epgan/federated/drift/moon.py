"""MOON: a client's representation is drawn to the server's, and away from its own of the last round."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lit_epgan.engine import Algorithm, Broadcast, Client, Message
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single


def contrast(now: Tensor, server: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """-log[e^{s(z, z_server) / T} / (e^{s(z, z_server) / T} + e^{s(z, z_previous) / T})], s the cosine; mean over rows.

    (Li, He and Song 2021, equation 3.) Representations are (rows, ...), flattened.
    """
    now, server, previous = (at_least_single(z).flatten(1) for z in (now, server, previous))
    similar = [F.cosine_similarity(now, other) for other in (server, previous)]
    logits = torch.stack(similar, 1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=logits.device))


class MOON(Algorithm):
    """Model-contrastive federated learning (Li, He and Song 2021, algorithm 1): the loss plus ``mu`` contrast.

    The representation is what a named submodule gives for whatever it is given in the training step's pass; the
    server's and the client's last one are evaluated on the same inputs. A client's first round is FedAvg's.

    Price: FedAvg's bytes. Two more forward passes of the submodule in each step; the client stores its last parameters.

    Args:
        representation: dotted name of the submodule before the classifier, as in ``backbone``.
        mu: weight of the contrast.
        temperature: T.
    """

    def __init__(self, representation: str, mu: float = 1.0, temperature: float = 0.5) -> None:
        if not mu >= 0 or not temperature > 0:
            raise UserError(f"MOON's mu and temperature are {mu} and {temperature}; give mu >= 0 and temperature > 0")
        self.representation, self.mu, self.temperature = representation, mu, temperature

    def build(self, module: nn.Module, seed: int) -> None:
        known = [name for name, _ in module.named_modules() if name]
        if self.representation not in known:
            raise UserError(
                f"{type(module).__name__} has no submodule {self.representation!r} to take the representation "
                f"from: choose one of {', '.join(known)}"
            )

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Local steps with the contrast of the client's representations, once there is an earlier one."""
        theta, network = sent["parameters"], client.module.get_submodule(self.representation)
        if self.mu == 0 or "previous" not in client.state:
            client.fit(theta, loss=lambda: None)  # it is told, so that whoever refuses such a loss does so at once
        else:
            with _Contrast(self, client, network, theta) as contrasted:
                client.fit(theta, loss=contrasted.loss)
        client.state["previous"] = client.parameters.clone()
        return self.Report(change=client.change)


class _Contrast:
    """Within, the submodule is watched, and ``loss`` is mu times the contrast of what a step's pass gave."""

    def __init__(self, settings: MOON, client: Client, network: nn.Module, theta: Tensor) -> None:
        self._settings, self._flat, self._network = settings, client.flat, network
        self._server, self._previous = self._tensors(theta), self._tensors(client.state["previous"])
        self._caught: tuple[tuple[Any, ...], dict[str, Any], Tensor] | None = None

    def __enter__(self) -> "_Contrast":
        self._handle = self._network.register_forward_hook(self._catch, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self._handle.remove()

    def loss(self) -> Tensor | None:
        """mu times the contrast."""
        if self._caught is None:
            return None
        (inputs, named, now), self._caught = self._caught, None
        with torch.no_grad(), self._autocast:  # as the module's own pass
            server, previous = (self._evaluate(each, inputs, named) for each in (self._server, self._previous))
        return self._settings.mu * contrast(now, server, previous, self._settings.temperature)

    def _catch(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        device = output.device.type
        self._autocast = torch.autocast(
            device, torch.get_autocast_dtype(device), enabled=torch.is_autocast_enabled(device)
        )
        self._caught = inputs, named, output

    def _evaluate(self, tensors: dict[str, Tensor], inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        caught = self._caught
        output: Tensor = functional_call(self._network, tensors, inputs, named)
        self._caught = caught  # this pass went through the hook, too
        return output

    def _tensors(self, vector: Tensor) -> dict[str, Tensor]:
        """The submodule's parameters in a flat vector, and copies of its buffers, by their names in it."""
        prefix = self._settings.representation + "."
        named = self._flat.as_dict(vector)
        parameters = {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
        return parameters | {name: buffer.clone() for name, buffer in self._network.named_buffers()}
