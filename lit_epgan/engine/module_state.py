"""What of a module lies outside the flat vector: buffers, frozen parameters, personal layers; and how it is merged."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from lit_epgan.engine.messages import (
    AS,
    Aggregator,
    Broadcast,
    Count,
    Report,
    Shape,
    Stack,
    Term,
    Total,
    Weighted,
    shape_of,
)
from lit_epgan.engine.parameters import matches
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

Merge = Literal["mean", "sum", "any", "unit", "min", "max", "server", "local"]
MERGES: tuple[str, ...] = get_args(Merge)
GROWING = ("mean", "sum", "any", "unit")  # merges of buffers that may have another shape than the server's
UNIT_TOLERANCE = 1e-3


def choose_merges(module: nn.Module, buffers: Mapping[str, Tensor], policy: Any) -> dict[str, Merge]:
    """The merge of every buffer.

        mean     the mean weighted by n_k: statistics, moving averages
        sum      what all clients have added: counters (integers)
        any      true if it became true anywhere: flags (bool, uint8)
        unit     the mean, scaled to length one: vectors of length one, as spectral norm's
        min, max the smallest and the largest over clients: observers' ``min_val`` and ``max_val``
        server   back to the server's after each client
        local    each client's own

    A buffer that no client changes is a constant, whatever its kind: it is never sent.

    Args:
        module: their module.
        buffers: by name.
        policy: ``merge``, ``local`` or ``exclude`` for all, or merges by name pattern, the kind's for the rest.

    Raises:
        UserError: a policy or a merge that does not exist.
    """
    if isinstance(policy, str):
        if policy not in ("merge", "local", "exclude"):
            raise UserError(f"FederationCallback's buffers is {policy!r}; choose merge, local or exclude")
        if policy != "merge":
            return dict.fromkeys(buffers, "local" if policy == "local" else "server")
        policy = {}
    wrong = {name: merge for name, merge in policy.items() if merge not in MERGES}
    if wrong:
        raise UserError(f"FederationCallback's buffers: {wrong} is no way to merge; choose {', '.join(MERGES)}")
    chosen: dict[str, Merge] = {}
    for name, tensor in buffers.items():
        asked = [merge for pattern, merge in policy.items() if matches(name, [pattern])]
        chosen[name] = asked[0] if asked else kind(name, tensor)
    return chosen


def refuse_unmatched(policy: Any, buffers: Mapping[str, Tensor]) -> None:
    """Refuse a pattern that matches no buffer.

    Raises:
        UserError: naming it, and the buffers that there are.
    """
    patterns = [] if isinstance(policy, str) else list(policy)
    unmatched = [pattern for pattern in patterns if not any(matches(name, [pattern]) for name in buffers)]
    if unmatched:
        raise UserError(
            f"FederationCallback's buffers: no buffer matches {', '.join(unmatched)}; there are {few(buffers, 3)}"
        )


def kind(name: str, tensor: Tensor) -> Merge:
    """The merge that suits a buffer's meaning, as far as its name, type and values tell it."""
    leaf = name.rpartition(".")[2]
    if leaf in ("running_mean", "running_var"):  # whatever their length happens to be
        return "mean"
    if leaf in ("min_val", "min_vals", "max_val", "max_vals"):
        return "min" if leaf.startswith("min") else "max"
    if tensor.dtype in (torch.bool, torch.uint8):
        return "any"
    if not tensor.is_floating_point() and not tensor.is_complex():
        return "sum"
    if tensor.dim() == 1 and tensor.numel() > 1 and abs(float(torch.linalg.vector_norm(tensor)) - 1) < UNIT_TOLERANCE:
        return "unit"
    return "mean"


def merged_extremes(values: Sequence[Tensor], merge: Merge, held: Tensor | None) -> Tensor:
    """The elementwise extreme of the clients' values and the server's, of those that have the first one's shape."""
    alike = [value for value in values if value.shape == values[0].shape]
    if held is not None and held.shape == values[0].shape:
        alike.append(held)
    stacked = torch.stack([value.to(values[0].device) for value in alike])
    return stacked.amin(0) if merge == "min" else stacked.amax(0)


def partition(merges: Mapping[str, Merge]) -> str:
    """One line that says how each buffer is merged: its merge, and how many; single names where there are few."""
    groups: dict[str, list[str]] = {}
    for name, merge in merges.items():
        groups.setdefault(merge, []).append(name)
    return "; ".join(f"{merge}: {few(names, 3)}" for merge, names in groups.items())


Compared = Sequence[tuple[str, Tensor, Merge]]
"""Buffers of the server's shapes: their names, what they are now, how they are merged."""


