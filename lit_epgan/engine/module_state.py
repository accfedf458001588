"""What of a module lies outside the flat vector: buffers, frozen parameters, personal layers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from lit_epgan.engine.aggregation import AS, Aggregator, Stack
from lit_epgan.engine.buffers import Merge, choose_merges, merged_extremes, refuse_unmatched
from lit_epgan.engine.changes import change, changed, moved, same
from lit_epgan.engine.messages import Broadcast, Count, Report, Term, Total, Weighted
from lit_epgan.engine.parameters import matches
from lit_epgan.engine.spectral import settle_spectral_norms
from lit_epgan.errors import UserError

BufferPolicy = Literal["merge", "local", "exclude"]
PREFIX = "module/"


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

    def apply(self, total: Total, weight: Tensor, round_: int) -> list[str]:
        """Take the merged changes out of ``total`` and into the server's tensors.

        Args:
            total: of an exchange that was answered by training.
            weight: sum of n_k (1,).
            round_: the round's number.

        Returns:
            Names of the buffers that cannot be merged, because they have different shapes at different clients.
        """
        grown: dict[str, list[str]] = {}
        for key in [k for k in total.sums if k.startswith(PREFIX)]:
            if AS in key and key.endswith("/weight"):
                continue
            name = key.removeprefix(PREFIX)
            if AS in name:
                grown.setdefault(name.split(AS)[0], []).append(key)
            else:
                merge = self.merges.get(name, "mean")
                self._put(name, moved(self.server[name], total.sums.pop(key), weight, merge), round_)
        for name, keys in grown.items():
            if len(keys) == 1:
                self._take(name, keys[0], total, round_)
        for name, each in [(k, v) for k, v in total.each.items() if k.startswith(PREFIX)]:
            held = name.removeprefix(PREFIX)
            self._put(
                held, merged_extremes(list(each.values()), self.merges.get(held, "max"), self.server.get(held)), round_
            )
            del total.each[name]
        for key in [k for k in total.sums if k.startswith(PREFIX)]:
            del total.sums[key]
        return [name for name, keys in grown.items() if len(keys) > 1]

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
