"""Every option that a federation cannot honour is refused with a sentence that says what to use instead."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy

from lit_epgan.callbacks import FederatedStrategy, FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation, FedAvg, FedProx
from lit_epgan.fit.options import check_trainer
from lit_epgan.lib.errors import UserError
from tests.federations import client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.refusals import assert_refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "fast_dev_run": ({"fast_dev_run": True}, r"fast_dev_run=.*max_epochs=1 and the data module's local_steps=1"),
    "some batches": ({"limit_train_batches": 3}, r"limit_train_batches=.*later clients.*clients_per_round"),
    "one batch": ({"limit_train_batches": 1}, r"limit_train_batches=.*later clients.*local_steps"),
    "a share of batches": ({"limit_train_batches": 0.5}, r"limit_train_batches="),
    "overfit_batches": ({"overfit_batches": 1}, r"overfit_batches=.*smaller data sets"),
    "max_steps": ({"max_steps": 5}, r"max_steps=.*middle of a round; count rounds with max_epochs"),
    "a share of an epoch": ({"val_check_interval": 3}, r"val_check_interval=.*check_val_every_n_epoch"),
    "after every batch": ({"val_check_interval": 1}, r"val_check_interval=.*within a round the module is some client"),
    "across rounds": ({"val_check_interval": 5, "check_val_every_n_epoch": None}, r"val_check_interval="),
    "reloading": ({"reload_dataloaders_every_n_epochs": 1}, r"reload_dataloaders_every_n_epochs=.*leave it at 0"),
}


@pytest.mark.parametrize(("options", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_would_break_a_round(options, sentence):
    assert_refused(r"Trainer\(" + sentence, fit, Regression(), federation(), rounds=1, **options)


TOGETHER: dict[str, Any] = {"limit_train_batches": 1.0, "val_check_interval": 1.0, "check_val_every_n_epoch": 2}
TOGETHER |= {"limit_val_batches": 1, "num_sanity_val_steps": 2, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
TOGETHER |= {"log_every_n_steps": 1, "min_epochs": 1, "detect_anomaly": True}


@pytest.mark.parametrize("options", [TOGETHER, {"precision": "bf16-true"}, {"precision": "bf16-mixed"}])
def test_options_that_a_federation_honours(options):
    held_out = client_sets((9,), torch.float32)[0]
    data = FederatedDataModule.from_datasets(client_sets(dtype=torch.float32), batch_size=8, val_dataset=held_out)
    options = {"precision": "32-true"} | options
    assert fit(Regression(), data, rounds=2, **options).current_epoch == 2


def test_no_training_at_all_is_no_mistake_but_a_loss_scale_is():
    assert fit(Regression(), federation(), rounds=1, limit_train_batches=0).global_step == 0
    trainer = Trainer(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")], logger=False)
    assert_refused(r"'16-mixed'.*one loss scale.*'bf16-mixed'", check_trainer, trainer)


def test_a_strategy_that_synchronises_gradients_is_refused_and_ours_has_a_name():
    sentence = r"the strategy DDPStrategy would synchronise gradients between ranks.*strategy='federated'"
    assert_refused(sentence, check_trainer, Trainer(strategy="ddp", accelerator="cpu", devices=2, logger=False))
    check_trainer(Trainer(strategy="federated", accelerator="cpu", devices=2, logger=False))
    assert isinstance(Trainer(strategy="federated", accelerator="cpu", logger=False).strategy, FederatedStrategy)


@pytest.mark.parametrize("name", ["FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_shards_parameters(name):
    """Stand-ins by name: the real ones want an accelerator, or a package, before they can be made."""
    trainer = Trainer(accelerator="cpu", logger=False)
    trainer.strategy.__class__ = type(name, (SingleDeviceStrategy,), {})
    assert_refused(rf"the strategy {name} shards the parameters.*strategy='federated'", check_trainer, trainer)


def test_the_clients_must_be_known():
    sentence = r"needs to know the clients.*FederatedDataModule\.from_datasets\(datasets, batch_size=32\)"
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[FederationCallback()], enable_checkpointing=False)
    assert_refused(sentence, trainer.fit, Regression(), train_dataloaders=[(torch.ones(2, 3), torch.ones(2, 1))])
    with pytest.raises(UserError, match=sentence):
        trainer.fit(Regression(), datamodule=LightningDataModule.from_datasets(client_sets((9,))[0]))


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1])
@pytest.mark.parametrize("kind", [Regression, TwoOptimizers])
def test_a_learning_rate_must_be_a_number(lr, kind):
    class Odd(kind):  # type: ignore[misc, valid-type]
        def configure_optimizers(self) -> Any:
            optimizers = super().configure_optimizers()
            (optimizers[1] if isinstance(optimizers, tuple) else optimizers).param_groups[0]["lr"] = lr
            return optimizers

    with pytest.raises(UserError, match=f"the learning rate is {lr}; it must be a finite number, 0 or more"):
        fit(Odd(), federation(), rounds=1)


def checkpoint(folder, **options):
    path = folder / "x.ckpt"
    fit(Regression(), federation(), rounds=1, **options).save_checkpoint(path)
    return path


def test_a_checkpoint_of_another_algorithm_or_of_other_clients_is_refused(tmp_path):
    path = checkpoint(tmp_path, algorithm=ExpectationPropagation())
    sentence = r"of a federation under ExpectationPropagation, and .* algorithm is FedProx: resume with"
    assert_refused(sentence, fit, Regression(), federation(), rounds=2, algorithm=FedProx(), ckpt_path=path)
    path = checkpoint(tmp_path)
    sentence = r"has the clients client-0, client-1, client-2, client-3, this one client-0, client-1, client-2: resume"
    assert_refused(sentence, fit, Regression(), federation(sizes=(20, 7, 34)), rounds=2, ckpt_path=path)
    many = federation(sizes=(9,) * 12)
    assert_refused(r"client-4 and 7 more: resume", fit, Regression(), many, rounds=2, ckpt_path=path)


def test_a_checkpoint_without_a_federation_starts_one(tmp_path):
    module = Regression()
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "max_epochs": 1, "precision": "64-true"}
    central = Trainer(**options, enable_checkpointing=False, enable_progress_bar=False)
    data = federation()
    data.unfederated = True
    central.fit(module, datamodule=data)
    central.save_checkpoint(tmp_path / "central.ckpt")
    trainer = fit(Regression(), federation(), rounds=2, algorithm=FedAvg(), ckpt_path=tmp_path / "central.ckpt")
    assert trainer.current_epoch == 2
