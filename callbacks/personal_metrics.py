"""Every client's personal model in validation and test."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.datamodules.rounds import ValidationLoader
from lit_epgan.engine import Federation, FlatParameters
from lit_epgan.engine.collectives import gather_objects, rank, ranks
from lit_epgan.federated.drift.personal import PersonalModels, buffers_of
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError

State = Mapping[str, Tensor]


class PersonalMetrics(Callback):
    """Evaluates each client's held-out data with the client's personal model, as Ditto and APFL train it.

    What the module logs is then of personal models, and so is all that ``ClientMetrics`` makes of it. A client that
    has not trained yet has the server's model. Without this callback the server's model is evaluated everywhere.
    ``validate`` and ``test`` take the models from the checkpoint that they are given.

    Raises:
        UserError: in an evaluation, where the algorithm has no personal models, the run is private, or no checkpoint
            that holds the models is given.
    """

    def __init__(self) -> None:
        self._state: Callable[[str], State] | None = None  # of a client, by its name
        self._server: dict[str, Tensor] = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._state = None
        if trainer.sanity_checking:
            return
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))  # type: ignore[attr-defined]
        self._algorithm = _personal_models(callback)
        if trainer.state.fn == "fit":
            server = callback.server
            self._flat, self._parameters = server.flat, server.parameters
            self._state = _state_in_fit(callback.federation)
        else:
            self._state = _state_in_checkpoint(trainer, callback.state_key)
            with torch.inference_mode(False):  # the parameters are ordinary ones afterwards
                self._flat = FlatParameters.of(pl_module, callback.local)
                self._parameters = self._flat.vector.clone()
                self._flat.restore()
        loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
        if not isinstance(loader, ValidationLoader):
            rank_zero_warn(
                "PersonalMetrics: the held-out data are nobody's, so the server's model is evaluated: give val_dataset "
                "and test_dataset by client"
            )

    @torch.no_grad()
    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Hold the model of the client whose batch this is."""
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if self._state is None or not datamodule.validation_marks:
            return
        state = self._state(datamodule.client_names[datamodule.validation_marks[0].client])
        own = self.model_of(state)
        live = _tensors(pl_module)
        self._server = {name: live[name].clone() for name in own}
        _put(pl_module, own)

    @torch.no_grad()
    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        _put(pl_module, self._server)
        self._server = {}

    def model_of(self, state: State) -> dict[str, Tensor]:
        """A client's parameters, and those buffers that are not the server's, by name; ``state``: the client's."""
        return self._flat.as_dict(self._algorithm.personal(state, self._parameters)) | buffers_of(state)

    on_test_start = on_validation_start
    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    @torch.no_grad()
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        _put(pl_module, self._server)
        self._server = {}


def _personal_models(callback: FederationCallback) -> PersonalModels:
    algorithm, mechanism = callback.algorithm, callback.mechanism
    if not isinstance(algorithm, PersonalModels):
        raise UserError(
            f"PersonalMetrics: {type(algorithm).__name__} trains no personal models: leave the callback out, or take "
            "Ditto or APFL"
        )
    if mechanism is not None and mechanism.private:
        raise UserError("PersonalMetrics tells of single clients' models, which a private run does not: leave it out")
    return algorithm


def _state_in_fit(federation: Federation) -> Callable[[str], State]:
    def of(client: str) -> State:
        return federation.private.take_up(client).algorithm

    if ranks() == 1:
        return of
    own = {name: of(name) for name in federation.names[rank() :: ranks()]}
    known = {name: state for states in gather_objects(own) for name, state in states.items()}
    device = federation.server.parameters.device
    return lambda client: {name: tensor.to(device) for name, tensor in known[client].items()}


def _state_in_checkpoint(trainer: Trainer, key: str) -> Callable[[str], State]:
    if not trainer.ckpt_path:
        raise UserError(
            "personal models stand in a run's checkpoint: give it, as ckpt_path='runs/mine/checkpoints/last.ckpt'"
        )
    found = tensor_file.load(trainer.ckpt_path).get("callbacks", {}).get(key)
    if not found or found.get("private"):
        raise UserError(
            f"the checkpoint {trainer.ckpt_path} holds no personal models: name one that a federated fit has written "
            "with private_states: memory"
        )
    clients: dict[str, dict[str, State]] = found["clients"]
    return lambda client: clients.get(client, {}).get("algorithm", {})


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _put(module: LightningModule, values: State) -> None:
    live = _tensors(module)
    for name, value in values.items():
        live[name].copy_(value)
