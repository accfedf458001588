"""CHiME-5, from its published layout to word error rates, on the command line; the tree is a miniature."""

import pandas as pd
import pytest

from lit_epgan.cli.main import main
from tests.chime5_tree import write_chime5

pytestmark = pytest.mark.slow

SMALL = ["--model.network.hidden", "32", "--model.network.layers", "1", "--model.network.projection", "32"]


def test_from_the_published_layout_to_word_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    texts = write_chime5(tmp_path / "CHiME5")
    own = ["--data.chime5", "CHiME5", "--data.cache_dir", "cache", "--data.workers", "1"]
    fewer = ["--data.iterations", "10", "--data.gaussians", "250", "--trainer.accelerator", "cpu"]
    command = ["--config", "speech.yaml", *own, *fewer, *SMALL]
    assert main(["fit", *command, "--trainer.max_epochs", "1", "--data.batch_size", "16"]) == 0
    run = tmp_path / "runs" / "speech"
    assert pd.read_csv(run / "metrics.csv")["wer_dev"].notna().sum() == 1
    assert set(pd.read_csv(run / "partition.csv")["client"]) == {"S03", "S04"}
    assert main(["test", *command]) == 0
    decoded = pd.read_csv(run / "test" / "hypotheses.csv", keep_default_na=False)
    assert decoded["reference"].tolist() == texts["S01"]  # neither what is redacted nor laughter
    table = pd.read_csv(run / "test" / "word_errors.csv").set_index("session")
    assert list(table.index) == ["S01", "all"]
    assert table.loc["all", "words"] == sum(len(text.split()) for text in texts["S01"])
    logged = pd.read_csv(run / "test_metrics.csv").iloc[-1]
    assert table.loc["all", "wer"] == pytest.approx(logged["wer"], abs=0.01)
    assert logged["wer_gmm"] < 60  # 36 when this was written; the right channel is noise
