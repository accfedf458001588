"""What a module and its optimizers hold beside the module's tensors: a fresh client's, or each client's own."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.own import MISSING, Copier, Entries, Known, NotPlainError, plain, pooled, put, same
from lit_epgan.lib.errors import UserError


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
        self._held: dict[str, Entries] = {}
        self._said: dict[str, str] = {}
        self._presented: dict[str, dict[str, Any]] = {}
        self.round_begins()

    def round_begins(self) -> None:
        """What the attributes are now is what a fresh client starts with."""
        module = self._module
        self._begun: dict[tuple[str, str], Any] = {}  # what clients began with, where they changed it
        self._known = Known([*module.modules(), *module.parameters(), *module.buffers()])
        before, self._held = self._held, {}
        for path, owner in _owners("", module, set()):
            held = before.get(path)
            if held is None or held.held is not vars(owner):
                held = Entries(vars(owner), self._ignore, _lives_in(owner))
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
                if (path, name) not in self._begun:  # training at the server may change it later in the round
                    self._begun[path, name] = Copier(self._known)(held.then.get(name, MISSING))
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
                    found[which] = pooled(self._begun.get((path, name), held.then.get(name, MISSING)), values)
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


OptimizerPolicy = Literal["reset", "keep"]
SCHEDULED = frozenset({"lr", "initial_lr", "min_lr", "max_lr"})
CYCLED = frozenset({"momentum", "betas", "base_momentum", "max_momentum"})
NOT_HELD = frozenset({"state", "param_groups", "step", "_opt_called", "_warned_capturable_if_run_uncaptured"})


class OptimizerStates:
    """Everything that the optimizers and schedules of one module hold: fresh for each client, or each client's own.

    That is their ``state``, the entries of ``param_groups`` and their attributes, those of optimizers that they wrap
    included, and the schedules' own. What a schedule changes between the rounds runs with the rounds, for clients that
    have a state of their own too: an entry that is not what it was when the client began follows the server's.

    Args:
        optimizers: the optimizers.
        schedulers: anything with ``state_dict`` and ``load_state_dict``.
        policy: ``reset`` starts them afresh for every client, ``keep`` gives each client its own.
        by_rounds: those of the schedulers that somebody steps at a round's end, maybe before its last client is
            collected: they, and the rates that they set, are left alone.

    Attributes:
        policy: as given.

    Raises:
        UserError: for a policy that does not exist or a learning rate that is none.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[Any],
        policy: OptimizerPolicy,
        by_rounds: Collection[Any] = (),
    ) -> None:
        if policy not in ("reset", "keep"):
            raise UserError(f"FederationCallback's optimizer_state is {policy!r}; choose reset or keep")
        self.policy = policy
        self.optimizers = list(optimizers)
        self._rounds_own = [s for s in schedulers if any(s is other for other in by_rounds)]
        self._schedules = [_Schedule(s) for s in schedulers if not any(s is other for other in by_rounds)]
        self._all = list(_with_wrapped(self.optimizers, set()))
        for optimizer in self._all:
            for rate in (float(group["lr"]) for group in optimizer.param_groups if "lr" in group):
                if not 0 <= rate < float("inf"):
                    raise UserError(f"the learning rate is {rate}; it must be a finite number, 0 or more")
        self._held: dict[str, Entries] = {}
        self._said: dict[str, str] = {}
        self._take()
        self._first = [_made_with(optimizer.state) for optimizer in self._all]

    def round_begins(self) -> None:
        """What optimizers and schedules hold now, but for ``state``, is what a fresh client starts with.

        To be called when they are the server's: after ``begin(None)`` and the schedules that run between rounds.
        """
        self._all = list(_with_wrapped(self.optimizers, set()))
        self._first += [None] * (len(self._all) - len(self._first))
        self._take()
        for schedule in self._schedules:
            schedule.take()

    def _take(self) -> None:
        before, self._held = self._held, {}
        self._positions = {f"{i}/{j}": p for i, o in enumerate(self._all) for j, p in enumerate(_parameters(o))}
        self._names = {id(p): name for name, p in reversed(self._positions.items())}
        self._known = Known(self._positions.values())
        self._groups = [(o.param_groups, list(o.param_groups)) for o in self._all]
        self._members = [(g["params"], list(g["params"])) for _, groups in self._groups for g in groups]
        taken: set[int] = set()
        for i, optimizer in enumerate(self._all):
            hooks = [name for name in vars(optimizer) if name.startswith(("_optimizer_", "_zero_grad_profile"))]
            self._hold(before, f"{i}/attributes", vars(optimizer), NOT_HELD | set(hooks))
            for j, group in enumerate(optimizer.param_groups):
                if id(group) not in taken:
                    taken.add(id(group))
                    names = [_sets(s) for s in self._rounds_own if _is_of(s, group)]
                    self._hold(before, f"{i}/groups/{j}", group, {"params"}.union(*names))

    def _hold(self, before: Mapping[str, Entries], name: str, entries: dict[str, Any], skip: Collection[str]) -> None:
        held = before.get(name)
        if held is None or held.held is not entries:
            held = Entries(entries, skip)
        held.take(self._known)
        self._held[name] = held

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """A client begins, or the server's model is loaded.

        Args:
            state: the client's own, from ``collect``; it is not changed. None: fresh.

        Raises:
            UserError: if what was kept cannot be made again, because a class is not there any more.
        """
        for optimizer, first in zip(self._all, self._first, strict=True):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
            optimizer.state.clear()
            if first is not None:
                optimizer.state.update({p: put(saved, MISSING) for p, saved in first.items()})
        for optimizer, (listed, groups) in zip(self._all, self._groups, strict=True):
            if optimizer.param_groups is not listed:
                optimizer.param_groups = listed
            listed[:] = groups
        for listed, members in self._members:
            if len(listed) != len(members) or any(a is not b for a, b in zip(listed, members, strict=True)):
                listed[:] = members
        copier = Copier(self._known)
        for name, held in self._held.items():
            for entry in held.give(copier):
                self._say(name, entry, "cannot be copied: all clients share it")
        for schedule in self._schedules:
            schedule.reset()
        if state is not None:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    self._put(state)
            except NotPlainError as error:
                raise UserError(f"what a client keeps of its optimizers does not fit them any more: {error}") from error

    def _put(self, state: Mapping[str, Any]) -> None:
        for i, saved in state["states"].items():
            if int(i) < len(self._all):
                self._put_state(self._all[int(i)], saved, state["device"])
        moved = [s.scheduler for s, own in zip(self._schedules, state["schedules"], strict=False) if not s.put(own)]
        for name, changes in state["settings"].items():
            if name in self._held:
                held = self._held[name]
                by_rounds = {entry for s in moved if _is_of(s, held.held) for entry in _sets(s)}
                then = {n: self._plain(held.then.get(n, MISSING)) for n in changes}
                own = {n: c["to"] for n, c in changes.items() if n not in by_rounds and same(c["from"], then[n])}
                held.put(own)

    def _plain(self, value: Any) -> Any:
        """For comparison; None if it is nothing, or cannot be read."""
        try:
            return None if value is MISSING else plain(value, value, self._known)
        except NotPlainError:
            return None

    def _put_state(self, optimizer: Optimizer, saved: Mapping[str, Any], device: str) -> None:
        optimizer.state.clear()
        for name, entries in saved["parameters"].items():
            if name in self._positions:
                parameter = self._positions[name]
                group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {})
                made = put(entries, MISSING)
                if device == "cpu" != parameter.device.type:  # kept on a CPU, resumed on an accelerator
                    on_host = not (group.get("capturable") or group.get("fused"))  # where the step count is read
                    made = {
                        n: _moved(v, parameter.device) if n != "step" or not on_host else v for n, v in made.items()
                    }
                optimizer.state[parameter] = made
        optimizer.state.update(put(saved["others"], MISSING))

    def collect(self) -> dict[str, Any] | None:
        """What the client at work keeps, as plain data that later steps do not change; None if clients keep nothing.

        Args:
            client: who has worked, for ``shared``.

        Raises:
            UserError: if an optimizer's ``state`` holds what cannot be kept.
        """
        if self.policy == "reset":
            return None
        with torch.inference_mode(False), torch.no_grad():
            device = next((p.device.type for p in self._positions.values()), "cpu")
            settings = {name: self._changes(name, held) for name, held in self._held.items()}
            return {
                "states": dict(self._states()),
                "device": device,
                "settings": {name: changes for name, changes in settings.items() if changes},
                "schedules": [schedule.changes() for schedule in self._schedules],
            }

    def shared(self) -> list[str]:
        """What of optimizers clients share or cannot keep: a sentence for each entry, so far."""
        return list(self._said.values())

    def _say(self, name: str, entry: str, what: str) -> None:
        owner = type(self._all[int(name.partition("/")[0])]).__name__
        self._said.setdefault(f"{name}/{entry}", f"`{entry}` of {owner} {what}")

    def _changes(self, name: str, held: Entries) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        nodes: dict[int, Any] = {}
        for entry in held.changed():
            try:
                changes[entry] = {"from": self._plain(held.then.get(entry, MISSING)), "to": held.plain(entry, nodes)}
            except NotPlainError as error:
                self._say(name, entry, f"changed and starts afresh in each of a client's rounds: it holds {error}")
        return changes

    def _states(self) -> Iterator[tuple[str, Any]]:
        taken: set[int] = set()
        nodes: dict[int, Any] = {}
        for i, optimizer in enumerate(self._all):
            if id(optimizer.state) in taken:
                continue
            taken.add(id(optimizer.state))
            try:
                of_parameters: dict[str, Any] = {}
                others: dict[Any, Any] = {}
                for key, value in optimizer.state.items():
                    if isinstance(key, Tensor):
                        if id(key) in self._names:
                            of_parameters[self._names[id(key)]] = plain(value, MISSING, Known(), nodes)
                    else:
                        others[key] = value
                yield str(i), {"parameters": of_parameters, "others": plain(others, MISSING, Known(), nodes)}
            except NotPlainError as error:
                raise UserError(
                    f"{type(optimizer).__name__} keeps {error} in its state, which no client can keep from round to "
                    "round: set optimizer_state to reset"
                ) from error


