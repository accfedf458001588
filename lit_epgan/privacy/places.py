"""Other tensors in the place of a network's own, while a loss is taken."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


class Places:
    """Where a network holds some of its parameters or buffers; a shared one has several places.

    ``torch.func.functional_call`` looks for them by name at every call; here they are found once.

    Args:
        network: the network.
        tensors: parameters or buffers of it.
    """

    def __init__(self, network: nn.Module, tensors: Sequence[Tensor]) -> None:
        numbers = {id(tensor): k for k, tensor in enumerate(tensors)}
        holders = [holder for part in network.modules() for holder in (part._parameters, part._buffers)]
        self._places = [(h, name, numbers[id(t)]) for h in holders for name, t in h.items() if id(t) in numbers]

    @contextmanager
    def taken_by(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Inside, ``others`` stand for the tensors, in step with them; afterwards these are back, whatever happened."""
        before = [holder[name] for holder, name, _ in self._places]
        try:
            for holder, name, k in self._places:
                holder[name] = others[k]  # type: ignore[assignment]
            yield
        finally:
            for (holder, name, _), own in zip(self._places, before, strict=True):
                holder[name] = own  # type: ignore[assignment]