def changed(compared: Compared, server: Mapping[str, Tensor], weight: float) -> dict[str, Term]:
    """The changes of those that have changed, by name, each as its merge wants it.

    Args:
        compared: what there is.
        server: what there was, by name.
        weight: n_k.
    """
    report: dict[str, Term] = {}
    floats = [(n, t, m) for n, t, m in compared if t.is_floating_point() and t.numel()]
    if floats:
        deltas = torch._foreach_sub([t for _, t, _ in floats], [server[n] for n, _, _ in floats])
        farthest = torch.stack([d.float() for d in torch._foreach_norm(deltas, float("inf"))]).tolist()
        for (name, tensor, merge), delta, far in zip(floats, deltas, farthest, strict=True):
            if far != far or far == float("inf"):
                delta = torch.where(_stays(tensor, server[name]), torch.zeros_like(delta), delta)
                far = float(delta.abs().max())
            if far != 0:
                report[name] = delta if merge == "sum" else Weighted(delta, weight)
    for name, tensor, merge in compared:
        if not tensor.is_floating_point() and not same(tensor, server[name]):
            exact = torch.complex128 if tensor.is_complex() else torch.float64
            delta = tensor.to(exact) - server[name].to(exact)
            delta = torch.view_as_real(delta) if delta.is_complex() else delta
            report[name] = Weighted(delta, weight) if merge in ("mean", "unit") else delta
    return report


def change(now: Tensor, before: Tensor) -> Tensor:
    """The difference of two tensors of one shape, as real numbers: a complex one's is (..., 2)."""
    delta = now - before
    delta = torch.where(_stays(now, before), torch.zeros_like(delta), delta)
    return torch.view_as_real(delta) if delta.is_complex() else delta


def moved(held: Tensor, change: Tensor, weight: Tensor, merge: Merge) -> Tensor:
    """The server's tensor after the clients' changes.

    Args:
        held: what the server has.
        change: the sum of their changes, times n_k for a mean; a complex one's as real numbers (..., 2).
        weight: sum of n_k (1,).
        merge: how its changes are merged.
    """
    if held.is_complex():
        change = torch.view_as_complex(change)
    if merge == "any":
        found = held.bool() | (change != 0).to(held.device)
    elif merge == "sum":
        found = held + change.to(held.device)
    else:
        found = held + (change / weight).to(held.device)
    if merge == "unit":
        found = found / torch.linalg.vector_norm(found).clamp(min=1e-12)
    if not held.is_floating_point() and not held.is_complex() and merge != "any":
        found = found.round()
    return found.to(held.dtype)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are alike in shape, data type and values; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or ((a.is_floating_point() or a.is_complex()) and bool(_stays(a, b).all()))


