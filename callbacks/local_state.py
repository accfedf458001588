"""What of the module and its optimizers belongs to a client, and what of it the server keeps."""

import copy
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.parameters import matches

BufferPolicy = Literal["average", "local", "exclude"]
OptimizerPolicy = Literal["reset", "keep"]


class ModuleTensors:
    """Buffers and personal parameters: everything of the module that is not in the flat vector of its parameters.

    Floating-point buffers are averaged with the parameters (``average``), kept by each client (``local``), or go back
    to the server's after each client (``exclude``). Integer buffers are never averaged: they go back to the server's,
    or stay the client's under ``local``. Names that match ``local`` stay the client's, parameters and buffers alike;
    the server's module keeps their initial values. Parameters that no optimizer trains but the module changes by itself
    (a moving-average teacher, a layer unfrozen later) are averaged with the rest. Buffers of the submodules that are
    ``on_server`` go back to the server's.
    """

    def __init__(
        self, module: LightningModule, local: Sequence[str], buffers: BufferPolicy, on_server: Sequence[str] = ()
    ) -> None:
        if buffers not in ("average", "local", "exclude"):
            raise UserError(f"FederationCallback's buffers is {buffers!r}; choose average, local or exclude")
        named: dict[str, Tensor] = dict(module.named_buffers())
        personal = {n for n in named if buffers == "local" or matches(n, local)}
        named |= {n: p for n, p in module.named_parameters() if not p.requires_grad or matches(n, local)}
        unmatched = [pattern for pattern in local if not any(matches(n, [pattern]) for n in named)]
        if unmatched:
            raise UserError(f"no parameter or buffer matches the local name pattern {', '.join(unmatched)}")
        self._module = module
        self.personal = [n for n in named if n in personal or matches(n, local)]
        parameters = dict(module.named_parameters())
        shared = [n for n in named if n not in self.personal and named[n].is_floating_point()]
        self.frozen = [n for n in shared if n in parameters]
        sent = [n for n in shared if n not in parameters and n.split(".")[0] not in on_server]
        self.averaged = sent if buffers == "average" else []
        self.server = {name: tensor.detach().clone() for name, tensor in named.items()}

    def load_server(self) -> None:
        self._copy(self.server)

    def load_personal(self, state: dict[str, Tensor]) -> None:
        self._copy(state)

    def read_personal(self) -> dict[str, Tensor]:
        live = self._live() if self.personal else {}
        return {name: live[name].clone() for name in self.personal}

    def read_averaged(self) -> Tensor | None:
        """The buffers that are averaged, as one flat vector; None if there are none."""
        if not self.averaged:
            return None
        live = self._live()
        return torch.cat([live[name].flatten() for name in self.averaged])

    def write_averaged(self, vector: Tensor) -> None:
        """Set the server's averaged buffers."""
        for tensor, part in self._parts(self.averaged, vector):
            tensor.copy_(part)

    def keep_as_server(self) -> None:
        """Take what the module holds now as the server's; personal layers stay the clients'."""
        live = self._live()
        for name, tensor in self.server.items():
            if name not in self.personal:
                tensor.copy_(live[name])

    def read_frozen_change(self) -> Tensor | None:
        """How far the frozen parameters have moved from the server's, as one flat vector; None if not at all."""
        live = self._live() if self.frozen else {}
        if all(torch.equal(live[name], self.server[name]) for name in self.frozen):
            return None
        return torch.cat([(live[name] - self.server[name]).flatten() for name in self.frozen])

    def move_frozen(self, change: Tensor) -> None:
        """Move the server's frozen parameters."""
        for tensor, part in self._parts(self.frozen, change):
            tensor.add_(part)

    def _parts(self, names: list[str], vector: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The server's tensors of these names, each with its part of a flat vector."""
        start = 0
        for name in names:
            tensor = self.server[name]
            yield tensor, vector[start : start + tensor.numel()].view_as(tensor)
            start += tensor.numel()

    def _live(self) -> dict[str, Tensor]:
        # by name each time: modules may assign a new tensor to a buffer
        live: dict[str, Tensor] = {n: p.detach() for n, p in self._module.named_parameters() if n in self.server}
        return live | {n: b for n, b in self._module.named_buffers() if n in self.server}

    def _copy(self, values: dict[str, Tensor]) -> None:
        if not values:
            return
        live = self._live()
        for name, value in values.items():
            live[name].copy_(value)


def first_names(module: LightningModule) -> dict[str, str]:
    """Every name of a parameter or buffer, and the first name of the same tensor: tied ones have several."""
    first: dict[int, str] = {}
    named = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


class Optimizers:
    """The optimizers' state: fresh for each client, or each client's own from round to round.

    Learning rates with a scheduler of interval "epoch" run with the rounds; with interval "step" they are the
    client's, and start afresh or go on with its optimizer state.
    """

    def __init__(self, trainer: Trainer, policy: OptimizerPolicy) -> None:
        if policy not in ("reset", "keep"):
            raise UserError(f"FederationCallback's optimizer_state is {policy!r}; choose reset or keep")
        self.policy = policy
        self.optimizers = list(trainer.optimizers)
        self.per_step = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
        self.scheduled = [o for o in self.optimizers if any(s.optimizer is o for s in self.per_step)]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if not 0 <= float(group["lr"]) < float("inf"):
                    raise UserError(f"the learning rate is {float(group['lr'])}; it must be a finite number, 0 or more")
        self._check_schedules(trainer)
        self._groups = [self._settings(o) for o in self.scheduled]
        self._schedules = [copy.deepcopy(s.state_dict()) for s in self.per_step]

    def _check_schedules(self, trainer: Trainer) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency != 1:
                raise UserError(
                    f"a scheduler of interval 'step' has the frequency {config.frequency}, which counts the round's "
                    "batches, not the client's: give frequency 1 and stretch the schedule"
                )
            if config.interval != "step" and any(config.scheduler.optimizer is o for o in self.scheduled):
                raise UserError(
                    "one optimizer has a scheduler of interval 'step', which starts afresh with each client, and "
                    "one of interval 'epoch', which runs with the rounds: give it one of the two"
                )

    def begin(self, state: dict[str, Any] | None) -> None:
        """Take up a client's optimizer state; None starts afresh."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        if self.per_step:
            self._restore(self._groups, self._schedules)
        if state is not None:
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                groups = optimizer.state_dict()["param_groups"]
                # a copy: torch takes the tensors themselves, and steps would change what the client keeps
                optimizer.load_state_dict({"state": copy.deepcopy(saved), "param_groups": groups})
            if self.per_step:
                self._restore(state["groups"], state["schedules"])

    def collect(self) -> dict[str, Any] | None:
        """The client's optimizer state, if it is to be kept; ``begin`` leaves it to whoever holds it."""
        if self.policy == "reset":
            return None
        return {
            "optimizers": [o.state_dict()["state"] for o in self.optimizers],
            "groups": [self._settings(o) for o in self.scheduled],
            "schedules": [copy.deepcopy(s.state_dict()) for s in self.per_step],
        }

    def _restore(self, groups: list[list[dict[str, Any]]], schedules: list[dict[str, Any]]) -> None:
        for optimizer, settings in zip(self.scheduled, groups, strict=True):
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(copy.deepcopy(values))
        for scheduler, schedule in zip(self.per_step, schedules, strict=True):
            scheduler.load_state_dict(copy.deepcopy(schedule))

    @staticmethod
    def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [{k: copy.deepcopy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
