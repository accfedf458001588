"""Features that a module computes anyway: the output of a named submodule, caught as the module trains."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.federated.tilted_batch import batch_rows
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import at_least_single
from lit_epgan.networks.modes import evaluating

# what layers call their number of outputs, and the dimension of an output at which it is
WIDTHS = {"out_features": -1, "out_channels": 1, "num_features": 1, "num_channels": 1}


class Features:
    """Catches what a submodule gives for the first rows of its first pass after ``expect``; no pass of its own.

    Args:
        module: the module.
        name: dotted name of the submodule, as in ``discriminator.layers.3``.

    Raises:
        UserError: if there is no such submodule, or no layer up to it says its number of outputs.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.network = name.split(".")[0]
        known = [n for n, _ in module.named_modules() if n]
        if name not in known:
            own = [n for n in known if n.startswith(self.network + ".")]
            raise UserError(
                f"{type(module).__name__} has no submodule {name!r} to take features from: choose one of "
                f"{', '.join(own or known)}"
            )
        self.name = name
        self.width, self._at = self._width(module)
        self._rows = 0
        self._caught: Tensor | None = None

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Inside, the submodule is watched."""
        handle = module.get_submodule(self.name).register_forward_hook(self._catch)
        try:
            yield
        finally:
            handle.remove()
            self._rows, self._caught = 0, None

    def expect(self, rows: int) -> None:
        """Catch the first ``rows`` rows of the next pass."""
        self._rows, self._caught = rows, None

    def take(self) -> Tensor | None:
        """What was caught (rows, width), with its graph, in float32 at least; None if nothing was, or it is taken."""
        caught, self._caught = self._caught, None
        return None if caught is None else self._pooled(at_least_single(caught))

    @torch.no_grad()
    def of(self, module: nn.Module, rows: Tensor) -> Tensor:
        """The features (rows, width) of data (rows, ...), by a pass of the network that the submodule is part of."""
        self.expect(len(rows))
        module.get_submodule(self.network)(rows)
        caught = self.take()
        assert caught is not None, "the network does not pass through its own submodule"
        return caught

    def mean(self, module: nn.Module, batches: Iterable[Any], function: nn.Module, like: Tensor) -> Tensor:
        """The mean (...) over all rows of ``function``'s values (rows, ...) of the features (rows, width), in
        evaluation mode. Batches are x (rows, ...), or sequences that begin with it, and not none; the network computes
        in the dtype and on the device of ``like``."""
        total, rows = torch.zeros(()).to(like), 0
        with evaluating(module.get_submodule(self.network)):
            for x in map(batch_rows, batches):
                features = self.of(module, x.to(like) if x.is_floating_point() else x)
                total, rows = total + function(features).sum(0), rows + len(x)
        return total / rows

    def _catch(self, module: nn.Module, arguments: tuple, output: Tensor) -> None:
        if self._rows:
            self._caught, self._rows = output[: self._rows], 0

    def _pooled(self, features: Tensor) -> Tensor:
        """Means over positions: convolutions have their channels at dimension 1, sequences their features last."""
        for dimension in (self._at, -1, 1):  # the layer's own first: a sequence may have as many frames as features
            if features.dim() > 1 and features.shape[dimension] == self.width:
                return features.movedim(dimension, 1).flatten(2).mean(2) if features.dim() > 2 else features
        raise UserError(
            f"the features {self.name!r} have the shape {tuple(features.shape)}, and neither their second nor their "
            f"last dimension is {self.width}, as the layers before say: take them from another submodule"
        )

    def _width(self, module: nn.Module) -> tuple[int, int]:
        """The number of features, and the dimension at which they are."""
        width, at, reached = 0, 1, False
        for name, submodule in module.get_submodule(self.network).named_modules(prefix=self.network):
            if reached and not name.startswith(self.name + "."):
                break
            reached = reached or name == self.name
            said = ((int(getattr(submodule, key)), where) for key, where in WIDTHS.items() if hasattr(submodule, key))
            width, at = next(said, (width, at))
        if width == 0:
            raise UserError(
                f"no layer up to {self.name!r} says how many features it gives: take them from a linear or a "
                "convolutional layer, or from what follows one"
            )
        return width, at
