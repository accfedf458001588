"""Clients' personal layers in an evaluation outside of a fit: those of the checkpoint that is evaluated."""

from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lit_epgan.datamodules.rounds import ValidationLoader
from lit_epgan.engine.module_state import BufferPolicy, Merge, ModuleState
from lit_epgan.engine.parameters import matches
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

Personal = Mapping[str, Mapping[str, Tensor]]
Policy = BufferPolicy | Mapping[str, Merge]


class PersonalEvaluation:
    """Gives a module one client's personal layers after another's, and the server's again.

    Args:
        module: holds the server's model.
        names: the clients'.
        personal: every client's layers, by the client's name and the tensor's.
        local, buffers, on_server: as the federation's.
    """

    def __init__(
        self,
        module: LightningModule,
        names: Sequence[str],
        personal: Personal,
        local: Sequence[str],
        buffers: Policy,
        on_server: Sequence[str] = (),
    ) -> None:
        federated = [n for n, p in module.named_parameters() if p.requires_grad and not matches(n, local)]
        self._names = names
        self._tensors = ModuleState(module, federated, local, buffers, on_server)
        live = self._tensors.server
        self._personal = {
            client: {n: t.to(live[n].device, live[n].dtype) if n in live else t for n, t in layers.items()}
            for client, layers in personal.items()
        }

    @torch.no_grad()
    def load(self, client: int) -> None:
        """Give the module a client's layers; one that has none keeps the server's initial ones."""
        self._tensors.load({}, self._personal.get(self._names[client], {}))

    @torch.no_grad()
    def load_server(self) -> None:
        """Make the module the server's again."""
        self._tensors.load({}, {})


def has_personal(local: Sequence[str], buffers: Policy) -> bool:
    """Whether a federation of these settings has personal layers."""
    return bool(local) or buffers == "local" or (not isinstance(buffers, str) and "local" in buffers.values())


def personal_of(trainer: Trainer, key: str, after_fit: Personal | None) -> Personal:
    """Every client's personal layers, from the checkpoint that the trainer evaluates, else from the fit just before.

    Args:
        trainer: about to evaluate.
        key: of the FederationCallback's state in a checkpoint.
        after_fit: the layers of a fit of this very module; None if there was none.

    Raises:
        UserError: there is neither, or the checkpoint holds no federation.
    """
    if trainer.ckpt_path:
        state = tensor_file.load(trainer.ckpt_path).get("callbacks", {}).get(key)
        if not state:
            raise UserError(
                f"the checkpoint {trainer.ckpt_path} holds no personal layers, as federation.local asks for: name one "
                "that a federated fit has written"
            )
        return {name: held["personal"] for name, held in state["clients"].items()}
    if after_fit is None:
        raise UserError(
            "personal layers stand in a run's checkpoint: give it, as ckpt_path='runs/mine/checkpoints/last.ckpt'"
        )
    return after_fit


def warn_of_missing(trainer: Trainer, personal: Personal) -> None:
    """Say whose layers are not there, or that a common held-out set is nobody's."""
    loader = trainer.test_dataloaders if trainer.testing else trainer.val_dataloaders
    if not isinstance(loader, ValidationLoader):
        rank_zero_warn(
            "the held-out data are nobody's, so personal layers are evaluated with their initial values: give "
            "val_dataset and test_dataset by client"
        )
        return
    names = trainer.datamodule.client_names  # type: ignore[attr-defined]
    missing = [names[client] for client in loader.loaders if not personal.get(names[client])]
    if missing:
        rank_zero_warn(f"no personal layers of {few(missing)} in the checkpoint: they are evaluated with initial ones")
