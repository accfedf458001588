"""A model of each client's own, trained beside the server's: what Ditto and APFL share."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, scalar
from lit_epgan.lib.bounds import above, at_least, within
from lit_epgan.lib.errors import UserError
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
        above(0, self, lr=lr)
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
        """The parameters (d,) that a client of this state is to be evaluated with; before its first step the
        ``server``'s (d,)."""
        return state.get(OWN, server)


class PersonalModel:
    """A client's personal model ``own``, v_k (d,), in one round; ``before`` is theta_k (d,) before the client's step,
    and theta the server's."""

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


class Ditto(PersonalModels):
    """A personal model near the server's (Li, Hu, Beirami and Smith 2021, algorithm 1).

    With theta the server's parameters of the round, client k's personal model v_k approaches the minimum of
    L_k(v_k) + lam/2 ||v_k - theta||^2 by a step on each batch of its local training:

        v_k <- v_k - lr (grad L_k(v_k) + lam (v_k - theta))

    lam = 0 trains every client for itself; the larger lam, the closer all are to the server's model. That one is
    FedAvg's, as if nobody had a personal model. Here v_k begins at the client's first round, in the paper at the first
    of all.

    With lam = 0 and a late ``first_round`` v_k is the server's model, fine-tuned by the client in the rounds left.

    Args:
        lam: strength of the pull to the server's model.
        lr: step size of v_k. lr (curvature + lam) must stay below 2.
        first_round: the round, from 0, before which nobody has a personal model.
    """

    def __init__(self, lam: float = 1.0, lr: float = 0.1, first_round: int = 0) -> None:
        super().__init__(lr)
        if not lam >= 0:
            raise UserError(f"Ditto's lam is {lam}; it must be 0 (every client for itself) or more")
        at_least(0, self, first_round=first_round)
        self.lam, self.first_round = lam, first_round

    def train(self, client: Client, sent: Broadcast) -> Message:
        """FedAvg's steps; from ``first_round`` on each is followed by one of the personal model on the same batch."""
        client.data()  # refused at once, not when the personal models begin
        if client.round < self.first_round:
            return Algorithm.train(self, client, sent)
        return super().train(client, sent)

    def model_of(self, client: Client, theta: Tensor) -> PersonalModel:
        return _Pulled(client, theta, self)


class _Pulled(PersonalModel):
    """A personal model that is pulled to the server's."""

    def __init__(self, client: Client, theta: Tensor, settings: Ditto) -> None:
        super().__init__(client, theta)
        self._settings = settings

    def step(self) -> None:
        """v_k <- v_k - lr (grad L_k(v_k) + lam (v_k - theta))."""
        drift = self.own - self.theta
        self.own -= self._settings.lr * (self.gradient(self.own, self.batch) + self._settings.lam * drift)


SHARE = "share"


class APFL(PersonalModels):
    """Adaptive personalised federated learning (Deng, Kamani and Mahdavi 2020, algorithm 1).

    Client k is evaluated with the mixture m = a_k v_k + (1 - a_k) theta of its own model v_k and the server's theta.
    While its local training takes theta_k away from theta, v_k takes a step on the same batch:

        g = grad L_k(a_k v_k + (1 - a_k) theta_k)
        v_k <- v_k - lr a_k g
        a_k <- a_k - lr <g, v_k - theta_k>,   kept in [0, 1]

    both at the parameters before the step; the share a_k moves in a round's first step alone, as in the authors' code.
    a_k = 0 is FedAvg, a_k = 1 every client for itself; v_k stays where it is as long as a_k = 0. The server's model is
    FedAvg's.

    Args:
        share: a_k, at first; in [0, 1].
        adaptive: whether clients learn their shares; otherwise they keep the first.
        lr: step size of v_k and a_k.
    """

    def __init__(self, share: float = 0.5, adaptive: bool = True, lr: float = 0.1) -> None:
        super().__init__(lr)
        within("[0, 1]", self, share=share)
        self.share, self.adaptive = share, adaptive

    def model_of(self, client: Client, theta: Tensor) -> PersonalModel:
        return _Mixed(client, theta, self)

    def personal(self, state: Mapping[str, Tensor], server: Tensor) -> Tensor:
        """The mixture (d,) of the client's own model and the server's."""
        return mixture(super().personal(state, server), server, self.share_of(state))

    def share_of(self, state: Mapping[str, Tensor]) -> float:
        """a_k, from the client's state."""
        return float(state[SHARE]) if SHARE in state else self.share


class _Mixed(PersonalModel):
    """A client's own model within the mixture, and its share."""

    def __init__(self, client: Client, theta: Tensor, settings: APFL) -> None:
        super().__init__(client, theta)
        self._settings, self._share = settings, settings.share_of(client.state)

    def step(self) -> None:
        settings, share = self._settings, self._share
        apart = self.own - self.before
        found = self.gradient(mixture(self.own, self.before, share), self.batch)
        self.own -= settings.lr * share * found
        if settings.adaptive and self.client.step == 1:
            moved = share - settings.lr * float(torch.dot(found, apart))
            self._share = min(max(moved, 0.0), 1.0)

    def save(self) -> None:
        super().save()
        state = self.client.state
        if self._share != self._settings.share_of(state):
            state[SHARE] = scalar(self._share)


def mixture(own: Tensor, server: Tensor, share: float) -> Tensor:
    """share own + (1 - share) server, (d,)."""
    return torch.lerp(server, own, share)
