"""A model of each client's own, trained beside the server's: what Ditto and APFL share."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Broadcast, Client, Message
from lit_epgan.errors import UserError
from lit_epgan.networks.modes import silent

OWN = "personal"  # v_k (d,); and before the names of its buffers


class PersonalModels(Algorithm):
    """Base of algorithms whose clients keep a personal model v_k; the server's model is FedAvg's.

    v_k never leaves its client. It begins as the server's model of the client's first round, and takes a step of
    gradient descent on each batch that the client trains on. ``lit_epgan.callbacks.PersonalMetrics`` evaluates it.

    Price: FedAvg's bytes. One more pass of training a step; a client stores one model.

    Args:
        lr: step size of v_k.

    Raises:
        UserError: if ``lr`` is not above 0, or the module optimizes manually, and so has no one loss.
    """

    def __init__(self, lr: float) -> None:
        if not lr > 0:
            raise UserError(f"{type(self).__name__}'s lr is {lr}; it must be above 0")
        self.lr = lr

    def build(self, module: nn.Module, seed: int) -> None:
        if not hasattr(module, "training_step") or not getattr(module, "automatic_optimization", True):
            raise UserError(
                f"{type(self).__name__} trains a second model by the loss that training_step returns, and "
                f"{type(module).__name__} returns none: take FedAvg, or automatic optimization"
            )

    def train(self, client: Client, sent: Broadcast) -> Message:
        """FedAvg's steps, after each of them one of the personal model on the same batch."""
        client.data()  # a mechanism that hides records in the local steps alone refuses to give them beside those
        model = self.model_of(client, sent["parameters"])
        client.fit(sent["parameters"], batch=model.keep, after_local_step=model.step)
        if client.step:
            model.save()
        return self.Report(change=client.change)

    @abstractmethod
    def model_of(self, client: Client, theta: Tensor) -> "PersonalModel":
        """A client's personal model; ``theta``: the server's parameters (d,)."""

    def personal(self, state: Mapping[str, Tensor], server: Tensor) -> Tensor:
        """The parameters (d,) that a client is to be evaluated with; before its first step they are the server's.

        Args:
            state: the client's.
            server: the server's parameters (d,).
        """
        return state.get(OWN, server)


class PersonalModel:
    """A client's personal model in one round.

    Args:
        client: whose it is.
        theta: the server's parameters (d,).

    Attributes:
        own: v_k (d,).
        before: theta_k (d,) before the client's step.
    """

    def __init__(self, client: Client, theta: Tensor) -> None:
        self.client, self.theta = client, theta
        self.own = client.state[OWN] if OWN in client.state else theta.clone()
        self._found = {name: buffer.clone() for name, buffer in client.module.named_buffers()}
        self._buffers = self._found | buffers_of(client.state)

    def keep(self, batch: Any) -> Any:
        """Keep the batch, and where the client is: the module may yet skip it."""
        self.batch, self.before = batch, self.client.parameters.clone()
        return batch

    @abstractmethod
    def step(self) -> None:
        """Move ``own`` by the batch that was kept."""

    def save(self) -> None:
        """Keep the personal model, and those of its buffers that are not the server's."""
        state = self.client.state
        state[OWN] = self.own
        for name, buffer in self._buffers.items():
            kept = f"{OWN}.{name}"
            if kept in state or not buffer.equal(self._found.get(name, buffer)):
                state[kept] = buffer

    def gradient(self, at: Tensor, batch: Any) -> Tensor:
        """The gradient (d,) of the module's training loss of ``batch`` at the parameters ``at`` (d,).

        The buffers are the personal model's, which the pass changes as training does. The module is left as it was.
        """
        module, flat = self.client.module, self.client.flat
        flat.adopt()
        held, shared = flat.vector.clone(), {name: buffer.clone() for name, buffer in module.named_buffers()}
        flat.load(at)
        put_buffers(module, self._buffers)
        found = self._gradient(batch)
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        flat.load(held)
        put_buffers(module, shared)
        return found

    def _gradient(self, batch: Any) -> Tensor:
        module, flat = self.client.module, self.client.flat
        total = torch.zeros_like(flat.vector)
        with silent(module), torch.enable_grad():
            output = module.training_step(batch, self.client.step)  # type: ignore[operator]
            if output is None:  # the module skips this batch
                return total
            loss = output if isinstance(output, Tensor) else output["loss"]
            gradients = torch.autograd.grad(loss, flat.parameters, allow_unused=True)
        for view, gradient in zip(flat.views(total, flat.parameters), gradients, strict=True):
            if gradient is not None:
                view.add_(gradient)
        return total


def buffers_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The personal model's buffers in a client's state, by name: those that its training has changed."""
    return {name.removeprefix(OWN + "."): tensor for name, tensor in state.items() if name.startswith(OWN + ".")}


def put_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give a module's buffers values by name; the others stay."""
    for name, buffer in module.named_buffers():
        if name in values:
            buffer.copy_(values[name])
