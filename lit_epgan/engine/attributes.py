"""What a module keeps in ordinary attributes: counters, lists, a replay pool, a teacher in a list."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lit_epgan.engine.own import MISSING, Copier, Held, Known, NotPlainError, pooled, same
from lit_epgan.errors import UserError


class Attributes:
    """The ordinary attributes of a module and its submodules: a client works on copies, the server's are laid aside.

    A client that is new starts with copies of what they are when the round begins; later with what it changed in its
    last round, as far as that is plain data. Submodules of torch itself are not looked at, nor are metrics, which
    accumulate over a round on purpose. Functions, optimizers, data sets, and the module's own tensors, views of them
    and submodules are not copied.

    Args:
        module: the module.
        ignore: further names that are left alone, such as those that every LightningModule has.
    """

    def __init__(self, module: nn.Module, ignore: Collection[str] = ()) -> None:
        self._module = module
        self._ignore = frozenset(vars(nn.Module())) | frozenset(ignore)
        self._held: dict[str, Held] = {}
        self._said: dict[str, str] = {}
        self._presented: dict[str, dict[str, Any]] = {}
        self.round_begins()

    def round_begins(self) -> None:
        """What the attributes are now is what a fresh client starts with."""
        module = self._module
        self._known = Known([*module.modules(), *module.parameters(), *module.buffers()])
        before, self._held = self._held, {}
        for path, owner in _owners("", module, set()):
            held = before.get(path)
            if held is None or held.held is not vars(owner):
                held = Held(vars(owner), self._ignore, _lives_in(owner))
            held.take(self._known)
            self._held[path] = held

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """A client begins.

        Args:
            state: its own, from ``collect``; it is not changed. None, or an empty one: fresh.

        Raises:
            UserError: what it has kept does not fit the module any more.
        """
        copier = Copier(self._known)
        for path, held in self._held.items():
            for name in held.give(copier):
                self._say(path, name, "cannot be copied: all clients share it")
        made: dict[int, Any] = {}
        device = next((p.device for p in self._module.parameters()), None)
        for path, changes in (state or {}).items():
            if path in self._held:
                try:
                    self._held[path].put(changes, device, made)
                except NotPlainError as error:
                    names = ", ".join(_full(path, name) for name in changes)
                    raise UserError(
                        f"what a client keeps in {names} of {type(self._module).__name__} does not fit it any more: "
                        f"{error}"
                    ) from error

    def clear(self) -> None:
        """Nobody works: the module holds the server's."""
        for held in self._held.values():
            held.put_back()

    def collect(self, client: str = "") -> tuple[dict[str, Any], dict[str, Any]]:
        """What the client at work has changed, by submodule and name.

        Args:
            client: its name, for ``shared``.

        Returns:
            As plain data that later steps do not change, and the objects themselves.
        """
        kept: dict[str, Any] = {}
        live: dict[str, Any] = {}
        nodes: dict[int, Any] = {}
        for path, held in self._held.items():
            for name in held.changed():
                live.setdefault(path, {})[name] = held.held.get(name, MISSING)
                try:
                    kept.setdefault(path, {})[name] = held.plain(name, nodes)
                except NotPlainError as error:
                    during = f"during client {client}" if client else "during a client"
                    self._say(path, name, f"changed {during} and starts afresh in each of its rounds: it holds {error}")
        return {path: changes for path, changes in kept.items() if changes}, live

    def _say(self, path: str, name: str, what: str) -> None:
        full = _full(path, name)
        self._said.setdefault(full, f"attribute `{full}` of {type(self._module).__name__} {what}")

    def shared(self) -> list[str]:
        """What clients share or cannot keep: a sentence for each attribute, so far."""
        return list(self._said.values())

    # Between two rounds -----------------------------------------------------------------------------------------------

    def pool(self, collected: Sequence[Mapping[str, Any]]) -> None:
        """Until ``settle`` the module's own hooks find what all clients have gathered: see ``pooled``.

        Args:
            collected: the objects that ``collect`` gave for each of them.
        """
        self.clear()
        found: dict[tuple[int, ...], Any] = {}  # what attributes share they share in the end
        for path, name in {(p, name): None for changes in collected for p in changes for name in changes[p]}:
            values = [c[path][name] for c in collected if c.get(path, {}).get(name, MISSING) is not MISSING]
            if path in self._held and values:
                held = self._held[path]
                which = tuple(map(id, values))
                if which not in found:
                    found[which] = pooled(held.then.get(name, MISSING), values)
                held.held[name] = found[which]
                self._presented.setdefault(path, {})[name] = Copier(self._known)(held.held[name])

    @property
    def presented(self) -> dict[str, Any]:
        """What the module's hooks find now, and have not set anew, as plain data."""
        kept: dict[str, Any] = {}
        nodes: dict[int, Any] = {}
        anew = self._anew()
        for path, changes in self._presented.items():
            for name in [name for name in changes if (path, name) not in anew]:
                try:
                    kept.setdefault(path, {})[name] = self._held[path].plain(name, nodes)
                except NotPlainError:
                    continue  # ``collect`` has said so
        return kept

    def present(self, kept: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's ``presented``."""
        self.begin(kept)
        for path, changes in kept.items():
            if path in self._held:
                copies = {name: Copier(self._known)(self._held[path].held[name]) for name in changes}
                self._presented[path] = copies

    def moved_on(self) -> list[tuple[str, str]]:
        """What the module's own hooks have set anew since it was pooled: the module rules over it, not the clients.

        Returns:
            Pairs of a submodule's name and an attribute's.
        """
        anew = self._anew()
        for path, name in anew:
            del self._presented[path][name]
        return anew

    def _anew(self) -> list[tuple[str, str]]:
        return [
            (path, name)
            for path, changes in self._presented.items()
            for name, value in changes.items()
            if not same(self._held[path].held.get(name, MISSING), value)
        ]

    def settle(self) -> None:
        """Before a round, after ``moved_on``: what the hooks have found, and not set anew, is gone."""
        for path, changes in self._presented.items():
            self._held[path].put_back(only=changes)
        self._presented = {}


def _full(path: str, name: str) -> str:
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
            yield from _owners(_full(path, name), child, seen)


def _lives_in(module: nn.Module) -> Callable[[str], bool]:
    """Whether a name is the module's parameter, buffer or submodule by now."""
    return lambda name: name in module._parameters or name in module._buffers or name in module._modules
