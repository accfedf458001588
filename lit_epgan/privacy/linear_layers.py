"""Linear layers whose gradients of single records are outer products: no record needs a copy of their weights."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from lit_epgan.privacy.record_gradients import OuterProducts


class NoOuterProductError(RuntimeError):
    """A layer's parameters act on the loss in another way than by one call on one row."""


class LinearLayers:
    """The linear layers of a network, in a loss that is taken record by record.

        y_i = W x_i + b_i:   grad_W L_i = (grad_b L_i) x_i^T

    All records share W, and each has a copy of b for itself: so no record is in another one's gradient. It holds where
    W acts on L_i through y_i alone. Whatever else the loss does is noticed, and ``NoOuterProductError`` raised: it
    reads the parameters, it calls a layer twice or on several rows, derivatives of its own pass the layer.

    Goodfellow 2015, "Efficient per-example gradient computations" (arXiv:1510.01799), section 4.

    Args:
        layers: which; all their parameters are trained, and in no other place of the network.
    """

    def __init__(self, layers: Sequence[nn.Linear] = ()) -> None:
        self._layers = [_Shared(layer) for layer in layers]
        self.parameters = [p for layer in layers for p in layer.parameters()]

    @classmethod
    def of(cls, network: nn.Module) -> "LinearLayers":
        """All layers of a network for which it may hold."""
        places = Counter(id(p) for part in network.modules() for p in part._parameters.values())

        def alone(layer: nn.Linear) -> bool:
            return all(p.requires_grad and places[id(p)] == 1 for p in layer.parameters())

        linear = (part for part in network.modules() if type(part) is nn.Linear and "forward" not in vars(part))
        return cls([layer for layer in linear if "weight" in layer._parameters and alone(layer)])

    def biases(self, records: int) -> list[Tensor]:
        """Copies of every layer's b (records, 1, outputs), zeros where it has none, which ask for a gradient."""
        return [layer.biases(records) for layer in self._layers]

    @contextmanager
    def shared(self, biases: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Inside, the layers add these b (1, outputs); gives, at the end, x (1, inputs) of every layer."""
        inputs: list[Tensor] = []
        _KeptOff.asked = False
        try:
            for layer, bias in zip(self._layers, biases, strict=True):
                layer.begin(bias)
            yield inputs
        finally:
            for layer in self._layers:
                layer.end()
        if _KeptOff.asked:
            raise NoOuterProductError  # once more, where the loss has caught it
        inputs += [layer.input_of_one_call() for layer in self._layers]

    def gradients(
        self, losses: Tensor, biases: Sequence[Tensor], slopes: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> list[OuterProducts]:
        """The gradients of every layer, of losses L (records,), biases b and inputs x (records, 1, any), and slopes
        grad_b L (records, 1, outputs). NoOuterProductError: W acts on the losses in another way, too."""
        users, leaves = _graph(losses)
        found = []
        for layer, b, d, x in zip(self._layers, biases, slopes, inputs, strict=True):
            output, above = users.get(leaves.get(id(b))), users.get(leaves.get(id(layer.weight)))
            while above != output and above is not None:
                above = users.get(above[0]) if len(above) == 1 else None
            if above is None or len(above) != 1 or x.shape[:-1] != b.shape[:-1]:
                raise NoOuterProductError
            found.append(OuterProducts(d.squeeze(1), x.detach().squeeze(1), layer.has_bias))
        return found


class _Shared:
    """A linear layer, and what is called in its place."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer, self.has_bias = layer, layer.bias is not None
        self._parameters = {name: p for name, p in layer._parameters.items() if p is not None}
        self._kept_off = {name: p.detach().as_subclass(_KeptOff) for name, p in self._parameters.items()}

    def biases(self, records: int) -> Tensor:
        weight, bias = self._layer.weight.detach(), self._layer.bias
        self.weight = weight.requires_grad_()
        one = weight.new_zeros(len(weight)) if bias is None else bias.detach()
        return one.expand(records, 1, -1).requires_grad_()

    def begin(self, bias: Tensor) -> None:
        self._bias, self._inputs = bias, list[Tensor]()
        self._layer._parameters.update(self._kept_off)  # type: ignore[arg-type]
        vars(self._layer)["forward"] = self._forward

    def end(self) -> None:
        self._layer._parameters.update(self._parameters)
        vars(self._layer).pop("forward", None)

    def _forward(self, x: Tensor) -> Tensor:
        self._inputs.append(x)
        output = F.linear(x, self.weight)
        return (output + self._bias).to(output.dtype)  # under autocast the one is narrower than the other

    def input_of_one_call(self) -> Tensor:
        if len(self._inputs) != 1:
            raise NoOuterProductError
        return self._inputs.pop()


class _KeptOff(Tensor):
    """Stands where a layer's parameter was: whoever computes with it computes with the parameter."""

    asked = False

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        cls.asked = True
        raise NoOuterProductError


def _graph(losses: Tensor) -> tuple[dict[Node | None, list[Node]], dict[int, Node]]:
    """By operation behind the losses, which others use its result; the leaves' own, by the tensor's identity."""
    users: dict[Node | None, list[Node]] = {}
    leaves: dict[int, Node] = {}
    waiting = [losses.grad_fn]
    while waiting:
        node = waiting.pop()
        if not (behind := node.next_functions):  # type: ignore[union-attr]
            leaves[id(getattr(node, "variable", None))] = node  # type: ignore[assignment]
        for used, _ in behind:
            if used in users:
                users[used].append(node)  # type: ignore[arg-type]
            elif used is not None:
                users[used] = [node]  # type: ignore[list-item]
                waiting.append(used)
    return users, leaves
