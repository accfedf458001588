"""What a checkpoint holds of a federation, always as it stands between two rounds."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor

from lit_epgan.callbacks.algorithm_networks import AlgorithmNetworks
from lit_epgan.errors import UserError
from lit_epgan.federated import FederatedAlgorithm, Server


@dataclass
class Private:
    """What a client keeps from round to round: the algorithm's tensors, its personal layers, its optimizers' state."""

    algorithm: dict[str, Tensor] = field(default_factory=dict)
    personal: dict[str, Tensor] = field(default_factory=dict)
    optimizers: dict[str, Any] | None = None


class FederationState:
    """The algorithm's server state, the server's own optimizers' state and every client's private state.

    What clients learn in a round is proposed, and becomes theirs when the round is finished: an update that is
    dropped, or a round that is cut off, leaves no trace.
    """

    def __init__(self, algorithm: FederatedAlgorithm) -> None:
        self.name = type(algorithm).__qualname__
        self._clients: dict[str, Private] = {}
        self._proposed: dict[str, Private] = {}
        self._loaded: dict[str, Any] | None = None
        self._server: Server | None = None
        self.server_optimizers: dict[str, Any] | None = None  # None: they start afresh

    def attach(self, server: Server, networks: AlgorithmNetworks, client_names: list[str]) -> None:
        """Meet the federation of this fit; a loaded checkpoint's state goes into it."""
        self._server, self._networks, self._names = server, networks, client_names
        self._clients, self._proposed = {}, {}
        self.server_optimizers = None
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        if loaded["client_names"] != client_names:
            raise UserError(
                f"the checkpoint's federation has the clients {_short(loaded['client_names'])}, this one "
                f"{_short(client_names)}: resume with the data settings that the run was started with"
            )
        device = server.parameters.device
        server.state.update({k: v.to(device) for k, v in loaded["server"].items()})
        if networks.server is not None:
            networks.server.copy_(loaded["networks"])
        self.server_optimizers = loaded["server_optimizers"]
        for name, state in loaded["clients"].items():
            algorithm = {k: v.to(device) for k, v in state["algorithm"].items()}
            personal = {k: v.to(device) for k, v in state["personal"].items()}
            self._clients[name] = Private(algorithm, personal, state["optimizers"])

    def take_up(self, client: str) -> Private:
        """A client's private state, as a copy that may be changed."""
        kept = self._clients.get(client, Private())
        return Private({k: v.clone() for k, v in kept.algorithm.items()}, kept.personal, kept.optimizers)

    def personal(self, client: str) -> dict[str, Tensor]:
        return self._clients.get(client, Private()).personal

    def propose(self, client: str, state: Private) -> None:
        self._proposed[client] = state

    def forget(self, client: str) -> None:
        self._proposed.pop(client, None)

    def commit(self) -> None:
        """The round is finished."""
        kept = {n: s for n, s in self._proposed.items() if s.algorithm or s.personal or s.optimizers is not None}
        self._clients.update(kept)
        self._proposed = {}

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers, for evaluating each client's own model."""
        for rank_states in _gather({n: s.personal for n, s in self._clients.items()}):
            for name, personal in rank_states.items():
                self._clients.setdefault(name, Private()).personal = personal

    def state_dict(self) -> dict[str, Any]:
        """The federation's state; on several ranks a collective call, each rank contributing its own clients."""
        if self._server is None:
            return {}
        own = {n: vars(s).copy() for n, s in self._clients.items() if self._is_own(n)}
        clients = {n: s for rank_states in _gather(own) for n, s in rank_states.items()}
        return {
            "algorithm": self.name,
            "client_names": list(self._names),
            "server": {k: v.clone() for k, v in self._server.state.items()},
            "networks": None if self._networks.server is None else self._networks.server.clone(),
            "server_optimizers": copy.deepcopy(self.server_optimizers),
            "clients": {name: clients[name] for name in self._names if name in clients},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not state:
            return
        if state["algorithm"] != self.name:
            raise UserError(
                f"the checkpoint is of a federation under {state['algorithm']}, and this configuration's algorithm is "
                f"{self.name}: resume with the configuration that the run was started with"
            )
        self._loaded = state

    def _is_own(self, name: str) -> bool:
        return self._names.index(name) % _ranks() == _rank()


class RoundStart:
    """The Trainer's own state as it stands between two rounds, which is what every checkpoint is to hold.

    A checkpoint written in the middle of a round takes up the round from its start; one written after the merge goes
    on with the next round.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._round = trainer.current_epoch
        self._settings = self._capture()

    def _capture(self) -> dict[str, Any]:
        trainer = self._trainer
        return copy.deepcopy(
            {
                "global_step": trainer.global_step,
                "loops": trainer._checkpoint_connector._get_loops_state_dict(),
                "lr_schedulers": [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
                "optimizer_states": [
                    {"state": {}, "param_groups": o.state_dict()["param_groups"]} for o in trainer.optimizers
                ],
            }
        )

    def rewrite(self, checkpoint: dict[str, Any], finished: bool) -> None:
        """Make ``checkpoint`` one of the nearest state between two rounds; ``finished``: this round has been merged."""
        rounds = self._round + finished
        settings = self._capture() if finished else copy.deepcopy(self._settings)
        _between_rounds(settings["loops"]["fit_loop"], rounds)
        checkpoint["epoch"] = rounds
        checkpoint["global_step"] = settings["global_step"]
        checkpoint["loops"] = settings["loops"]
        for name in ("lr_schedulers", "optimizer_states"):
            if name in checkpoint:
                checkpoint[name] = settings[name]


def _between_rounds(fit_loop: dict[str, Any], rounds: int) -> None:
    """Set the loop's counters as after ``rounds`` whole rounds; Lightning then begins the next one from its start."""
    for counts in fit_loop["epoch_progress"].values():
        counts.update(dict.fromkeys(("ready", "started", "processed", "completed"), rounds))
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["is_last_batch"] = False
    batches["total"].update(dict.fromkeys(("ready", "started", "processed"), batches["total"]["completed"]))
    batches["current"].update(dict.fromkeys(("ready", "started", "processed", "completed"), 0))


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _gather(own: dict[str, Any]) -> list[dict[str, Any]]:
    if _ranks() == 1:
        return [own]
    gathered: list[dict[str, Any]] = [{}] * _ranks()
    dist.all_gather_object(gathered, own)
    return gathered


def _short(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
