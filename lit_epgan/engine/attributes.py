"""What a module keeps in ordinary attributes: counters, lists, a replay pool."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lit_epgan.errors import UserError
from lit_epgan.snapshots.capturing import Capture, Known
from lit_epgan.snapshots.foreign import UnrestorableError
from lit_epgan.snapshots.pooling import pooled
from lit_epgan.snapshots.restoring import Restore
from lit_epgan.snapshots.slots import Slots


class Attributes:
    """The ordinary attributes of a module and its submodules: a fresh client's, or each client's own.

    A client that is new starts with what they are when the round begins; later it starts with what it changed in its
    last round. An attribute that it added is gone for the next client, one that it deleted is back. Submodules of torch
    itself are not looked at, nor are metrics, which accumulate over a round on purpose. Functions, modules, optimizers
    and data sets that an attribute refers to are not the module's, and are left alone; so are views of parameters and
    buffers.

    Args:
        module: the module.
        ignore: further names that are left alone, such as those that every LightningModule has.

    Attributes:
        presented: what all clients of the last round have gathered, as plain data, until ``settle``.
    """

    def __init__(self, module: nn.Module, ignore: Collection[str] = ()) -> None:
        self._module = module
        self._ignore = frozenset(vars(nn.Module())) | frozenset(ignore)
        self._slots: dict[str, Slots] = {}
        self._shared: dict[str, str] = {}
        self._device = torch.device("cpu")
        self.presented: dict[str, Any] = {}
        self._fresh = False
        self.round_begins()

    def round_begins(self) -> None:
        """What the attributes are now is what a fresh client starts with."""
        module, self._fresh = self._module, False
        known: dict[str, Any] = {f"module/{n}": m for n, m in module.named_modules()}
        known |= {f"parameter/{n}": p for n, p in module.named_parameters()}
        known |= {f"buffer/{n}": b for n, b in module.named_buffers()}
        self._known = Known(known)
        self._device = next((p.device for p in module.parameters()), torch.device("cpu"))
        before, self._slots = self._slots, {}
        for path, owner in _owners("", module, set()):
            slots = before.get(path)
            if slots is not None and slots.held is vars(owner):
                slots.take(self._known)
            else:
                slots = Slots(vars(owner), self._ignore, self._known, _lives_in(owner))
            self._slots[path] = slots

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """A client begins.

        Args:
            state: its own, from ``collect``; it is not changed. None, or an empty one: fresh.

        Raises:
            UserError: if what was kept cannot be made again, because a class is not there any more.
        """
        if not self._fresh:
            self.clear()
        self._fresh = False
        self._put(state or {})

    def clear(self) -> None:
        """Nobody works, until a client begins: all is fresh."""
        for slots in self._slots.values():
            slots.reset()
        self._fresh = True

    def _put(self, state: Mapping[str, Any]) -> None:
        if not state:
            return
        restore = Restore(self._known, device=self._device, overwrite=False)
        with torch.inference_mode(False), torch.no_grad():
            for path, changes in state.items():
                if path in self._slots:
                    try:
                        self._slots[path].put(changes, restore)
                    except UnrestorableError as error:
                        names = ", ".join(self._name(path, name) for name in changes)
                        raise UserError(
                            f"what a client keeps in {names} of {type(self._module).__name__} cannot be made again: "
                            f"{error}"
                        ) from error

    def collect(self, client: str = "") -> dict[str, Any]:
        """What differs from what a fresh client starts with, as plain data: by submodule and name; {} if nothing does.

        Args:
            client: who has worked, for ``shared``.
        """
        if not self._slots:
            return {}  # at no cost
        with torch.inference_mode(False), torch.no_grad():
            capture = Capture(self._known)
            changed = {path: slots.changes(capture) for path, slots in self._slots.items()}
        for path, slots in self._slots.items():
            for name, what in slots.unkept.items():
                full = self._name(path, name)
                during = f"changed during client {client}" if client else "changed during a client"
                self._shared.setdefault(
                    full, f"attribute `{full}` of {type(self._module).__name__} {during} and {what}"
                )
        return {path: changes for path, changes in changed.items() if changes}

    def pool(self, collected: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What all clients of a round have gathered, as one client in their place would have: see ``pooled``.

        Args:
            collected: what ``collect`` gave for each of them.
        """
        names = {(path, name): None for changes in collected for path in changes for name in changes[path]}
        gathered: dict[str, Any] = {}
        for path, name in names:
            values = [c[path][name] for c in collected if name in c.get(path, {})]
            then = self._slots[path].then(name) if path in self._slots else None
            gathered.setdefault(path, {})[name] = pooled(then, values)
        return gathered

    def present(self, gathered: Mapping[str, Any]) -> None:
        """Between two rounds the module's own hooks find what all clients have gathered."""
        self.presented = {path: dict(changes) for path, changes in gathered.items()}
        self._put(self.presented)

    def withdraw(self) -> dict[str, Any]:
        """Take back what is presented, and say what it was."""
        presented = self.presented
        self.settle()
        return presented

    def moved_on(self) -> list[tuple[str, str]]:
        """What the module's own hooks have set anew since it was presented: the module rules over it, not the clients.

        Returns:
            Pairs of a submodule's name and an attribute's; they are presented no more.
        """
        anew: list[tuple[str, str]] = []
        for path, changes in self.presented.items():
            anew += [(path, name) for name in self._slots[path].moved_on(changes)] if path in self._slots else []
        for path, name in anew:
            del self.presented[path][name]
        return anew

    def settle(self) -> None:
        """Before a round, after ``moved_on``: what is still presented is gone."""
        for path, changes in self.presented.items():
            if path in self._slots:
                self._slots[path].reset(only=changes)
        self.presented = {}

    def shared(self) -> list[str]:
        """What clients changed that cannot be kept apart: a sentence for each attribute, so far."""
        return list(self._shared.values())

    @staticmethod
    def _name(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name


def _owners(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The submodules whose attributes are looked at, by name."""
    if id(module) in seen or any(cls.__module__.partition(".")[0] == "torchmetrics" for cls in type(module).__mro__):
        return
    seen.add(id(module))
    if not type(module).__module__.startswith("torch."):
        yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _owners(f"{path}.{name}" if path else name, child, seen)


def _lives_in(module: nn.Module) -> Callable[[str], bool]:
    """Whether a name is the module's parameter, buffer or submodule by now."""
    return lambda name: name in module._parameters or name in module._buffers or name in module._modules
