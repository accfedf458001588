"""What a module's own hooks do between rounds counts, as it would in plain Lightning."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from lit_epgan.callbacks import RoundCheckpoint
from tests.federations import client_sets, federation, fit
from tests.modules import Regression
from tests.test_federation import plain_batches

HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")


class Target(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.target = nn.Linear(3, 1).requires_grad_(False)
        self.register_buffer("temperature", torch.ones(()))

    def _change(self) -> None:
        with torch.no_grad():
            self.temperature *= 0.5
            self.target.weight.copy_(self.body[0].weight[:1])
            self.body[0].bias.add_(1.0)


def with_hook(hook: str) -> Target:
    torch.manual_seed(0)
    module = Target()
    setattr(module, hook, lambda: module._change())
    return module


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_anneals_changes_the_servers_model(hook):
    """One client: then the federation is plain training, and the temperature is halved as often as the hook runs."""
    rounds = 3
    module = with_hook(hook)
    held_out = client_sets((3,))[0]
    fit(module, federation(sizes=(20,), val_dataset=held_out), rounds=rounds)
    calls = 1 if hook in ("on_fit_start", "on_train_start") else rounds
    assert float(module.temperature) == 0.5**calls


@pytest.mark.parametrize("hook", HOOKS)
def test_one_client_under_a_hook_is_plain_lightning(hook):
    module, plain = with_hook(hook).double(), with_hook(hook).double()
    module.momentum = plain.momentum = 0.0
    held_out = client_sets((3,))[0]
    fit(module, federation(sizes=(20,), val_dataset=held_out), rounds=3)

    class Rounds:
        def __iter__(self) -> Any:
            return iter(plain_batches(client_sets((20,))[0], None, plain.trainer.current_epoch, 0))

    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    trainer = Trainer(max_epochs=3, precision="64-true", **options)
    trainer.fit(plain, Rounds(), DataLoader(held_out, batch_size=8))
    for (name, ours), theirs in zip(module.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_a_resumed_run_anneals_no_more_than_one_that_was_never_stopped(hook, tmp_path):
    whole = with_hook(hook)
    fit(whole, federation(), rounds=4, folder=tmp_path / "whole")
    saved = RoundCheckpoint(dirpath=str(tmp_path / "checkpoints"))
    fit(with_hook(hook), federation(), rounds=2, callbacks=[saved], enable_checkpointing=True)
    resumed = with_hook(hook)
    fit(resumed, federation(), rounds=4, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
