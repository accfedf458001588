"""What a checkpoint holds of a federation beside the module, always as it stands between two rounds."""

import copy
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from lit_epgan.carriers.protocol import endpoint
from lit_epgan.engine import Federation
from lit_epgan.engine.collectives import gather_objects, rank, ranks
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few


class FederationState:
    """The algorithm's server state, the server's own optimizers' state and every client's private state.

    Args:
        name: the algorithm's, which a checkpoint must agree with.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.server_optimizers: dict[str, Any] | None = None  # None: they start afresh
        self.presented: dict[str, Any] = {}  # what all clients' training gathered in the module's attributes
        self._federation: Federation | None = None
        self._data: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None

    def attach(self, federation: Federation, data: dict[str, Any], accept_changes: bool = False) -> None:
        """Meet the federation of this fit; a loaded checkpoint's state goes into it.

        Args:
            federation: this fit's.
            data: what a checkpoint must agree with beside the clients' names: the data module's ``seed``, and, where
                they may be told, ``records``, each client's number of them.
            accept_changes: whether ``data`` may differ. Where each client has data of its own elsewhere, others may be
                new behind those of the checkpoint, too: each goes on as one that has not been asked before.

        Raises:
            UserError: the checkpoint is of other clients or data.
        """
        self._data = data
        self._federation, self.server_optimizers, self.presented = federation, None, {}
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        before, where = loaded["client_names"], endpoint()
        apart = where is not None and bool(where.terms.names)
        if before != (federation.names[: len(before)] if apart and accept_changes else federation.names):
            joins = "; clients that are new behind the others are taken in by --accept_changes true" if apart else ""
            raise UserError(
                f"the checkpoint's federation has the clients {few(before)}, this one {few(federation.names)}: resume "
                f"with the data settings that the run was started with{joins}"
            )
        if not accept_changes:
            _refuse_other_data(loaded, data, federation.names)
        device = federation.server.parameters.device
        federation.server.state.update({k: v.to(device) for k, v in loaded["server"].items()})
        if federation.networks.server is not None:
            federation.networks.server.copy_(loaded["networks"])
        self.server_optimizers, self.presented = loaded["server_optimizers"], loaded["attributes"]
        federation.tensors.versions = dict(loaded["versions"])
        federation.tensors.keep_merges(loaded["merges"])
        federation.tensors.server.update({name: value.to(device) for name, value in loaded["buffers"].items()})
        federation.private.load(loaded["clients"], loaded.get("private", {}), device)

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers, for evaluating each client's own model."""
        assert self._federation is not None
        self._federation.private.share_personal()

    def personal_of(self, module: LightningModule) -> dict[str, dict[str, Tensor]] | None:
        """Every client's personal layers after a fit of ``module``; None if that was not the last fit."""
        if self._federation is None or self._federation.server.module is not module:
            return None
        self.exchange_personal()
        return {name: state.personal for name, state in self._federation.private.clients.items()}

    @property
    def server(self) -> dict[str, Tensor]:
        """The server's own tensors, by name; none before the first fit."""
        return {} if self._federation is None else self._federation.server.state

    def state_dict(self) -> dict[str, Any]:
        """The federation's state; on several ranks a collective call, each rank contributing its own clients."""
        federation = self._federation
        if federation is None:
            return {}
        saved, private = federation.private.saved()
        position = {name: k for k, name in enumerate(federation.names)}
        own = {name: state for name, state in saved.items() if position[name] % ranks() == rank()}
        clients = {n: s for rank_states in gather_objects(own) for n, s in rank_states.items()}
        networks, tensors = federation.networks.server, federation.tensors
        return {
            "algorithm": self.name,
            "client_names": list(federation.names),
            **self._data,
            "server": {k: v.clone() for k, v in federation.server.state.items()},
            "networks": None if networks is None else networks.clone(),
            "server_optimizers": copy.deepcopy(self.server_optimizers),
            "versions": dict(tensors.versions),
            "merges": dict(tensors.merges),
            "attributes": self.presented,
            "buffers": {name: tensors.server[name].clone() for name in self._apart()},
            "clients": {name: clients[name] for name in federation.names if name in clients},
            "private": private,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the federation exists.

        Raises:
            UserError: it is of another algorithm.
        """
        if not state:
            return
        if state["algorithm"] != self.name:
            raise UserError(
                f"the checkpoint is of a federation under {state['algorithm']}, and this configuration's algorithm is "
                f"{self.name}: resume with the configuration that the run was started with"
            )
        self._loaded = state

    def _apart(self) -> set[str]:
        """Names of the server's tensors that the module's own part of a checkpoint does not hold."""
        assert self._federation is not None
        federation = self._federation
        return federation.tensors.as_at_start(dict(federation.server.module.state_dict()))


def _refuse_other_data(before: dict[str, Any], now: dict[str, Any], names: list[str]) -> None:
    """Raise a UserError that names what differs; a checkpoint from before these entries has nothing to differ."""
    if before.get("seed", now["seed"]) != now["seed"]:
        raise UserError(
            f"the checkpoint's run has the seed {before['seed']}, this one's data module {now['seed']}: "
            "resume with the seed that the run was started with"
        )
    if "records" not in before or "records" not in now:
        return
    for name, old, new in zip(names, before["records"], now["records"], strict=True):
        if old != new:
            raise UserError(
                f"the checkpoint's client {name} has {old} records, this run's {new}: resume with the data and the "
                "partition that the run was started with"
            )
