"""A language model in a federation: its loss, what it logs and refuses, its configurations with noise and without."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lit_epgan.cli.main import main
from lit_epgan.modules import LanguageModel
from lit_epgan.networks import CIFGLanguageNetwork
from lit_epgan.networks.language import most_probable, sampled
from tests.language import log_probabilities

SOURCE = 'def documented():\n    """Return the {k}th number of a list. Raise an error otherwise."""\n'
CHEAP = ["--data.clients", "3", "--data.held_out_users", "2", "--data.vocabulary", "8", "--data.batch_size", "4"]
CHEAP += ["--data.clients_per_round", "3", "--trainer.max_epochs", "2", "--trainer.check_val_every_n_epoch", "1"]
NARROW = ["--model.network.hidden", "8", "--model.network.embedding", "4"]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "library"
    folder.mkdir()
    for k in range(5):
        (folder / f"user{k}.py").write_text(SOURCE.format(k=k))
    return folder


def test_the_loss_is_the_mean_over_the_symbols_that_are_there() -> None:
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    symbols = torch.tensor([[4, 0, 1, 2, 5], [4, 3, 5, 5, 5]])
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    of_rows = [F.cross_entropy(model(symbols[k : k + 1, :-1])[0, :n], symbols[k, 1 : n + 1], reduction="sum")
               for k, n in ((0, 4), (1, 2))]  # fmt: skip
    torch.testing.assert_close(model.training_step([symbols, mask], 0), (of_rows[0] + of_rows[1]) / 6)
    torch.testing.assert_close(-log_probabilities(model.network, symbols, mask), torch.stack(of_rows))


def test_evaluation_is_a_mean_over_the_symbols_of_all_batches(tmp_path: Path) -> None:
    """Two batches of unlike sizes, by each sentence's joint probability; the next evaluation starts anew."""
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    with torch.no_grad():
        model.network.output.bias[0] += 9  # the most probable is always 0
    batches = []
    for k, lengths in enumerate(([4, 2], [3])):
        symbols = torch.randint(4, (len(lengths), 5), generator=torch.Generator().manual_seed(k))
        batches.append((symbols, torch.arange(5) <= torch.tensor(lengths)[:, None]))
    options: Any = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", default_root_dir=tmp_path, **options)
    for evaluate in (trainer.validate, trainer.test):
        for own, count in ((batches, 9), (batches[:1], 6)):
            (found,) = evaluate(model, DataLoader(own, batch_size=None), verbose=False)
            with torch.no_grad():
                loss = -sum(float(log_probabilities(model.network, *batch).sum()) for batch in own) / count
            zeros = sum(int((symbols[:, 1:][mask[:, 1:]] == 0).sum()) for symbols, mask in own)
            expected = {"cross_entropy": loss, "perplexity": math.exp(loss), "accuracy": zeros / count}
            assert found == pytest.approx(expected, rel=1e-5)
            assert 0 < zeros < count


def test_what_it_makes_is_its_networks() -> None:
    model = LanguageModel(CIFGLanguageNetwork(6, 4, 5))
    drawn = model.sample(20, 4, torch.Generator().manual_seed(0))
    assert drawn == sampled(model.network, 20, 4, torch.Generator().manual_seed(0))
    assert model.most_probable(40, 4, 2) == most_probable(model.network, 40, 4, 2)
    assert not model.most_probable(40, 4, 2).exact


@pytest.mark.parametrize(
    ("config", "symbols", "noise"), [("docstrings_words", "11", True), ("docstrings_characters", "258", False)]
)
def test_it_trains_from_the_command_line(
    config: str, symbols: str, noise: bool, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["fit", "--config", f"{config}.yaml"]
    words += ["--config", "algorithms/central_noise.yaml", "--federation.mechanism.bound", "0.2"] if noise else []
    words += ["--data.library", str(library), *CHEAP, *NARROW, "--model.network.symbols", symbols]
    assert main(words) == 0
    (table,) = [pd.read_csv(path) for path in (tmp_path / "runs").rglob("metrics.csv")]
    row = table.dropna(subset=["perplexity"]).iloc[-1]
    assert row["perplexity"] == pytest.approx(math.exp(row["cross_entropy"]), rel=1e-4)
    assert 0 <= row["accuracy"] <= 1


def test_other_symbols_than_the_datas_are_refused(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config", "docstrings_words.yaml", "--data.library", str(library), *CHEAP, *NARROW]) == 2
    assert "the data have 11 symbols, the network 2003: set its symbols to 11" in capsys.readouterr().err