class _Schedule:
    """One scheduler, and its state when the round began."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.take()

    def take(self) -> None:
        self._then = self._state()

    def _state(self) -> Any:
        try:
            return plain(self.scheduler.state_dict(), MISSING, Known())
        except NotPlainError as error:
            raise UserError(
                f"{type(self.scheduler).__name__} keeps {error} in its state_dict, which cannot be given to each client"
            ) from error

    def reset(self) -> None:
        if not same(self._state(), self._then):
            self._load(self._then)

    def _load(self, saved: Any) -> None:
        self.scheduler.load_state_dict(put(saved, MISSING))

    def changes(self) -> dict[str, Any]:
        """What its state was when the client began, and, if that is something else, what it is now."""
        state = self._state()
        return {"from": self._then} | ({} if same(state, self._then) else {"to": state})

    def put(self, own: Mapping[str, Any]) -> bool:
        """Take up a client's own, unless the schedule has run with the rounds since; whether it has not."""
        if not same(own["from"], self._then):
            return False
        if "to" in own:
            self._load(own["to"])
        return True


def _with_wrapped(values: Any, seen: set[int]) -> Iterator[Optimizer]:
    """All optimizers among values, those that they wrap after them."""
    for value in values:
        if isinstance(value, Optimizer) and id(value) not in seen:
            seen.add(id(value))
            yield value
            yield from _with_wrapped([v for n, v in vars(value).items() if n not in NOT_HELD], seen)
        elif isinstance(value, list | tuple | dict) and id(value) not in seen:
            seen.add(id(value))
            yield from _with_wrapped(value.values() if isinstance(value, dict) else value, seen)


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _made_with(state: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """A state that the optimizer's constructor made, as Adagrad's does; None if it is empty, or steps made it."""
    entries = list(state.values())
    if not entries or not all(isinstance(e, dict) and "step" in e and float(e["step"]) == 0 for e in entries):
        return None
    return {parameter: plain(entry, MISSING, Known()) for parameter, entry in state.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return [_moved(part, device) for part in value] if isinstance(value, list) else value


def _is_of(scheduler: Any, group: Mapping[str, Any]) -> bool:
    """Whether a scheduler sets entries of this group."""
    optimizer = getattr(scheduler, "optimizer", None)
    return optimizer is not None and any(g is group for g in optimizer.param_groups)


def _sets(scheduler: Any) -> frozenset[str]:
    """The entries of its optimizer's groups that a scheduler sets."""
    return SCHEDULED | CYCLED if getattr(scheduler, "cycle_momentum", False) else SCHEDULED
