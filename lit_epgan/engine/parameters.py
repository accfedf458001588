"""A module's federated parameters as one flat vector."""

import copy
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lit_epgan.lib.errors import UserError


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether ``name`` matches any of the shell-style patterns, as in ``head.*``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def first_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter or buffer, and the first name of the same tensor: tied ones have several."""
    first: dict[int, str] = {}
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class FlatParameters:
    """Parameters whose storage is one contiguous buffer per dtype and device, so that a client is one vector.

    The parameters stay the objects that optimizers hold; only their storage moves. Strides are kept (channels-last
    survives). ``restore`` gives ordinary storage back.

    Args:
        named: name and parameter, each parameter once.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        groups: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            groups.setdefault((parameter.dtype, parameter.device), []).append((name, parameter))
        self._buffers: list[Tensor] = []
        self._offsets: list[int] = []
        offset = 0
        for (dtype, device), members in groups.items():
            buffer = torch.empty(sum(p.numel() for _, p in members), dtype=dtype, device=device)
            start = 0
            for name, parameter in members:
                view = _view(buffer, start, parameter)
                view.copy_(parameter.detach())
                parameter.data = view
                self.names.append(name)
                self.parameters.append(parameter)
                self._offsets.append(offset + start)
                start += parameter.numel()
            self._buffers.append(buffer)
            offset += start
        self.numel = offset
        self._places = {id(p): i for i, p in enumerate(self.parameters)}
        self._storage = [p.data for p in self.parameters]
        self._addresses = [p.data_ptr() for p in self.parameters]

    @classmethod
    def of(cls, module: nn.Module, local: Sequence[str] = ()) -> "FlatParameters":
        """The trainable parameters of ``module``; tied ones once, frozen ones and names matching ``local`` left out.

        Raises:
            UserError: if nothing is left to federate, or something is that is no dense tensor of real numbers.
        """
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise UserError(
                    f"{name!r} of {type(module).__name__} has no shape yet, for its layer is lazy: run one batch "
                    "through the module before the fit, as in configure_model, or give the layer its sizes"
                )
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad and not matches(n, local)]
        for name, parameter in named:
            _check(name, parameter)
        if not named:
            raise UserError(
                f"{type(module).__name__} has no trainable parameters to federate"
                + (f" beside those kept local by {list(local)}" if local else "")
            )
        return cls(named)

    def at(self, vector: Tensor) -> "FlatParameters":
        """The same layout over another flat vector (numel,): new parameters, whose storage it is.

        Args:
            vector: of the one dtype and device that all parameters have.
        """
        twin = copy.copy(self)
        twin.parameters = [nn.Parameter(view) for view in self.views(vector, self.parameters)]
        twin._buffers = [vector]
        twin._places = {id(p): i for i, p in enumerate(twin.parameters)}
        twin._storage = [p.data for p in twin.parameters]
        twin._addresses = [p.data_ptr() for p in twin.parameters]
        return twin

    def rows(self, matrix: Tensor) -> dict[str, Tensor]:
        """Flat vectors side by side, the rows of (n, numel), as named tensors (n, *shape): views."""
        found: dict[str, Tensor] = {}
        for name, offset, parameter in zip(self.names, self._offsets, self.parameters, strict=True):
            part, shape = matrix[:, offset : offset + parameter.numel()], (len(matrix), *parameter.shape)
            if _dense(parameter):
                found[name] = part.as_strided(shape, (matrix.stride(0), *parameter.stride()), part.storage_offset())
            else:
                found[name] = part.view(shape)
        return found

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the flat vector: the widest of the parameters'."""
        dtype = self._buffers[0].dtype
        for buffer in self._buffers[1:]:
            dtype = torch.promote_types(dtype, buffer.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the flat vector lies."""
        return self._buffers[0].device

    @property
    def vector(self) -> Tensor:
        """The flat vector (numel,): live where the parameters share a dtype and a device, otherwise a copy."""
        if len(self._buffers) == 1:
            return self._buffers[0]
        return torch.cat([buffer.to(self.device, self.dtype) for buffer in self._buffers])

    @property
    def is_live(self) -> bool:
        """Whether ``vector`` is the parameters' own storage."""
        return len(self._buffers) == 1

    def adopt(self) -> None:
        """Take back parameters whose storage somebody has replaced (``p.data = ...``), with their present values."""
        for parameter, view, address in zip(self.parameters, self._storage, self._addresses, strict=True):
            if parameter.data_ptr() != address:
                view.copy_(parameter.data)
                parameter.data = view

    def load(self, vector: Tensor) -> None:
        """Copy a flat vector (numel,) into the parameters."""
        self.adopt()
        start = 0
        for buffer in self._buffers:
            buffer.copy_(vector[start : start + buffer.numel()])
            start += buffer.numel()

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self._places

    def views(self, vector: Tensor, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Parts of a flat vector, shaped and strided as the given parameters."""
        return [_view(vector, self._offsets[self._places[id(p)]], p) for p in parameters]

    def name(self, parameter: nn.Parameter) -> str:
        """The parameter's name in the module."""
        return self.names[self._places[id(parameter)]]

    def slices(self, parameters: Iterable[nn.Parameter]) -> list[slice]:
        """Where the given parameters lie in a flat vector, neighbours merged; those not federated are left out."""
        wanted = {id(p) for p in parameters}
        merged: list[slice] = []
        for offset, parameter in zip(self._offsets, self.parameters, strict=True):
            if id(parameter) not in wanted:
                continue
            end = offset + parameter.numel()
            if merged and merged[-1].stop == offset:
                merged[-1] = slice(merged[-1].start, end)
            else:
                merged.append(slice(offset, end))
        return merged

    def named(self, prefix: str) -> list[slice]:
        """Where the parameters of the submodule ``prefix`` lie."""
        chosen = [p for n, p in zip(self.names, self.parameters, strict=True) if matches(n, (prefix, prefix + ".*"))]
        return self.slices(chosen)

    def as_dict(self, vector: Tensor) -> dict[str, Tensor]:
        """A flat vector as named tensors, copied, in each parameter's own dtype and layout."""
        parts = self.views(vector, self.parameters)
        return {
            n: v.to(p.device, p.dtype, copy=True) for n, v, p in zip(self.names, parts, self.parameters, strict=True)
        }

    def restore(self) -> None:
        """Give every parameter ordinary storage of its own again."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()


def _check(name: str, parameter: nn.Parameter) -> None:
    """Raise a UserError if a client's parameter is no part of a vector of real numbers."""
    if parameter.is_complex():
        raise UserError(
            f"the parameter {name!r} is complex, and a client is a vector of real numbers: hold its real view (..., 2) "
            f"as the parameter and use torch.view_as_complex of it, or keep it local by local=[{name!r}]"
        )
    if parameter.layout is not torch.strided:
        raise UserError(
            f"the parameter {name!r} is stored sparsely ({parameter.layout}), and a client is a dense vector: store it "
            f"densely, or keep it local by local=[{name!r}]"
        )
    if parameter.is_meta:
        raise UserError(
            f"the parameter {name!r} is on the meta device, without values: make it on a real one, or give it values "
            "in configure_model"
        )


def _view(vector: Tensor, offset: int, like: Tensor) -> Tensor:
    part = vector[offset : offset + like.numel()]
    if _dense(like):
        return part.as_strided(like.size(), like.stride(), part.storage_offset())
    return part.view(like.size())


def _dense(tensor: Tensor) -> bool:
    """Whether the strides are a permutation of contiguous ones, so that the tensor fills its numel without a gap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
