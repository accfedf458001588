"""The comparison of a configuration's clients: scores, intervals, forests, the sentence, and the whole command."""

import html
import re

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score
from torch.utils.data import TensorDataset

from lit_epgan.cli import compare
from lit_epgan.cli.compare import WHOLE, advice, auroc, bagged_trees, by_client, by_seed, data_of, score_for
from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule


def test_auroc_is_scikit_learns_with_ties_and_undefined_for_one_class():
    generator = np.random.default_rng(0)
    y, p = generator.integers(0, 2, 50), generator.integers(0, 5, 50) / 5
    assert auroc(y, np.stack([1 - p, p], 1)) == pytest.approx(roc_auc_score(y, p))
    assert np.isnan(auroc(np.ones(3), np.ones((3, 2))))


def ranked(right, client="a"):
    """Records of which a share is ranked rightly."""
    y = np.arange(40) % 2
    p = np.where(np.arange(40) < right * 40, 0.25 + 0.5 * y, 0.75 - 0.5 * y)
    return pd.DataFrame({"client": client, "target": y, "class_0": 1 - p, "class_1": p})


def test_a_row_for_each_client_and_method_whose_interval_covers_it_and_undefined_counts_for_nothing():
    one_class = ranked(1.0, "b").assign(target=0)
    records = {name: [pd.concat([ranked(share), one_class])] for name, share in (("alone", 0.7), ("fedavg", 1.0))}
    table, means = by_client(records, score_for(records["alone"][0]))
    rows = table.set_index(["method", "client"])
    assert rows.loc[("fedavg", "a"), "AUROC"] == 1
    assert rows.loc[("fedavg", WHOLE), "AUROC"] == 1
    assert np.isnan(rows.loc[("fedavg", "b"), "AUROC"])
    low, value, high = rows.loc[("alone", "a"), ["low", "AUROC", "high"]]
    assert 0.3 < low < value < high < 1
    sentence = advice(table, means, score_for(records["alone"][0]))
    assert sentence.startswith("FedAvg has AUROC 1.000 in the mean over clients, each alone 0.7")
    assert sentence.endswith(": federate.")
    few = {"alone": records["alone"], "fedavg": [pd.concat([ranked(1.0), ranked(0.0, "c")])]}
    assert by_client(few, score_for(few["alone"][0]))[0].iloc[-1]["AUROC"] == 1  # without c, who has not trained alone
    same = by_client(dict.fromkeys(("alone", "fedavg"), records["alone"]), score_for(records["alone"][0]))
    assert "these data do not tell" in advice(*same, score_for(records["alone"][0]))


def test_a_score_is_the_mean_over_seeds_each_of_which_has_a_row():
    records = {"fedavg": [ranked(0.7), ranked(1.0)]}
    score = score_for(ranked(1.0))
    own = by_seed(records, score, [3, 5])
    assert own["seed"].tolist() == [3, 5]
    assert own["AUROC"].tolist() == [
        score.of(t["target"].to_numpy(), t[["class_0", "class_1"]].to_numpy()) for t in records["fedavg"]
    ]
    assert by_client(records, score)[0]["AUROC"].tolist() == pytest.approx([own["AUROC"].mean()] * 2)


def test_the_score_follows_what_is_answered():
    of_three = pd.DataFrame(
        {"client": "a", "target": [0, 2], "class_0": [0.8, 0.1], "class_1": 0.1, "class_2": [0.1, 0.8]}
    )
    number = pd.DataFrame({"client": "a", "target": [0.0, 2.0], "output_0": [1.0, 1.0]})
    assert score_for(of_three).name == "accuracy"
    table, _ = by_client({"fedavg": [of_three]}, score_for(of_three))
    assert table["accuracy"].tolist() == [1, 1]
    table, _ = by_client({"fedavg": [number]}, score_for(number))
    assert table["RMSE"].tolist() == [1, 1]


def test_forests_are_averaged_by_records_and_a_class_that_one_lacks_counts_zero():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    sets = {"a": TensorDataset(x[:40], y[:40]), "b": TensorDataset(x[40:], y[40:].clamp(max=1))}
    data = FederatedDataModule.from_datasets(sets, 8, test_dataset={"a": TensorDataset(x[:5], y[:5])})
    data.data.labels = {name: own.tensors[1] for name, own in sets.items()}
    (found,) = bagged_trees({3: data})
    expected = np.zeros((5, 3))
    for own in sets.values():
        forest = RandomForestClassifier(200, min_samples_leaf=3, random_state=3)
        forest.fit(own.tensors[0].numpy(), own.tensors[1].numpy())
        expected[:, forest.classes_] += len(own) / 60 * forest.predict_proba(x[:5].numpy())
    np.testing.assert_allclose(found[["class_0", "class_1", "class_2"]].to_numpy(), expected, atol=1e-12)
    assert found["client"].tolist() == ["a"] * 5
    images = FederatedDataModule.from_datasets([TensorDataset(torch.zeros(4, 1, 2, 2), torch.arange(4))], 2)
    assert bagged_trees({0: images}) is None


@pytest.mark.slow
def test_one_command_compares_methods_by_client_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "TREES", 20)
    monkeypatch.setattr(compare, "RESAMPLES", 50)
    (tmp_path / "h").mkdir()
    for k, name in enumerate(("north", "south")):
        x = np.random.default_rng(k).normal(size=(80, 2))
        table = pd.DataFrame(x, columns=["age", "dose"]).assign(ill=(x.sum(1) > 0).astype(int))
        table.to_csv(tmp_path / "h" / f"{name}.csv", index=False)
    words = ["compare", "--config", "table_classifier.yaml", "--data.path", "h", "--data.label", "ill"]
    words += ["--data.kinds", "{age: number}", "--trainer.callbacks", "lit_epgan.callbacks.RoundCheckpoint"]
    words += ["--trainer.max_epochs=2", "--noise.data.batch_size=8", "--seeds", "1", "--data.split_seed", "null"]
    assert main(words) == 0
    folder = tmp_path / "runs" / "compare" / "table_classifier"
    rows = pd.read_csv(folder / "compare.csv")
    assert set(rows["method"]) == {"alone", "pooled", "fedavg", "fedyogi", "noise", "trees"}
    assert set(rows["client"]) == {"north", "south", WHOLE}
    assert rows["AUROC"].between(0.5, 1).all()
    assert "batch_size: 8" in (folder / "runs" / "noise" / "seed-1" / "config.yaml").read_text()
    assert "batch_size: 32" in (folder / "runs" / "fedavg" / "seed-1" / "config.yaml").read_text()
    assert data_of(folder / "runs" / "fedavg" / "seed-1").seed == 1  # trees are grown on that seed's split
    seeds = pd.read_csv(folder / "seeds.csv")
    assert (len(seeds), set(seeds["seed"])) == (6 * 2, {1})
    found = seeds.set_index(["method", "client"])["AUROC"]
    assert rows.set_index(["method", "client"])["AUROC"][found.index].to_numpy() == pytest.approx(found.to_numpy())
    page = (folder / "index.html").read_text()
    assert "in the mean over clients, each alone" in page
    assert "--data.kinds '{age: number}'" in html.unescape(page)  # can be copied into a shell
    assert re.search(r"<tr><th>north<td>0\.\d{3}<br>0\.\d\d-[01]\.\d\d<br>0\.\d\d<td>", page)
    assert (folder / "compare.png").is_file()
    capsys.readouterr()
    assert main(words) == 0
    assert "5 runs, 5 of them finished before." in capsys.readouterr().out
    assert main(["compare", "--data.path", "h"]) == 2
    assert main([*words, "stray"]) == 2
