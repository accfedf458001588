"""What a federation shows to other callbacks: where it stands, its server, and each client's own model."""

from collections.abc import Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.engine import Algorithm, Federation, Model, Server
from lit_epgan.fit.driver import RoundDriver
from lit_epgan.fit.loop import RoundProgress
from lit_epgan.fit.personal import (
    PersonalEvaluation,
    Policy,
    has_personal,
    personal_of,
    warn_of_missing,
)
from lit_epgan.fit.state import FederationState
from lit_epgan.lib import tensor_file


class FederationView(Callback):
    """The part of ``FederationCallback`` that others ask.

    Attributes:
        algorithm: the federated algorithm.
    """

    algorithm: Algorithm
    local: Sequence[str]
    buffers: Policy
    _datamodule: FederatedDataModule
    _state: FederationState
    _federation: Federation | None = None
    _model: Model | None = None
    _driver: RoundDriver | None = None
    _evaluation: PersonalEvaluation | None = None

    @property
    def federation(self) -> Federation:
        """The server's side of the federation."""
        assert self._federation is not None, "the federation exists during fit"
        return self._federation

    @property
    def server(self) -> Server:
        """The server."""
        return self.federation.server

    @property
    def progress(self) -> RoundProgress:
        """Where the federation stands."""
        if self._driver is not None:
            return self._driver.progress
        trainer = self._datamodule.trainer
        return RoundProgress(
            *((0, 0) if trainer is None else (trainer.current_epoch, trainer.max_epochs or 0)), "", 0, 1, 0, None
        )

    def kept(self, trainer: Trainer) -> dict[str, Tensor]:
        """The server's own tensors, by name: of the checkpoint that is evaluated, else of the fit, or the one before.

        Args:
            trainer: that fits or evaluates.
        """
        if trainer.state.fn != "fit" and trainer.ckpt_path:
            state = tensor_file.load(trainer.ckpt_path).get("callbacks", {}).get(self.state_key) or {}
            return dict(state.get("server", {}))
        return self._state.server

    def exchange_personal(self) -> None:
        """Let every rank know all clients' personal layers."""
        if self._model is not None and self.federation.tensors.personal:
            self._state.exchange_personal()

    def _know_personal(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Have the clients' personal layers at hand in an evaluation outside of a fit, if there are to be any."""
        if trainer.state.fn == "fit" or not has_personal(self.local, self.buffers):
            return
        personal = personal_of(trainer, self.state_key, self._state.personal_of(pl_module))
        warn_of_missing(trainer, personal)
        names = getattr(trainer.datamodule, "client_names", ())  # type: ignore[attr-defined]
        on_server = self.algorithm.on_server
        self._evaluation = PersonalEvaluation(pl_module, names, personal, self.local, self.buffers, on_server)

    @torch.no_grad()
    def load_personal(self, client: int) -> None:
        """Give the server's module a client's personal layers, to evaluate the client's own model."""
        if self._evaluation is not None:
            self._evaluation.load(client)
        federation = self._federation
        if self._model is not None and federation is not None and federation.tensors.personal:
            federation.tensors.load({}, federation.private.personal(federation.names[client]))

    @torch.no_grad()
    def load_server(self) -> None:
        """Make the module the server's again."""
        if self._evaluation is not None:
            self._evaluation.load_server()
        if self._model is not None and self.federation.tensors.personal:
            self.federation.tensors.load({}, {})

    @torch.no_grad()
    def extra_samples(self, n: int, start: int = 0) -> dict[str, Tensor]:
        """The algorithm's further sample sets, such as the union of sites: n of each, from position ``start`` on."""
        return self.algorithm.samples(self.server, n, start) if self._federation is not None else {}

    @torch.no_grad()
    def extra_labelled_samples(self, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        """The first n of those of ``extra_samples`` whose labels are known, and the labels (n,)."""
        return self.algorithm.labelled_samples(self.server, n) if self._federation is not None else {}