def _stays(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape are equal, or both not a number."""
    return (a == b) | (a.isnan() & b.isnan())


ITERATIONS = 15  # as torch's own initialisation


@torch.no_grad()
def settle_spectral_norms(module: nn.Module) -> bool:
    """Run the power method of every spectral norm in ``module`` on the weights that it holds now.

    Returns:
        Whether there is any.
    """
    found = False
    for submodule in module.modules():
        if isinstance(submodule, nn.utils.parametrize.ParametrizationList):
            for each in submodule:
                if isinstance(each, _SpectralNorm) and submodule.original.dim() > 1:
                    each._power_method(each._reshape_weight_to_matrix(submodule.original), ITERATIONS)
                    found = True
        for hook in submodule._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                for _ in range(ITERATIONS):
                    hook.compute_weight(submodule, do_power_iteration=True)
                found = True
    return found


BufferPolicy = Literal["merge", "local", "exclude"]
PREFIX = "module/"
CLIENTS = "/clients"  # in a total beside a buffer whose shape the server does not know: how many have sent it
EVERYBODY = PREFIX + CLIENTS  # how many have sent anything


def heads(report: Report) -> Report:
    """What the server itself adds to a client's report: that it is one client's."""
    grown = [name for name in report if AS in name and not name.endswith("/weight")]
    return {name + CLIENTS: Count(1.0) for name in grown} | {EVERYBODY: Count(1.0)}


class ModuleState:
    """Buffers, frozen and personal parameters: everything of a module that is not in the flat vector.

    Buffers are merged by their kind (``merge``; see ``buffers``), kept by each client (``local``), or go back to the
    server's after each client (``exclude``). Parameters that no optimizer trains but the module changes by itself (a
    moving-average teacher, a layer unfrozen later) are averaged with the rest. What has not changed is neither sent nor
    copied. Names that match ``local`` stay the client's; the server's module keeps their initial values.

    Args:
        module: the module.
        federated: names of the parameters in the flat vector.
        local: name patterns of personal parameters and buffers, as in ``head.*``.
        buffers: one policy for all buffers, or merges by name pattern for those that are to differ from their kind's.
        on_server: submodules whose buffers go back to the server's.

    Attributes:
        server: the server's tensors, by name.
        versions: by name, the round in which the server's tensor last changed; one that never did is not there.

    Raises:
        UserError: a policy or a pattern that does not exist.
    """

    def __init__(
        self,
        module: nn.Module,
        federated: Iterable[str],
        local: Sequence[str] = (),
        buffers: BufferPolicy | Mapping[str, Merge] = "merge",
        on_server: Sequence[str] = (),
    ) -> None:
        self._module = module
        named = dict(module.named_buffers())
        flat = set(federated)
        parameters = {n: p for n, p in module.named_parameters() if n not in flat}
        personal = {n for n in named if buffers == "local"}
        known: dict[str, Tensor] = named | parameters
        unmatched = [pattern for pattern in local if not any(matches(n, [pattern]) for n in known)]
        if unmatched:
            raise UserError(f"no parameter or buffer matches the local name pattern {', '.join(unmatched)}")
        self.personal = [n for n in known if n in personal or matches(n, local)]
        self._on_server = tuple(on_server)
        self._policy = buffers
        self.merges = choose_merges(module, {n: b for n, b in named.items() if n not in self.personal}, buffers)
        refuse_unmatched(buffers, named)
        self.personal += [n for n, merge in self.merges.items() if merge == "local"]
        self.frozen = [n for n in parameters if n not in self.personal]
        self.server = {name: tensor.detach().clone() for name, tensor in known.items()}
        self.versions: dict[str, int] = {}
        owners = {path: part._buffers for path, part in module.named_modules()}
        self._empty = {f"{p}.{n}" if p else n for p, held in owners.items() for n, b in held.items() if b is None}
        self._initial = {name: buffer.shape for name, buffer in named.items()}
        self._dirty: set[str] = set()

    # The client's half ------------------------------------------------------------------------------------------------

    def load(self, received: Broadcast, personal: Mapping[str, Tensor]) -> None:
        """Make the module hold what was received, else what the server had before, and a client's own layers."""
        for name, tensor in received.items():
            if name.startswith(PREFIX) and self.server.get(name.removeprefix(PREFIX)) is not tensor:
                self.server[name.removeprefix(PREFIX)] = tensor.clone()
        live = self._buffers()
        wanted = {
            n: t for n, t in self.server.items() if n in live or (n not in self.frozen and n not in self.personal)
        }
        wanted |= {n: self.server[n] for n in (*self._dirty, *self.personal)} | dict(personal)
        self._dirty = set()
        for name in set(live) - set(wanted):
            self._set(name, None)
        parameters = dict(self._module.named_parameters()) if any(n not in live for n in wanted) else {}
        old, new = [], []
        for name, value in wanted.items():
            held = parameters.get(name, live.get(name))
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                self._set(name, value)
            else:
                old.append(held.detach())
                new.append(value)
        if old:
            torch._foreach_copy_(old, new)

    def read_personal(self) -> dict[str, Tensor]:
        """The personal layers as the module holds them, copied."""
        if not self.personal:
            return {}
        live = {**dict(self._module.named_parameters()), **self._buffers()}
        return {name: live[name].detach().clone() for name in self.personal if name in live}

    def changes(self, weight: float) -> Report:
        """What the client's training changed, by the rule of each tensor's kind.

        Args:
            weight: n_k.

        Raises:
            UserError: a buffer whose extremes are wanted was not there when the fit began.
        """
        report: dict[str, Term] = {}
        live, compared = self._buffers(), []
        for name, tensor in live.items():
            merge = self._merge(name, tensor)
            if merge in ("server", "local") or name in self.personal:
                continue
            if name in self.server and self.server[name].shape == tensor.shape and merge not in ("min", "max"):
                compared.append((name, tensor, merge))
            elif merge in ("min", "max"):
                if name not in self.server:
                    raise UserError(
                        f"the buffer {name!r}, whose {merge} over clients is wanted, appeared in training: register it "
                        "in __init__"
                    )
                if not same(tensor, self.server[name]):
                    report[PREFIX + name] = tensor
            else:
                key = PREFIX + name + AS + "x".join(map(str, tensor.shape))
                report[key] = Weighted(tensor, weight) if merge in ("mean", "unit") else tensor
                report[key + "/weight"] = Count(weight, True)
        report |= {PREFIX + name: term for name, term in changed(compared, self.server, weight).items()}
        return {**report, **self._frozen_changes(weight)}

    def note_changes(self) -> None:
        """Remember which frozen parameters have moved, for they must go back; the rest goes back anyway."""
        self._frozen_changes(0.0)

    def unfrozen(self) -> list[str]:
        """Names of the parameters outside the flat vector that need gradients by now."""
        if not self.frozen:
            return []
        return [n for n, p in self._module.named_parameters() if p.requires_grad and n in self.frozen]

    def _frozen_changes(self, weight: float) -> Report:
        report: dict[str, Weighted] = {}
        if not self.frozen:
            return report
        parameters = dict(self._module.named_parameters())
        for name in self.frozen:
            live = parameters[name].detach()
            if not same(live, self.server[name]):
                self._dirty.add(name)
                report[PREFIX + name] = Weighted(change(live, self.server[name]), weight)
        return report

    # The server's half ------------------------------------------------------------------------------------------------

    def broadcast(self) -> Broadcast:
        """What a client must be sent, for the configuration's initial model has changed since."""
        return {PREFIX + n: self.server[n] for n in self.versions if n.split(".")[0] not in self._on_server}

    def kept(self) -> dict[str, int]:
        """The versions of what ``broadcast`` gives: a client that has one needs it no more."""
        return {PREFIX + name: version for name, version in self.versions.items()}

    def combine(self) -> dict[str, Aggregator]:
        """Aggregators of the entries that do not sum: extremes are asked for one by one."""
        extremes = [n for n, merge in self.merges.items() if merge in ("min", "max")]
        return {PREFIX + name: Stack() for name in extremes}

    def shapes(self) -> tuple[dict[str, Shape], set[str]]:
        """Of the entries that clients may send, the shapes that the server knows, by name; and the names of those that
        have none before an observer has seen data."""
        found, open_ = dict[str, Shape](), set[str]()
        for name, tensor in self.server.items():
            if name in self.personal or (name not in self.frozen and self._merge(name, tensor) in ("server", "local")):
                continue
            if self.merges.get(name) in ("min", "max") and not tensor.numel():
                open_.add(PREFIX + name)
            else:
                found[PREFIX + name] = torch.Size([*tensor.shape, 2]) if tensor.is_complex() else tensor.shape
        return found, open_

    def fault(self, report: Report) -> str | None:
        """A clause on a buffer in a report that no client has in a shape other than the server's; None without one."""
        for key in report:
            if AS not in key or key.endswith("/weight"):
                continue
            name, term = key.removeprefix(PREFIX).split(AS)[0], report[key]
            path, _, leaf = name.rpartition(".")
            try:
                owner = self._module.get_submodule(path)
            except AttributeError:
                return f"the model has no {path!r}, and so no buffer {name!r}"
            if leaf not in owner._buffers and (not leaf or hasattr(owner, leaf)):
                return f"{name!r} is no buffer of the model"
            if name in self.server and self.server[name].shape == shape_of(term):
                return f"{name!r} has the server's shape, and is sent as if it had not"
            merge = self.merges.get(name) or choose_merges(self._module, {name: torch.empty(0)}, self._policy)[name]
            if name in self.personal or name.split(".")[0] in self._on_server or merge not in GROWING:
                return f"nothing asks for the buffer {name!r}"
        return None

    def apply(self, total: Total, weight: Tensor, round_: int) -> list[str]:
        """Take the merged changes out of ``total`` and into the server's tensors.

        Args:
            total: of an exchange that was answered by training.
            weight: sum of n_k (1,).
            round_: the round's number.

        Returns:
            Names of the buffers that cannot be merged, because most clients have none of one other shape.
        """
        grown: dict[str, dict[str, float]] = {}
        everybody = float(total.sums.pop(EVERYBODY, 0.0))
        for key in [k for k in total.sums if k.startswith(PREFIX)]:
            if AS in key and key.endswith(("/weight", CLIENTS)):
                continue
            name = key.removeprefix(PREFIX)
            if AS in name:
                grown.setdefault(name.split(AS)[0], {})[key] = float(total.sums[key + CLIENTS])
            else:
                merge = self.merges.get(name, "mean")
                self._put(name, moved(self.server[name], total.sums.pop(key), weight, merge), round_)
        usual = {name: max(keys, key=keys.__getitem__) for name, keys in grown.items()}
        unlike = [name for name, key in usual.items() if 2 * grown[name][key] <= everybody]
        for name in usual.keys() - set(unlike):
            self._take(name, usual[name], total, round_)
        for name, each in [(k, v) for k, v in total.each.items() if k.startswith(PREFIX)]:
            held = name.removeprefix(PREFIX)
            self._put(
                held, merged_extremes(list(each.values()), self.merges.get(held, "max"), self.server.get(held)), round_
            )
            del total.each[name]
        for key in [k for k in total.sums if k.startswith(PREFIX)]:
            del total.sums[key]
        return unlike

    def _take(self, name: str, key: str, total: Total, round_: int) -> None:
        """A buffer that the server does not have, or has in another shape: its mean, sum or any over its owners."""
        example = self._buffers().get(name)
        merge = self.merges.setdefault(name, self._merge(name, example if example is not None else total.sums[key]))
        value = total.sums[key]
        if merge in ("mean", "unit"):
            value = value / total.sums[key + "/weight"].to(value.device)
        like = example if example is not None else value.float()
        self._put(name, value.to(like.device, like.dtype), round_)

    def _put(self, name: str, value: Tensor, round_: int) -> None:
        self.server[name] = value.clone()  # never in place: whoever holds the one of before may go back to it
        self.versions[name] = round_
        self._dirty.update([name] if name in self.frozen else [])

    def adopt(self, round_: int) -> bool:
        """Take what the module holds now as the server's; personal layers stay the clients'.

        Returns:
            Whether anything had changed.
        """
        live = {**self._buffers(), **{n: p.detach() for n, p in self._module.named_parameters() if n in self.frozen}}
        changed = False
        for name, tensor in live.items():
            held = self.server.get(name)
            if name in self.personal or (held is not None and same(held, tensor)):
                continue
            self._put(name, tensor, round_)
            changed = True
        return changed

    def go_back(self, tensors: Mapping[str, Tensor], versions: Mapping[str, int]) -> None:
        """Be as before: ``server`` and ``versions`` of then; the module holds them after the next ``load``."""
        self._dirty.update(n for n in self.frozen if self.server[n] is not tensors[n])
        self.server, self.versions = dict(tensors), dict(versions)

    def settle(self, round_: int) -> None:
        """After the merged parameters are loaded: what follows from them is computed anew (spectral norms' vectors)."""
        if "unit" in self.merges.values() and settle_spectral_norms(self._module):
            self.adopt(round_)

    # Both -------------------------------------------------------------------------------------------------------------

    def keep_merges(self, merges: Mapping[str, Merge]) -> None:
        """Merge buffers as before a resume: their values, which tell their kinds, are other ones by now.

        Args:
            merges: those of before, by name; a buffer that the policy names is merged as it says now.
        """
        if self._policy in ("local", "exclude"):
            return
        asked = () if isinstance(self._policy, str) else self._policy
        self.merges |= {n: m for n, m in merges.items() if n not in self.personal and not matches(n, asked)}

    def as_at_start(self, state: dict[str, Tensor]) -> set[str]:
        """Make a module's state dictionary loadable by the module as it was when the fit began.

        Args:
            state: changed in place: buffers that appeared later leave it, those of another shape get their first one.

        Returns:
            Names of the server's tensors that it does not hold any more.
        """
        apart = set()
        for name, tensor in self.server.items():
            if name in self.frozen or name in self.personal:
                continue
            if name not in self._initial or self._initial[name] != tensor.shape or name not in state:
                apart.add(name)
                state.pop(name, None)
                if name in self._initial and self._initial[name] != tensor.shape:
                    state[name] = tensor.new_zeros(self._initial[name])
        return apart

    def _merge(self, name: str, tensor: Tensor) -> Merge:
        if name.split(".")[0] in self._on_server:
            return "server"
        if name not in self.merges:  # it appeared after the fit began
            self.merges |= choose_merges(self._module, {name: tensor}, self._policy)
        return self.merges[name]

    def _buffers(self) -> dict[str, Tensor]:
        # by name each time: modules may assign a new tensor to a buffer
        return dict(self._module.named_buffers())

    def _set(self, name: str, value: Tensor | None) -> None:
        path, _, leaf = name.rpartition(".")
        owner = self._module.get_submodule(path)
        if value is None and name not in self._empty:  # registered in training: another client does it by itself
            owner._buffers.pop(leaf, None)
        elif value is None:
            owner._buffers[leaf] = None
        elif leaf in owner._buffers or leaf not in owner._parameters:
            owner._buffers[leaf] = value.clone()
        else:
            owner._parameters[leaf].data = value.clone()  # type: ignore[union-attr]
