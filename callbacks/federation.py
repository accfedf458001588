"""The callback that federates any LightningModule: one epoch is one round, clients are segments of its loader."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lit_epgan.callbacks.accumulation import ClientAccumulation
from lit_epgan.callbacks.algorithm_networks import AlgorithmNetworks
from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.callbacks.local_state import BufferPolicy, ModuleTensors, OptimizerPolicy, Optimizers, first_names
from lit_epgan.callbacks.round import Round, RoundProgress, Workplace
from lit_epgan.callbacks.round_state import FederationState, RoundStart
from lit_epgan.callbacks.server_training import ServerTraining
from lit_epgan.callbacks.trainer_options import check_module, check_trainer, save_between_rounds
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FederatedAlgorithm, FlatParameters, OptimizedParameters, Server
from lit_epgan.precision import no_autocast


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
        self._state = FederationState(self.algorithm)
        self._networks = AlgorithmNetworks(self.algorithm)
        self._server: Server | None = None
        self._place: Workplace | None = None
        self._round: Round | None = None
        self._accumulation: ClientAccumulation | None = None
        self._step_hooks: list[Any] = []
        self._checkpoint: dict[str, Any] | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        metrics = [c for c in others if isinstance(c, ClientMetrics)] or [ClientMetrics()]
        metrics[0].federation = self
        # first, so that whoever looks at the module between rounds sees the server's
        trainer.callbacks = [self, *metrics, *(c for c in others if c not in metrics)]  # type: ignore[attr-defined]
        if stage != "fit":
            if self.local or self.buffers == "local":
                rank_zero_warn("personal layers and buffers are known during fit only: this evaluates the initial ones")
            return
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(datamodule, FederatedDataModule):
            raise UserError(
                "FederationCallback needs to know the clients: pass trainer.fit(module, datamodule=...) a "
                "FederatedDataModule, such as FederatedDataModule.from_datasets(datasets, batch_size=32)"
            )
        check_trainer(trainer)
        check_module(pl_module, trainer.world_size)
        save_between_rounds(trainer)
        if trainer.world_size > 1:
            # ranks have different numbers of batches and meet at the round's end only
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._datamodule = datamodule
        datamodule.clients_work, datamodule.visits = self.algorithm.clients_work, self.algorithm.visits
        self._networks.build(pl_module, datamodule.seed)

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._checkpoint is not None:
            # Lightning loaded it before it converted the module to the precision asked for, and so rounded doubles
            trainer.strategy.load_model_state_dict(self._checkpoint, strict=pl_module.strict_loading)
            self._checkpoint = None
        self._tensors = ModuleTensors(pl_module, self.local, self.buffers, self.algorithm.on_server)
        flat = FlatParameters.of(pl_module, self.local)
        self._networks.flatten(flat.vector)
        self._server = Server(
            parameters=flat.vector.clone(),
            flat=flat,
            module=pl_module,
            optimized=[
                OptimizedParameters(i, o, flat, [p for group in o.param_groups for p in group["params"] if p in flat])
                for i, o in enumerate(trainer.optimizers)
            ],
            clients=len(self._datamodule.clients),
            seed=self._datamodule.seed,
        )
        self._state.attach(self._server, self._networks, self._datamodule.client_names)
        self.algorithm.start_fit(self._server)
        if (guarantee := getattr(self.algorithm, "guarantee", None)) is not None:
            rank_zero_info(f"{type(self.algorithm).__name__}: {guarantee}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # here and not at fit start: optimizers and schedulers have been restored by now
        optimizers, dm = Optimizers(trainer, self.optimizer_state), self._datamodule
        held = (self._tensors, optimizers, self._networks, self._state)
        self._place = Workplace(self.algorithm, self.server, *held, dm.client_names, dm.records)
        self.server.train = ServerTraining(pl_module, self._place)
        self._adjusted = {id(o.optimizer): o for o in self.server.optimized}
        if self.algorithm.overrides("after_step"):
            self._step_hooks = [self._watch(o) for o in self.server.optimized]
        if pl_module.automatic_optimization:  # a schedule may begin to accumulate in a later round
            self._accumulation = ClientAccumulation(trainer, lambda: self._round)
        self._min_epochs = trainer.fit_loop.min_epochs or 0
        self._datamodule.on_train_batch = self._take_up
        for logger in trainer.loggers:
            if hasattr(logger, "rewind"):
                logger.rewind(trainer.current_epoch)

    def _watch(self, optimized: OptimizedParameters) -> Any:
        @torch.no_grad()
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._round is not None and self._round.client is not None:
                with no_autocast(self.server.parameters.device):
                    self.algorithm.after_step(self._round.client, optimized)

        return optimized.optimizer.register_step_post_hook(after_step)

    # A round ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._place is not None
        self._start = RoundStart(trainer)
        trainer.fit_loop.min_epochs = max(self._min_epochs, trainer.current_epoch + 1)  # a round is never cut short
        self._clients_in_share = len(self._datamodule.share(trainer.current_epoch)) or 1
        self._round = Round(self._place, trainer.current_epoch)

    @torch.no_grad()
    def _take_up(self, batch: Any) -> Any:
        assert self._round is not None
        return self._round.take_up(self._datamodule.marks.popleft(), batch)

    def _finish_round(self) -> None:
        # not at the last batch's end: the module's own hook there has yet to run
        if self._round is not None:
            # validation begins in inference mode, in which a server could not train
            with torch.inference_mode(False), torch.no_grad():
                self._round.finish()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_round()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish_round()
        if self._round is not None:
            pl_module.log_dict(self._round.budget)

    # A local step -----------------------------------------------------------------------------------------------------
    # a module that steps its optimizers by itself does so under autocast, which algorithms must not see

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._round is None or self._round.client is None or not self.algorithm.overrides("extra_loss"):
            return
        with no_autocast(loss.device):
            extra = self.algorithm.extra_loss(self._round.client)
        if extra is None:
            return
        extra = extra / trainer.accumulate_grad_batches
        if hasattr(loss.grad_fn, "_saved_result"):  # a square root, say, needs its value for its own gradient
            extra.backward(retain_graph=True)
        else:
            loss.add_(extra)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._round is not None and self._round.client is not None:
            with no_autocast(pl_module.device):
                self.algorithm.adjust_gradients(self._round.client, self._adjusted[id(optimizer)])
                self._networks.step()

    # The end, and checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()
        if self._server is not None:
            self._server.flat.restore()

    @torch.no_grad()
    def _leave(self) -> None:
        """Leave the module as an ordinary one that holds the server's parameters."""
        if self._round is not None:
            self._round.abandon()
        if self._place is not None:
            self._place.load_server()
            self.algorithm.end_fit(self.server)
            self._datamodule.on_train_batch = None
        if self._accumulation is not None:
            self._accumulation.remove()
            self._accumulation = None
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks = []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._server is not None:
            self._server.flat.restore()
            self._server = self._place = self._round = None
            pl_module.__dict__.pop("log", None)

    def state_dict(self) -> dict[str, Any]:
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint if trainer.state.fn == "fit" else None

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whenever it is saved, a checkpoint is the state between two rounds, with the server's parameters."""
        if self._round is None:
            return
        held = self.server.flat.as_dict(self.server.parameters)
        held |= {name: tensor.clone() for name, tensor in self._tensors.server.items()}
        state = checkpoint["state_dict"]
        state.update({n: held[first] for n, first in first_names(pl_module).items() if n in state and first in held})
        self._start.rewrite(checkpoint, self._round.finished)

    # For others -------------------------------------------------------------------------------------------------------

    @property
    def server(self) -> Server:
        assert self._server is not None, "the federation exists during fit"
        return self._server

    @property
    def progress(self) -> RoundProgress:
        """Where the federation stands."""
        client = self._round.client if self._round is not None else None
        mark = self._round.mark if self._round is not None else None
        trainer = self._datamodule.trainer
        return RoundProgress(
            self.server.round,
            (trainer.max_epochs or 0) if trainer is not None else 0,
            client.name if client is not None else "",
            mark.position if mark is not None else 0,
            self._clients_in_share,
            client.step if client is not None else 0,
            client.steps if client is not None else None,
        )

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers."""
        if self._place is not None and self._tensors.personal:
            self._state.exchange_personal()

    @torch.no_grad()
    def load_personal(self, client: int) -> None:
        """Give the server's module a client's personal layers, to evaluate the client's own model."""
        if self._place is not None and self._tensors.personal:
            self._tensors.load_server()
            self._tensors.load_personal(self._state.personal(self._place.names[client]))

    @torch.no_grad()
    def load_server(self) -> None:
        """Make the module the server's again."""
        if self._place is not None and self._tensors.personal:
            self._tensors.load_server()

    @torch.no_grad()
    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        """The algorithm's further sample sets, such as the union of sites: n of each, from position ``start`` on."""
        return self.algorithm.samples(self.server, n, start) if self._server is not None else {}
