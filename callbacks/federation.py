"""The callback that federates any LightningModule: one epoch is one round, clients are segments of its loader."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from callbacks.accumulation import ClientAccumulation
from callbacks.algorithm_networks import AlgorithmNetworks
from callbacks.local_state import BufferPolicy, ModuleTensors, OptimizerPolicy, Optimizers
from callbacks.round_state import FederationState, RoundStart
from callbacks.trainer_options import check_trainer, save_between_rounds
from datamodules.base import FederatedDataModule
from datamodules.rounds import Mark
from lit_epgan.errors import UserError
from lit_epgan.federated import Client, FedAvg, FederatedAlgorithm, FlatParameters, OptimizedParameters, Server
from lit_epgan.federated.algorithm import scalar
from lit_epgan.federated.reduction import all_reduce
from lit_epgan.federated.report import ReportSum, Weighted, is_finite
from lit_epgan.randomness import derive_seed, seed_streams


class RoundProgress(NamedTuple):
    """Where the federation stands, for a progress bar; all counts from 0 but ``step``."""

    round: int
    rounds: int
    client: str
    client_position: int
    clients: int
    step: int
    steps: int | None


class Waiting(NamedTuple):
    """A client that is done and whose report waits for a sum over all clients."""

    client: Client
    parameters: Tensor
    buffers: Tensor | None


class FederationCallback(Callback):
    """Federates the module that the Trainer trains, unmodified.

    Needs a ``FederatedDataModule``. Between rounds (validation, logging, checkpoints) the module holds the server's
    parameters; within a round, the client's whose batch it is. Gradient clipping comes after
    ``algorithm.adjust_gradients``.

    Args:
        algorithm: the federated algorithm; FedAvg by default.
        optimizer_state: ``reset`` starts the optimizers afresh for each client and round, ``keep`` hands every client
            its own state from its last round. A scheduler of interval "step" belongs to the client in the same way; one
            of interval "epoch" runs with the rounds.
        buffers: floating-point buffers (BatchNorm's statistics) are averaged (``average``), kept by each client
            (``local``), or left out and reset to the server's (``exclude``). Integer buffers are never averaged.
        local: name patterns of parameters and buffers that never leave a client (personal layers), as in ``head.*``.

    Raises:
        UserError: for Trainer options that would break a round, with what to use instead.
    """

    def __init__(
        self,
        algorithm: FederatedAlgorithm | None = None,
        optimizer_state: OptimizerPolicy = "reset",
        buffers: BufferPolicy = "average",
        local: Sequence[str] = (),
    ) -> None:
        self.algorithm = algorithm if algorithm is not None else FedAvg()
        self.optimizer_state: OptimizerPolicy = optimizer_state
        self.buffers: BufferPolicy = buffers
        self.local = list(local)
        self.state = FederationState(self.algorithm)
        self._networks = AlgorithmNetworks(self.algorithm)
        self._client: Client | None = None
        self._mark: Mark | None = None
        self._server: Server | None = None
        self._accumulation: ClientAccumulation | None = None
        self._start: RoundStart | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [self, *others]  # type: ignore[attr-defined]  # whoever looks at the module sees the server
        if stage != "fit":
            return
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(datamodule, FederatedDataModule):
            raise UserError(
                "FederationCallback needs to know the clients: pass trainer.fit(module, datamodule=...) a "
                "FederatedDataModule, such as FederatedDataModule.from_datasets(datasets, batch_size=32)"
            )
        check_trainer(trainer)
        save_between_rounds(trainer)
        if trainer.world_size > 1:
            # ranks have different numbers of batches and meet at the round's end only
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._datamodule = datamodule
        self._networks.build(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._tensors = ModuleTensors(pl_module, self.local, self.buffers)
        self._flat = FlatParameters.of(pl_module, self.local)
        self._networks.flatten(pl_module.device)
        self._server = Server(
            parameters=self._flat.vector.clone(),
            flat=self._flat,
            module=pl_module,
            optimized=self._optimized(trainer),
            clients=len(self._datamodule.clients),
            seed=self._datamodule.seed,
        )
        self.state.attach(self._server, self._networks, self._datamodule.client_names)
        self.algorithm.start_fit(self._server)
        self._start = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # here and not at fit start: optimizers and schedules have been restored by now
        self._optimizers = Optimizers(trainer, self.optimizer_state)
        self._hooks = [self._watch(o) for o in self.server.optimized] if self._overrides("after_step") else []
        self._adjusts = {id(o.optimizer): o for o in self.server.optimized}
        if trainer.accumulate_grad_batches > 1:
            self._accumulation = ClientAccumulation(trainer, self._current)
        self._min_epochs = trainer.fit_loop.min_epochs
        self._datamodule.on_train_batch = self._take_up
        for logger in trainer.loggers:
            if hasattr(logger, "rewind"):
                logger.rewind(trainer.current_epoch)

    def _optimized(self, trainer: Trainer) -> list[OptimizedParameters]:
        chosen = []
        for index, optimizer in enumerate(trainer.optimizers):
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p in self._flat]
            chosen.append(OptimizedParameters(index, optimizer, self._flat, parameters))
        return chosen

    def _watch(self, optimized: OptimizedParameters) -> Any:
        @torch.no_grad()
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._client is not None:
                self.algorithm.after_step(self._client, optimized)

        return optimized.optimizer.register_step_post_hook(after_step)

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self.algorithm), hook) is not getattr(FederatedAlgorithm, hook)

    # A round ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start = RoundStart(trainer)
        trainer.fit_loop.min_epochs = max(
            self._min_epochs or 0, trainer.current_epoch + 1
        )  # a round is never cut short
        self.server.round = trainer.current_epoch
        self._sum, self._first_sum = ReportSum(), ReportSum()
        self._waiting: list[Waiting] = []
        self._dropped: list[str] = []
        self._share = self._datamodule.share(self.server.round) or [-1]
        seed_streams(derive_seed(self.server.seed, self.server.round, "server"))
        self.algorithm.start_round(self.server)

    @torch.no_grad()
    def _take_up(self, batch: Any) -> Any:
        """A training batch is about to be used: switch to its client if it is another's."""
        mark = self._datamodule.marks.popleft()
        if mark.first:
            self._close_client()
            self._open_client(mark)
        assert self._client is not None
        self._mark = mark
        self._client.weight = mark.weight
        batch = self.algorithm.client_batch(self._client, batch)
        self._client.step += 1
        return batch

    def _open_client(self, mark: Mark) -> None:
        name = self._datamodule.client_names[mark.client]
        seed_streams(derive_seed(self.server.seed, self.server.round, mark.client, "steps"))
        private = self.state.take_up(name)
        self._client = Client(mark.client, name, mark.steps, private.algorithm, self.server, self._restart, mark.weight)
        self._private = private
        self._restart(private.optimizers)
        self._tensors.load_personal(private.personal)
        self.algorithm.start_client(self._client)

    def _restart(self, optimizers: dict[str, Any] | None = None) -> None:
        self._flat.load(self.server.parameters)
        self._tensors.load_server()
        self._optimizers.begin(optimizers)
        self._networks.load_server()

    def _close_client(self) -> None:
        """The client at work is done; its report is summed, or waits if the algorithm must know a sum first."""
        client, self._client, self._mark = self._client, None, None
        if client is None or client.weight == 0:
            return
        self.algorithm.end_client(client)
        self._private.optimizers = self._optimizers.collect()
        self._private.personal = self._tensors.read_personal()
        self.state.propose(client.name, self._private)
        first = self.algorithm.pre_report(client)
        if first is None:
            self._send(client, self._tensors.read_averaged())
        elif is_finite(first) and is_finite({"parameters": client.parameters}):
            self._first_sum.add(first)
            self._waiting.append(Waiting(client, client.parameters.clone(), self._tensors.read_averaged()))
        else:
            self._drop(client.name)

    def _send(self, client: Client, buffers: Tensor | None) -> None:
        report = dict(self.algorithm.client_report(client))
        weight = scalar(client.weight)
        report |= {"federation/clients": scalar(1), "federation/weight": weight, **self._networks.report(client)}
        if buffers is not None:
            report["federation/buffers"] = Weighted(buffers, client.weight)
        if is_finite(report):
            self._sum.add(report)
        else:
            self._drop(client.name)

    def _drop(self, name: str) -> None:
        self.state.forget(name)
        self._dropped.append(name)
        rank_zero_warn(f"round {self.server.round}: the update of client {name!r} is not finite and is left out")

    @torch.no_grad()
    def _finish_round(self) -> None:
        """All clients are done: sum over ranks, update the server, load its parameters into the module."""
        if self._start is None or self._start.finished:
            return
        self._close_client()
        if self._overrides("pre_report"):
            self.server.state.update(all_reduce(self._first_sum.total()))
            for client, parameters, buffers in self._waiting:
                self._flat.load(parameters)
                self._send(client, buffers)
        total = all_reduce(self._sum.total())
        if not total:
            raise UserError(
                f"round {self.server.round}: no client's update is finite, so there is nothing to merge "
                f"(left out: {', '.join(self._dropped)}); lower the learning rate. "
                "The last checkpoint holds the round before"
            )
        weight = total.pop("federation/weight")
        del total["federation/clients"]
        if "federation/buffers" in total:
            self._tensors.write_averaged(total.pop("federation/buffers") / weight)
        self._networks.update(total, weight)
        seed_streams(derive_seed(self.server.seed, self.server.round, "server", "update"))
        self.algorithm.server_update(self.server, total)
        self.state.commit()
        self._load_server()
        self._start.finished = True

    def _load_server(self) -> None:
        self._flat.load(self.server.parameters)
        self._tensors.load_server()
        self._networks.load_server()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.training or trainer.state.fn == "fit":
            self._finish_round()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_round()

    # A local step -----------------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._client is None or not self._overrides("extra_loss"):
            return
        extra = self.algorithm.extra_loss(self._client)
        if extra is not None:
            loss.add_(extra / trainer.accumulate_grad_batches)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._client is not None:
            self.algorithm.adjust_gradients(self._client, self._adjusts[id(optimizer)])
            self._networks.step()

    # The end, and checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._server is not None:
            self._leave(trainer)

    @torch.no_grad()
    def _leave(self, trainer: Trainer) -> None:
        """Leave the module as an ordinary one that holds the server's parameters."""
        if self._client is not None:
            self._client = None
            rank_zero_warn(f"round {self.server.round} was not finished and is dropped")
        self._load_server()
        self._datamodule.on_train_batch = None
        if self._accumulation is not None:
            self._accumulation.remove()
            self._accumulation = None
        for hook in getattr(self, "_hooks", []):
            hook.remove()
        self._hooks = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._server is not None:
            self._flat.restore()
            self._server = None

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state.load_state_dict(state_dict)

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whenever it is saved, a checkpoint is the state at the end of a round, with the server's parameters."""
        if self._server is None or self._start is None:
            return
        checkpoint["state_dict"].update(self._flat.as_dict(self.server.parameters))
        checkpoint["state_dict"].update({n: t.clone() for n, t in self._tensors.server.items()})
        self._start.rewrite(checkpoint)

    # For others -------------------------------------------------------------------------------------------------------

    @property
    def server(self) -> Server:
        assert self._server is not None, "the federation exists during fit"
        return self._server

    @property
    def progress(self) -> RoundProgress:
        """Where the federation stands."""
        client, mark = self._client, self._mark
        rounds = self._datamodule.trainer.max_epochs if self._datamodule.trainer is not None else None
        return RoundProgress(
            self.server.round,
            rounds or 0,
            client.name if client is not None else "",
            mark.position if mark is not None else 0,
            len(self._share),
            client.step if client is not None else 0,
            client.steps if client is not None else None,
        )

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers."""
        if self._server is not None and self._tensors.personal:
            self.state.exchange_personal()

    @torch.no_grad()
    def load_personal(self, client: int) -> None:
        """Give the server's module a client's personal layers, to evaluate the client's own model."""
        if self._server is not None and self._tensors.personal:
            self._tensors.load_server()
            self._tensors.load_personal(self.state.personal(self._datamodule.client_names[client]))

    @torch.no_grad()
    def load_server(self) -> None:
        """Make the module the server's again."""
        if self._server is not None and self._tensors.personal:
            self._load_server()

    @torch.no_grad()
    def extra_samples(self, n: int) -> dict[str, Tensor]:
        """The algorithm's further sample sets, such as the union of sites."""
        return self.algorithm.samples(self.server, n) if self._server is not None else {}

    def _current(self) -> tuple[Client, Mark]:
        assert self._client is not None
        assert self._mark is not None
        return self._client, self._mark
