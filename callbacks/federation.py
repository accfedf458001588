"""The callback that federates any LightningModule: one epoch is one round."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import Aggregator, Algorithm, ClientRunner, Federation, Mechanism, Model, Sampler
from lit_epgan.engine.algorithm import check_hooks
from lit_epgan.engine.local_state import OptimizerPolicy
from lit_epgan.engine.module_state import BufferPolicy, Merge, partition
from lit_epgan.engine.rounds import cohorts_by
from lit_epgan.engine.runner import StepHook
from lit_epgan.fit.client_states import PrivateStatesPlace, check_place, private_states
from lit_epgan.fit.driver import Alone, RoundDriver, ServerTraining
from lit_epgan.fit.ends import read_policy, this_end
from lit_epgan.fit.loop import RoundLoop, RoundStart
from lit_epgan.fit.model import FederatedParts, Merging, federation_of, model_of, write_server
from lit_epgan.fit.options import (
    check_kind,
    check_module,
    check_schedules,
    check_trainer,
    client_steps,
    estimate_by,
    save_between_rounds,
    search_cheaply,
)
from lit_epgan.fit.personal import PersonalEvaluation, has_personal
from lit_epgan.fit.private_runs import MechanismInFit, public
from lit_epgan.fit.state import FederationState
from lit_epgan.fit.view import FederationView
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import no_autocast


class FederationCallback(FederationView):
    """Federates the module that the Trainer trains, unmodified.

    Needs a ``FederatedDataModule``. Between rounds (validation, logging, checkpoints) the module holds the server's
    parameters; within a round, the client's that trains. Gradient clipping comes after the algorithm's
    own gradient.

    Args:
        algorithm: the federated algorithm; FedAvg by default.
        optimizer_state: ``reset`` starts the optimizers afresh for each client and round, ``keep`` hands every client
            its own from its last round: state, settings and schedules. What is changed between rounds (a scheduler of
            interval "epoch") runs with the rounds.
        buffers: how buffers are merged. ``merge`` takes each by its kind (statistics are averaged, counters added up,
            flags joined, constants left alone), ``local`` leaves them with each client, ``exclude`` goes back to the
            server's; or merges by name pattern where a kind's is not right, as in ``{"*.queue": local}``.
        local: name patterns of parameters and buffers that never leave a client (personal layers), as in ``head.*``.
        sampler: who takes part in a round; by default everyone, or the data module's ``clients_per_round``.
        mechanism: what is done to whole reports, as ``NormClipping``; nothing by default.
        aggregator: what stands for the sum of the clients' changes, as ``Median``; the sum by default.
        private_states: where clients' states from round to round are kept: in ``memory``, and in every checkpoint; or
            on ``disk``, beside the checkpoints, which refer to them (docs/scale.md).
        side_by_side: whether clients train side by side where the module admits it (docs/scale.md): quicker for many
            small ones. Hooks of a batch are not called then, neither the module's nor a callback's.
        policy: a file of what an institution lets happen to its data (docs/institutions.md); read in an institution's
            own process, where nothing is sent that it does not allow.

    Raises:
        UserError: for an argument that is no such object, an algorithm with a misspelt hook, and Trainer options that
            would break a round, with what to use instead.
    """

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        optimizer_state: OptimizerPolicy = "reset",
        buffers: BufferPolicy | dict[str, Merge] = "merge",
        local: Sequence[str] = (),
        sampler: Sampler | None = None,
        mechanism: Mechanism | None = None,
        aggregator: Aggregator | None = None,
        policy: str | None = None,
        private_states: PrivateStatesPlace = "memory",
        side_by_side: bool = False,
    ) -> None:
        check_kind("algorithm", algorithm, Algorithm, "lit_epgan.federated.FedAvg()")
        check_kind("sampler", sampler, Sampler, "lit_epgan.engine.FixedSize(10)")
        check_kind("mechanism", mechanism, Mechanism, "lit_epgan.engine.NormClipping(1.0)")
        check_kind("aggregator", aggregator, Aggregator, "lit_epgan.engine.Median()")
        self.algorithm = algorithm if algorithm is not None else Algorithm()
        check_hooks(type(self.algorithm), Algorithm)
        self.optimizer_state: OptimizerPolicy = optimizer_state
        self.buffers: BufferPolicy | Mapping[str, Merge] = buffers
        self.local = list(local)
        self.sampler, self.mechanism, self.aggregator = sampler, mechanism, aggregator
        read_policy(policy)  # one that is missing is an error in every command
        self.policy = policy
        self.private_states: PrivateStatesPlace = private_states
        self.side_by_side = side_by_side
        self._mechanism = MechanismInFit(mechanism)
        self.accept_changes = False  # the command line's: a resumed run's seed and data may differ
        self.settings: Mapping[str, str] = {}  # the command line's, which all ends of a federation must have alike
        self._state = FederationState(type(self.algorithm).__qualname__)
        self._federation: Federation | None = None
        self._model: Model | None = None
        self._evaluation: PersonalEvaluation | None = None
        self._end = Alone()
        self._driver: RoundDriver | None = None
        self._runner: ClientRunner | None = None
        self._hooks: list[RemovableHandle] = []
        self._estimate: Callable[[], None] | None = None  # gives the trainer's own estimate back
        self._checkpoint: dict[str, Any] | None = None

    # Set-up -----------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the first place among the callbacks; refuse what cannot be federated.

        Raises:
            UserError: a Trainer option, a strategy or a data module that does not fit.
        """
        search_cheaply()
        others = [c for c in trainer.callbacks if c is not self]  # type: ignore[attr-defined]
        metrics = [c for c in others if isinstance(c, ClientMetrics)] or [ClientMetrics()]
        metrics[0].federation = self
        # first, so that whoever looks at the module between rounds sees the server's
        trainer.callbacks = [self, *metrics, *(c for c in others if c not in metrics)]  # type: ignore[attr-defined]
        if stage != "fit":
            return
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(datamodule, FederatedDataModule):
            raise UserError(
                "FederationCallback needs to know the clients: pass trainer.fit(module, datamodule=...) a "
                "FederatedDataModule, such as FederatedDataModule.from_datasets(datasets, batch_size=32)"
            )
        check_trainer(trainer)
        self._loop = RoundLoop.of(trainer)
        check_module(pl_module, self._loop, trainer.world_size)
        self._mechanism.set_up(trainer, pl_module, self._loop)
        save_between_rounds(trainer)
        self._datamodule = datamodule
        own = self.sampler if self.sampler is not None else datamodule.sampler
        self._end = this_end(datamodule, Path(trainer.default_root_dir), self.policy, self.settings)
        self._sampler = cohorts_by(self.algorithm, own, self.mechanism)
        datamodule.federate(self._end.sampler(self._sampler), self.algorithm.trains, tells=not self._mechanism.by_user)
        self._estimate = estimate_by(trainer, lambda: client_steps(datamodule, trainer, self.optimizer_state))
        simulated = self._end.holds_server and self._end.holds_clients
        check_place(trainer, self.private_states, simulated, has_personal(self.local, self.buffers))

    @torch.no_grad()
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The server, with the module's parameters in one flat vector."""
        if self._checkpoint is not None:
            # Lightning loaded it before it converted the module to the precision asked for, and so rounded doubles
            trainer.strategy.load_model_state_dict(self._checkpoint, strict=pl_module.strict_loading)
            self._checkpoint = None
        dm, algorithm = self._datamodule, self.algorithm
        self._federation = federation = federation_of(
            pl_module,
            dm,
            algorithm,
            FederatedParts(self.local, self.buffers),
            Merging(self._sampler, self.aggregator, self.mechanism),
            private_states(trainer, self.private_states, dm.client_names),
        )
        data: dict[str, Any] = {"seed": dm.seed}
        if not self._mechanism.by_user:
            data["records"] = [client.records for client in dm.clients]
        self._state.attach(federation, data, self.accept_changes)
        federation.tensors.load({}, {})  # buffers that a checkpoint holds beside the module's own part
        algorithm.start(federation.server)
        self._mechanism.prepare(dm, federation.tensors, self.optimizer_state)
        merges = federation.tensors.merges
        if any(merge != "mean" for merge in merges.values()):
            rank_zero_info(f"buffers are merged as follows. {partition(merges)}")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where clients work; optimizers and schedulers have been restored by now."""
        federation, dm = self.federation, self._datamodule
        self._mechanism.begin(trainer, self.algorithm, self._sampler, dm, federation.server.state, self._end)
        self._end.check(type(self.algorithm).__name__, self.mechanism)
        check_schedules(trainer)
        self._model = model = model_of(trainer, pl_module, federation, dm, self.optimizer_state)
        model.attributes.present(self._state.presented)
        self._runner = runner = ClientRunner(
            self.algorithm, model, dm.client_names, dm.seed, self._loop.step, self.mechanism
        )
        training = ServerTraining(pl_module, federation.server, model, self._state)
        federation.server.train, federation.server.holding = training, training.holding
        self._end.begin(federation, runner, trainer)
        self._driver = RoundDriver(federation, runner, dm, self._end, self._loop, self.side_by_side)
        self._optimized = {id(each.optimizer): each for each in model.optimized}
        self._hooks = [
            each.optimizer.register_step_post_hook(StepHook(partial(runner.after_step, each)))
            for each in model.optimized
        ]
        dm.replaced, self._loop.round = runner.take, self._driver.run
        self._rewind_loggers(trainer)

    @staticmethod
    def _rewind_loggers(trainer: Trainer) -> None:
        for logger in trainer.loggers:
            if hasattr(logger, "rewind"):
                logger.rewind(trainer.current_epoch)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where a resumed run had no round left, training has not begun: its loggers go on with what they have."""
        if self._model is None:
            self._rewind_loggers(trainer)

    # A round ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A round is about to begin; the loop runs it when the module's own hooks have run."""
        assert self._driver is not None
        for logger in trainer.loggers:
            if hasattr(logger, "end_round"):
                logger.end_round()
        self._driver.between_rounds()  # what the module's own hooks did since the last round
        self._start = RoundStart(trainer)
        self._optimizers_before = self._state.server_optimizers
        self._driver.expect(trainer.current_epoch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The server's model is validated."""
        self._know_personal(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the clients' personal layers at hand."""
        self._know_personal(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the round has cost."""
        if self._driver is not None:
            with public(pl_module) if self.mechanism is not None else nullcontext():
                pl_module.log_dict(self._driver.budget)
            pl_module.log_dict(self._driver.logged())
        if self._end.ended:
            trainer.should_stop = True

    # Lightning calls what is callable: a step does without hooks that would do nothing
    on_train_batch_start = on_train_batch_end = on_before_zero_grad = on_after_backward = None  # type: ignore[assignment]

    # A local step -----------------------------------------------------------------------------------------------------

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Add the algorithm's term to the loss."""
        if self._runner is None:
            return
        self._end.weigh(loss)
        if not self._runner.adds_loss:
            return
        with no_autocast(loss.device):
            extra = self._runner.extra_loss()
        if extra is None:
            return
        extra = extra / trainer.accumulate_grad_batches
        if hasattr(loss.grad_fn, "_saved_result"):  # a square root, say, needs its value for its own gradient
            extra.backward(retain_graph=True)
        else:
            loss.add_(extra)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Let the algorithm adjust the gradients of the optimizer's parameters."""
        if self._runner is not None:
            self._runner.before_step(self._optimized[id(optimizer)])

    # The end, and checkpoints -----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module with the server's model."""
        self._leave()
        self._mechanism.end()
        self._end.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module with the server's model of the last finished round."""
        trainer.strategy.on_exception(exception)  # tells the other ranks, before another callback waits for them
        self._leave()
        with suppress(UserError):  # the exception is what is told
            self._mechanism.end()
        if self._federation is not None:
            self._federation.server.flat.restore()

    @torch.no_grad()
    def _leave(self) -> None:
        """Leave the module as an ordinary one that holds the server's parameters."""
        if self._driver is not None and self._model is not None:
            if not self._driver.finished:
                self._state.server_optimizers = self._optimizers_before
            self._driver.abandon()
            self._driver.between_rounds()
            self._model.load_server(self.federation.server.parameters)
            self._datamodule.replaced = lambda batch: batch
        if self._federation is not None:
            self.algorithm.leave(self._federation.server.module)
        for hook in self._hooks:
            hook.remove()
        self._runner, self._hooks = None, []

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the parameters ordinary storage again."""
        self._evaluation = None
        if self._estimate is not None:
            self._estimate()
            self._estimate = None
        if self._federation is not None:
            self._federation.server.flat.restore()
            self._federation = self._model = self._driver = None
            pl_module.__dict__.pop("log", None)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the federation."""
        if self._driver is not None and self._model is not None:
            self._driver.between_rounds()
            self._state.presented = self._model.attributes.presented
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a checkpoint's state until the fit begins.

        Raises:
            UserError: it is of another algorithm.
        """
        self._state.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint of a fit: its doubles are loaded once more when the module has its precision."""
        self._checkpoint = checkpoint if trainer.state.fn == "fit" else None
        if self._checkpoint is not None:
            self._end.go_back(checkpoint, Path(str(trainer.ckpt_path)))

    @torch.no_grad()
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Whenever it is saved, a checkpoint is the state between two rounds, with the server's parameters.

        Raises:
            UserError: the server's model is not finite, or overflows: nothing is to be resumed from it.
        """
        if self._driver is None:
            return
        write_server(checkpoint["state_dict"], pl_module, self.federation, *self._driver.between())
        self._start.rewrite(checkpoint, self._driver.finished)
