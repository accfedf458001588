"""A Trainer whose local steps the engine drives: the same models and metrics as by Lightning's loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import NormClipping
from lit_epgan.federated import APFL, SCAFFOLD, FedAvg, FedProx
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise, RecordNoise
from tests.modules import vector

SIZES = (20, 33, 20, 7)  # records of the clients: some go together, others do not


class Net(LightningModule):
    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), middle or nn.Identity(), nn.Tanh(), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log_dict({"both": 2 * loss}, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data(**options):
    generator = torch.Generator().manual_seed(1)
    sets = [
        TensorDataset(torch.randn(n, 5, generator=generator), torch.randint(3, (n,), generator=generator))
        for n in SIZES
    ]
    return FederatedDataModule.from_datasets(sets, batch_size=10, val_dataset=sets[0], **options)


def fit(folder, module, rounds=2, trainer=None, **options):
    resumed = options.pop("ckpt_path", None)
    clients = options.pop("data", {})
    own = clients if callable(clients) else lambda: data(**clients)
    off = dict.fromkeys(["logger", "enable_progress_bar", "enable_model_summary"], False) | (trainer or {})
    callbacks = [FederationCallback(**options), RoundCheckpoint()]
    fitted = Trainer(accelerator="cpu", max_epochs=rounds, callbacks=callbacks, default_root_dir=folder, **off)
    fitted.fit(module, datamodule=own(), ckpt_path=resumed)
    return fitted


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": FedAvg()},
        {"algorithm": FedProx(0.3), "data": {"clients_per_round": 2}},
        {"algorithm": SCAFFOLD(), "data": {"local_steps": 3}},
        {"algorithm": SCAFFOLD("gradient")},
        {"algorithm": APFL()},
        {"mechanism": NormClipping(0.1)},
        {"algorithm": FedAvg(), "local": ["net.3.*"]},
    ],
)
def test_models_and_metrics_are_those_of_lightnings_loop(tmp_path, options):
    ends = {}
    for kind in ("trainer", "engine"):
        module = Net()
        metrics = fit(tmp_path / kind, module, side_by_side=kind == "engine", **options).callback_metrics
        ends[kind] = vector(module), {n: float(metrics[n]) for n in ("loss", "both_epoch", "val_loss", "client/steps")}
    assert (ends["trainer"][0] - vector(Net())).abs().max() > 1e-2
    torch.testing.assert_close(ends["engine"][0], ends["trainer"][0], rtol=1e-5, atol=1e-6)
    assert ends["engine"][1] == pytest.approx(ends["trainer"][1], rel=1e-5)


def test_a_resumed_run_ends_bit_identical_to_one_that_was_not_stopped(tmp_path):
    whole, first, second = Net(), Net(), Net()
    fit(tmp_path / "whole", whole, 4, algorithm=SCAFFOLD(), side_by_side=True)
    stopped = fit(tmp_path / "parts", first, 2, algorithm=SCAFFOLD(), side_by_side=True)
    (checkpoint,) = Path(stopped.default_root_dir).rglob("last*.ckpt")
    fit(tmp_path / "parts", second, 4, algorithm=SCAFFOLD(), side_by_side=True, ckpt_path=str(checkpoint))
    assert torch.equal(vector(second), vector(whole))


def test_clients_that_cannot_go_side_by_side_go_one_after_another(tmp_path, caplog):
    ends = []
    for kind in ("trainer", "engine"):
        module = Net(nn.Dropout(0.5))
        with caplog.at_level("INFO"):
            fit(tmp_path / kind, module, side_by_side=kind == "engine")
        ends.append(vector(module))
    assert "one after another, and not side by side: a training step draws" in caplog.text
    assert torch.equal(*ends)


def test_what_private_training_logs_is_left_out_and_a_skipped_batch_refused(tmp_path):
    private = CentralNoise(1.0, 1.0, delta=1e-3, noise_seed=0, ledger=str(tmp_path / "privacy.jsonl"))
    known = fit(tmp_path, Net(), 1, mechanism=private, side_by_side=True).callback_metrics
    assert "val_loss" in known
    assert not {"loss", "both", "both_epoch"} & set(known)
    with pytest.raises(UserError, match=r"Skipping\.training_step gives no loss.* side_by_side: false"):
        fit(tmp_path, Skipping(), 1, side_by_side=True)


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(0.3), SCAFFOLD()])
def test_steps_that_hide_records_are_those_of_lightnings_loop(tmp_path, caplog, algorithm):
    """Bit by bit: the same coins, the same noise, the same account."""
    ends, spent = [], []
    for kind in ("trainer", "engine"):
        own = str(tmp_path / f"{kind}.jsonl")
        module, noise = Net(), RecordNoise(0.5, 1.0, delta=1e-3, noise_seed=0, ledger=own)
        with caplog.at_level("INFO"):
            fit(tmp_path / kind, module, algorithm=algorithm, mechanism=noise, side_by_side=kind == "engine")
        ends.append(vector(module))
        spent.append(noise.spent())
    assert "not side by side: the mechanism treats the records of each by themselves" in caplog.text
    assert caplog.text.count("not side by side") == 1  # nobody tries it
    assert (ends[0] - vector(Net())).abs().max() > 1e-2
    assert torch.equal(*ends)
    assert spent[0] == spent[1]
    ledgers = [(tmp_path / f"{kind}.jsonl").read_text().count("\n") for kind in ("trainer", "engine")]
    assert ledgers[0] == ledgers[1] > 1


class Overflowing(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=3e38)


@pytest.mark.parametrize("kind", ["trainer", "engine"])
@pytest.mark.parametrize("hidden", [False, True])
def test_records_that_noise_hides_are_not_looked_at_for_a_cause(tmp_path, kind, hidden):
    def poisoned() -> FederatedDataModule:
        bad = TensorDataset(torch.full((20, 5), float("nan")), torch.zeros(20, dtype=torch.long))
        return FederatedDataModule.from_datasets([bad], batch_size=10)

    noise = RecordNoise(0.5, 100.0, delta=1e-3, noise_seed=0) if hidden else None
    with pytest.raises(UserError, match="no client's update is finite") as raised, pytest.warns() as warned:
        fit(tmp_path, Overflowing(), 1, data=poisoned, mechanism=noise, side_by_side=kind == "engine")
    told = " ".join([str(raised.value), *(str(warning.message) for warning in warned)])
    assert ("its data hold values that are not finite" in told) != hidden


class Skipping(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx == 0 else None


class Hooked(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class ByStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize(
    ("reason", "kind", "options"),
    [
        ("it overrides on_before_zero_grad", Hooked, {}),
        ("it optimizes manually", Manual, {}),
        ("a learning rate changes with steps", ByStep, {}),
        ("gradients are clipped", Net, {"trainer": {"gradient_clip_val": 0.1}}),
        ("batches are accumulated", Net, {"trainer": {"accumulate_grad_batches": 2}}),
        ("the precision is bf16-mixed", Net, {"trainer": {"precision": "bf16-mixed"}}),
    ],
)
def test_what_needs_lightnings_loop_gets_it_with_the_reason(tmp_path, reason, kind, options, caplog):
    first, second = kind(), kind()
    fit(tmp_path / "trainer", first, 1, **options)
    with caplog.at_level("INFO"):
        fit(tmp_path / "engine", second, 1, side_by_side=True, **options)
    assert f"and not side by side: {reason}" in caplog.text
    assert torch.equal(vector(first), vector(second))
