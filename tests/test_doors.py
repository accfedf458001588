"""Every door by which a number leaves a private run: runs that differ in one client's data alone tell the same.

The client's records are 3 or 40, and hold a number that no other does. Files, file names, metrics, checkpoints, what is
printed, and where the run is are watched; the values of released tensors are the mechanism's to protect.
"""

import json
import re
import warnings

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederatedProgressBar, FederationCallback, PartitionReport
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Poisson
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg, FedProx
from lit_epgan.privacy import AdaptiveNoise, CentralNoise, CorrelatedNoise, DistributedNoise
from tests.federations import client_sets, plain_trainer
from tests.modules import Regression, TwoOptimizers

SECRET = 777.25


class Telling(Regression):
    """Logs, keeps and gathers what it sees in training."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.last, self.count = 0.0, 0

    def training_step(self, batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"largest": batch[0].max(), "rows": float(len(batch[0]))})
        self.seen.append(batch[0].detach())
        self.last, self.count, self.step_losses = float(batch[0].max()), self.count + 1, loss.detach()
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({"gathered": float(len(self.seen)), "counted": float(self.count), "kept": self.last})


class Where(Callback):
    """Looks at where the run is after each batch."""

    def __init__(self) -> None:
        self.found = set()

    def on_train_batch_end(self, trainer: Trainer, *_) -> None:
        federation = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        self.found.add(federation.progress)


def data(records: int, **options) -> FederatedDataModule:
    sets = client_sets((20, records, 20, 12, 20, 20))
    x = sets[1].tensors[0].clone()
    x[:, 0] = SECRET
    sets[1] = TensorDataset(x, sets[1].tensors[1])
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


def leaves(value, path: str = ""):
    """All that a checkpoint holds, by where it is; of a tensor its shape."""
    if isinstance(value, Tensor):
        return {path: tuple(value.shape)}
    if isinstance(value, dict):
        return {k: v for name, each in value.items() for k, v in leaves(each, f"{path}/{name}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, each in enumerate(value) for k, v in leaves(each, f"{path}/{i}").items()}
    return {path: str(value)}


def told(folder, records, module, capsys, caplog, sampler, **parts):
    torch.manual_seed(0)
    where, progress = Where(), FederatedProgressBar(refresh_seconds=0, line_seconds=0)
    caplog.clear()
    capsys.readouterr()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level("DEBUG"):
        warnings.simplefilter("always")
        kept = {"save_top_k": -1, "save_last": True, "save_on_train_epoch_end": True}
        callbacks = [ModelCheckpoint(folder / "kept", "{epoch}-{step}", **kept), PartitionReport(), progress, where]
        options = {"logger": CSVLogger(folder), "log_every_n_steps": 1, "num_sanity_val_steps": 2}
        options |= {"enable_checkpointing": True, "enable_progress_bar": True}
        callbacks = [FederationCallback(sampler=sampler, **parts), *callbacks]
        trainer = plain_trainer(max_epochs=2, default_root_dir=folder, callbacks=callbacks, **options)
        trainer.fit(module, datamodule=data(records, local_epochs=1))
    printed = capsys.readouterr()
    lines = [printed.out, printed.err, *(r.getMessage() for r in caplog.records), *(str(w.message) for w in warned)]
    found = {"printed": plain("\n".join(lines), folder), "where": where.found}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".ckpt":
            checkpoint = torch.load(path, weights_only=False)
            found[name] = {k: plain(v, folder) if isinstance(v, str) else v for k, v in leaves(checkpoint).items()}
        elif path.suffix == ".jsonl":
            found[name] = re.sub(r'"(run|since|process|digest)": "[^"]*"', "", plain(path.read_text(), folder))
        elif path.suffix == ".last":
            found[name] = path.stat().st_size  # a digest of random names
        elif path.name == "progress.json":
            found[name] = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("time", "seconds")}
        else:
            found[name] = plain(path.read_text(), folder)
    return found


def plain(text: str, folder) -> str:
    """Without the run's folder, and times of the day and taken."""
    text = re.sub(r"-[0-9a-f]{16}\.users", "-LEDGER.users", text)  # a digest by a secret of the user's
    return re.sub(r"\d+:\d\d(:\d\d)?", "TIME", text.replace(str(folder), "FOLDER"))


EVERYONE = {
    "CentralNoise": lambda: CentralNoise(1.0, 1.0),
    "AdaptiveNoise": lambda: AdaptiveNoise(1.0, 1.0, count_noise=1.0),
    "CorrelatedNoise": lambda: CorrelatedNoise(1.0, 1.0),
    "DistributedNoise": lambda: DistributedNoise(1.0, 1.0),
}
ALGORITHMS = {
    "FedProx": lambda: FedProx(0.1),
    "SCAFFOLD": SCAFFOLD,
    "EP": lambda: ExpectationPropagation(prior_precision=1e3),
}
RUNS = {
    **{f"{m}, FedAvg": (EVERYONE[m], FedAvg, lambda: None, Telling) for m in EVERYONE},
    **{f"CentralNoise, {a}": (EVERYONE["CentralNoise"], ALGORITHMS[a], lambda: None, Telling) for a in ALGORITHMS},
    "Poisson": (EVERYONE["CentralNoise"], FedAvg, lambda: Poisson(0.95), Telling),
    "two optimizers by hand": (EVERYONE["CentralNoise"], FedAvg, lambda: None, TwoOptimizers),
    "side by side": (EVERYONE["CentralNoise"], FedAvg, lambda: None, Regression),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_private_run_tells_nothing_of_one_clients_data(name, tmp_path, capsys, caplog):
    mechanism, algorithm, sampler, module = RUNS[name]
    found = [
        told(
            tmp_path / str(records),
            records,
            module(),
            capsys,
            caplog,
            sampler(),
            mechanism=mechanism(),
            algorithm=algorithm(),
            side_by_side=name == "side by side",
            buffers="exclude" if module is TwoOptimizers else "merge",
        )
        for records in (3, 40)
    ]
    assert found[0].keys() == found[1].keys()
    for door, seen in found[0].items():
        assert seen == found[1][door], door
        assert "777" not in str(seen), door


def test_the_watch_sees_what_an_open_run_tells(tmp_path, capsys, caplog):
    """The control: without a mechanism every door tells the two apart."""
    few, many = (told(tmp_path / str(n), n, Telling(), capsys, caplog, None) for n in (3, 40))
    same = {door for door in few.keys() & many.keys() if few[door] == many[door]}
    assert not {"printed", "where", "progress.json", "lightning_logs/version_0/metrics.csv"} & same
    assert {d for d in few.keys() & many.keys() if d.startswith("kept/")} == {"kept/last.ckpt"}
    assert not any(door.endswith(".ckpt") for door in same)
