"""The losses of single records, all at once, and the gradient of each by itself."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# the only private names of torch's; tests/test_linear_layers.py says what would break with a new torch
from torch._C._functorch import _add_batch_dim, _remove_batch_dim, _vmap_decrement_nesting, _vmap_increment_nesting
from torch._functorch.vmap import lazy_load_decompositions  # type: ignore[attr-defined]

from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.batches import mapped, rows, tensors
from lit_epgan.privacy.linear_layers import LinearLayers, NoOuterProductError
from lit_epgan.privacy.record_gradients import RecordGradients, Written


def row_by_row(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """``function`` of single rows of tensors (rows, ...), each with random numbers of its own: tensors (rows, ...). As
    ``torch.func.vmap(function, randomness="different")(*tensors)``, which spends as long on arguments that might be
    trees as a small network takes."""
    lazy_load_decompositions()
    rows = len(tensors[0])
    level = _vmap_increment_nesting(rows, "different")
    try:
        results = function(*[_add_batch_dim(tensor, 0, level) for tensor in tensors])
        return [_remove_batch_dim(result, level, rows, 0) for result in results]
    finally:
        _vmap_decrement_nesting()


class Places:
    """Where a network holds some of its parameters or buffers; a shared one has several places.
    ``torch.func.functional_call`` looks for them by name at every call; here they are found once."""

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


Loss = Callable[[Any], Tensor]
RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def padded(network: nn.Module) -> list[nn.Embedding]:
    """The embeddings one of whose rows stands for nothing, and gets no gradient of what is looked up there."""
    return [part for part in network.modules() if isinstance(part, nn.Embedding) and part.padding_idx is not None]


def padding_rows(network: nn.Module) -> dict[int, tuple[int, int]]:
    """Of trained embeddings whose weights (words, width) no other layer shares, by the weight's identity: the row whose
    gradient is 0, and the width."""
    places = Counter(id(p) for part in network.modules() for p in part._parameters.values())
    own = [e for e in padded(network) if e.weight.requires_grad and places[id(e.weight)] == 1]
    return {id(e.weight): (e.padding_idx, e.embedding_dim) for e in own}  # type: ignore[misc]


@contextmanager
def without_padding(embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    """Inside, what stands for nothing gets no gradient under torch.vmap either, which forgets ``padding_idx``."""

    def hook(embedding: Any, words: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.where(words[0].eq(int(embedding.padding_idx)).unsqueeze(-1), output.detach(), output)

    hooks = [embedding.register_forward_hook(hook) for embedding in embeddings]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


class RecordLosses:
    """Losses of batches of one record each (``torch.func.vmap``), in which each record has a copy of the parameters,
    but of the linear layers that need none. The gradients are in step with ``parameters``, the trained ones.

    So no record is in another one's gradient, whatever the loss does. Buffers that it changes stay as they are.
    """

    def __init__(self, network: nn.Module, linear: LinearLayers) -> None:
        self.network, self.linear = network, linear
        without = {id(p) for p in linear.parameters}
        self._copied = [p for p in network.parameters() if p.requires_grad and id(p) not in without]
        self._buffers = list(network.buffers())
        self._places = Places(network, [*self._copied, *self._buffers])
        self._padded = padded(network)
        self.parameters = [*linear.parameters, *self._copied]

    def losses(self, loss: Loss, batch: Any) -> Tensor:
        """The losses (records,) of every record."""
        records = rows(batch)
        return self._taken(loss, self.linear.biases(records), self._copies(records), batch)[0]

    def gradients(self, loss: Loss, batch: Any) -> list[RecordGradients]:
        """The gradients of every record, in step with ``parameters``. UserError: the loss cannot be taken record by
        record. NoOuterProductError: one of the linear layers needs copies."""
        records = rows(batch)
        biases, copies = self.linear.biases(records), [copy.requires_grad_() for copy in self._copies(records)]
        losses, inputs = self._taken(loss, biases, copies, batch)
        # of their sum: each record's copies are in its own loss alone
        found = torch.autograd.grad(losses, [*biases, *copies], torch.ones_like(losses), materialize_grads=True)
        slopes, written = found[: len(biases)], found[len(biases) :]
        return [*self.linear.gradients(losses, biases, slopes, inputs), *map(Written, written)]

    def _copies(self, records: int) -> list[Tensor]:
        """The parameters (records, *shape), one for each record in one place of memory."""
        return [p.detach().expand(records, *p.shape) for p in self._copied]

    def _taken(
        self, loss: Loss, biases: Sequence[Tensor], copies: Sequence[Tensor], batch: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The losses (records,), and what went into the linear layers (records, 1, inputs)."""
        ones = [tensor.unsqueeze(1) for tensor in tensors(batch)]  # batches of one record
        ends = len(biases), len(biases) + len(copies)

        def of_one(*entries: Tensor) -> tuple[Tensor, ...]:
            held = [*entries[ends[0] : ends[1]], *(buffer.clone() for buffer in self._buffers)]
            parts = iter(entries[ends[1] :])
            record = mapped(batch, lambda _: next(parts))
            with self._places.taken_by(held), self.linear.shared(entries[: ends[0]]) as inputs:
                value = loss(record)
            return value, *inputs

        try:
            with torch.enable_grad(), without_padding(self._padded):
                losses, *inputs = row_by_row(of_one, *biases, *copies, *ones)
        except (UserError, NoOuterProductError):
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            recurrent = next((part for part in self.network.modules() if type(part) in RECURRENT), None)
            if recurrent is not None and "Batching rule not implemented" in str(error):
                kind = type(recurrent).__name__
                raise UserError(
                    f"torch's {kind} gives no gradients of single records: take opacus.layers.DP{kind}, whose "
                    "parameters have the same names (pip install opacus)"
                ) from error
            raise UserError(
                f"the loss of {type(self.network).__name__} cannot be taken record by record "
                f"({str(error).strip().splitlines()[0]}): leave out what looks at numbers (.item()) or changes buffers"
            ) from error
        return losses, inputs
