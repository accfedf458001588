"""The model learns from the clients' data, and the configuration runs: ``python -m pytest``."""

from pathlib import Path

from lightning.pytorch import Trainer, seed_everything
from mine import Clients, MyModel

from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.main import main


def test_the_loss_falls(tmp_path: Path) -> None:
    """To less than half of what it was, in two rounds."""
    seed_everything(0)
    model, data = MyModel(), Clients()
    trainer = Trainer(max_epochs=2, callbacks=[FederationCallback()], default_root_dir=tmp_path, logger=False)
    (before,) = trainer.validate(model, data, verbose=False)
    trainer.fit(model, datamodule=data)
    assert trainer.callback_metrics["val_loss"] < before["val_loss"] / 2


def test_the_configuration_runs(tmp_path: Path) -> None:
    """One round of it, from the command line."""
    config = Path(__file__).with_name("mine.yaml")
    words = ["--trainer.max_epochs", "1", "--trainer.default_root_dir", str(tmp_path)]
    assert main(["fit", "--config", str(config), *words]) == 0
    assert (tmp_path / "metrics.csv").is_file()
