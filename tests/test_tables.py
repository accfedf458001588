"""Tables by client: what is read, how it is prepared from sums, and what is refused or named."""

import datetime
import importlib
import json
import sys
import unicodedata
from decimal import Decimal
from importlib.util import find_spec

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Trainer
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, RobustScaler, StandardScaler
from sklearn.utils.class_weight import compute_class_weight

from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.main import main
from lit_epgan.datamodules import TableDataModule
from lit_epgan.datamodules.preparation import Column, Label, Moments, Preparation
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import Classifier
from lit_epgan.networks import MLPBackbone
from lit_epgan.privacy import RecordNoise
from tests.refusals import assert_refused


def column(texts, name="x"):
    return Column(pd.Series(texts, name=name, dtype=object), lambda row: f"line {row + 2}")


def sums(tables):
    return [{n: column(own[n], n).sums(np.arange(len(own))) for n in own} for own in tables]


def hospitals():
    """Three clients' columns as texts: far from zero, rare levels, much missing."""
    generator = np.random.default_rng(0)
    tables = []
    for k, n in enumerate((40, 7, 90)):
        table = pd.DataFrame({"age": 1e6 + generator.normal(k, 1, n), "dose": generator.normal(3, 1e-3, n)})
        table["ward"] = generator.choice(["icu", "er", f"ward {k}"], n)
        table["smoker"] = generator.choice(["yes", "no"], n)
        table.loc[generator.random(n) < 0.3, "dose"] = np.nan
        tables.append(table)
    return tables


def test_a_preparation_from_sums_is_scikit_learns_of_the_pooled_table():
    tables, names = hospitals(), ["age", "dose", "ward", "smoker"]
    texts = [own.map(lambda x: "" if x != x else str(x)) for own in tables]
    fitted = Preparation.fit(sums(texts), names, Label("died", ["0", "1"]))
    assert fitted == Preparation.fit(sums(texts), names, Label("died", ["0", "1"]))
    other = Preparation.fit(sums(texts[::-1]), names, Label("died", ["0", "1"]))
    assert [f.levels for f in fitted.features] == [f.levels for f in other.features]
    whole = pd.concat(tables).replace({"smoker": {"yes": 1.0, "no": 0.0}}).infer_objects()
    pooled = make_column_transformer(
        (StandardScaler(), ["age"]),
        (make_pipeline(StandardScaler(), SimpleImputer(strategy="mean", add_indicator=True)), ["dose"]),
        (OneHotEncoder(sparse_output=False), ["ward"]),
        (StandardScaler(), ["smoker"]),
    ).fit(whole)
    for own, text, numbers in zip(tables, texts, np.split(pooled.transform(whole), [40, 47]), strict=True):
        found = fitted.encode({n: column(text[n], n) for n in names}, len(own))
        np.testing.assert_allclose(found, numbers, rtol=0, atol=2e-10 * 1e4)  # 1e6 / 1e-10 is all that doubles have
    assert fitted.inputs == [
        *("age", "dose", "dose is missing", "ward = er", "ward = icu", "ward = ward 0", "ward = ward 1"),
        *("ward = ward 2", "smoker"),
    ]


def test_moments_add_up_to_1e_10():
    numbers = np.random.default_rng(1).normal(1e4, 1e-2, 1000)
    parts = [Moments.of(part) for part in np.split(numbers, [3, 3, 400])]
    pooled = Moments.pooled(parts)
    assert pooled.n == 1000
    assert pooled.mean == pytest.approx(StandardScaler().fit(numbers[:, None]).mean_[0], rel=1e-14)
    assert pooled.sd == pytest.approx(numbers.std(), rel=1e-10)


def test_quantiles_from_sums_are_the_pooled_tables_and_an_outlier_moves_none(tmp_path):
    tables = hospitals()
    tables[1].loc[3, "age"] = 1e9  # typed wrong
    for k, own in enumerate(tables):
        own.assign(died=[i % 2 for i in range(len(own))]).to_csv(tmp_path / f"{k}.csv", index=False)
    by_moments, by_quantiles = (
        {f.name: f for f in loaded(str(tmp_path), **options).preparation.features}
        for options in ({}, {"scaling": "quantiles"})
    )
    whole = pd.concat(tables)
    for name in ("age", "dose"):
        numbers = whole[name].dropna().to_numpy()
        first, median, third = np.quantile(numbers, [0.25, 0.5, 0.75], method="inverted_cdf")
        found = by_quantiles[name]
        assert (found.mean, found.sd) == pytest.approx((median, (third - first) / 1.349), rel=1e-9)
        theirs = RobustScaler(unit_variance=True).fit(numbers[:, None])  # between two values it interpolates
        assert found.sd == pytest.approx(theirs.scale_[0], rel=0.1)
    assert by_moments["age"].sd > 1e6 * by_quantiles["age"].sd
    assert by_quantiles["smoker"] == by_moments["smoker"]


READ = {  # texts, what they are, and as numbers
    "text": (["1", " 2", "x"], "category", None),
    "comma": (["1,5", "-2,25", ""], "number", [1.5, -2.25, np.nan]),
    "missing": (["1", "NA", "NaN", "null", "?", "", "None", "-"], "number", [1] + 7 * [np.nan]),
    "minus": (["\N{MINUS SIGN}3", "+4", "1e3"], "number", [-3, 4, 1000]),
    "iso": (["1970-01-03", "1971-01-01 12:00"], "date", [2, 365.5]),
    "compact": (["20240131", "20240201"], "date", [19753, 19754]),
    "german": (["31.01.2024", "1.2.2024"], "date", [19753, 19754]),
    "american": (["01/31/2024", "2/1/2024"], "date", [19753, 19754]),
    "boolean": (["Yes", "no", "TRUE", "1"], "boolean", [1, 0, 1, 1]),
    "identifiers": (["123456789", "123456790"], "number", [123456789, 123456790]),
}


@pytest.mark.parametrize("case", READ)
def test_a_column_is_read_as_it_is_written(case):
    texts, kind, numbers = READ[case]
    own = column([t.strip() for t in texts])
    if case == "text":
        with pytest.raises(Exception, match="x"):  # most of it are numbers
            Preparation.fit([{"x": own.sums(np.arange(3))}], ["x"], Label("y"))
        assert own.odd("number") == "line 4: 'x'"
        kinds = {"x": "category"}
        (feature,) = Preparation.fit([{"x": own.sums(np.arange(3))}], ["x"], Label("y"), kinds).features
        assert feature.levels == ["1", "2", "x"]
        return
    (feature,) = Preparation.fit([{"x": own.sums(np.arange(len(texts)))}], ["x"], Label("y")).features
    assert feature.kind == kind
    np.testing.assert_array_equal(own.read(kind), numbers)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["1,5", "1.5"], "line 2: '1,5' in the column 'x' has a decimal comma, and other rows a decimal point"),
        (["7", "1,234"], "line 3: '1,234' in the column 'x' may be a decimal number, or thousands"),
        (
            ["01/02/2024", "03/04/2024"],
            "line 2: '01/02/2024' in the column 'x' may begin with the day or with the month",
        ),
    ],
)
def test_what_may_be_read_in_two_ways_is_refused_with_its_line(texts, words):
    assert_refused(words, column(texts).sums, np.arange(2))


def folder(tmp_path, **files):
    for name, text in files.items():
        (tmp_path / f"{name}.csv").write_text(text, encoding="utf-8")
    return str(tmp_path)


def labelled(*labels, client="a"):
    return "age,died\n" + "".join(f"{k * 3 % 7 + 0.5},{label}\n" for k, label in enumerate(labels))


def loaded(path, **options):
    data = TableDataModule(path, **{"label": "died", "held_out": 0.0, **options})
    data.setup("fit")
    return data


def said(data):
    return " | ".join(data._notes)


LABELS = {  # of one client, of another, the names, the first one's numbers
    "minus one": (["-1", "1", "1"], ["1", "-1", "-1"], ["-1", "1"], [0, 1, 1]),
    "minus two": (["-2", "1", "1"], ["1", "-2", "-2"], ["-2", "1"], [0, 1, 1]),
    "as floats": (["0", "1", "1"], ["1.0", "0.0", ""], ["0", "1"], [0, 1, 1]),
    "ten": (["2", "10", "9"], ["9", "2", "2"], ["2", "9", "10"], [0, 2, 1]),
    "missing": (["no", "NA", "yes"], ["?", "null", "yes"], ["no", "yes"], [0, 1]),
    "spelled": (["Yes", "no", "yes "], ["YES", "NO", "no"], ["no", "yes"], [1, 0, 1]),
    "composed": (["fi\u0301n", "no", "no"], ["f\u00edn", "no", "no"], ["f\u00edn", "no"], [0, 1, 1]),
    "huge": (["123456789", "123456790", "123456790"], ["123456789"] * 3, ["123456789", "123456790"], [0, 1, 1]),
}


@pytest.mark.parametrize("case", LABELS)
def test_classes_are_read_as_written(case, tmp_path):
    first, second, names, numbers = LABELS[case]
    data = loaded(folder(tmp_path, a=labelled(*first), b=labelled(*second)))
    assert [unicodedata.normalize("NFC", name.casefold()) for name in data.label_names] == names
    x, y = data.data.train["a"].tensors
    assert y[x[:, 0].argsort()].tolist() == numbers  # ages rise with the lines
    assert ("rows without a label" in said(data)) == (case in ("missing", "as floats"))
    assert ("one is meant by" in said(data)) == (case in ("spelled", "composed"))


def test_na_is_a_class_where_it_is_named(tmp_path):
    data = loaded(folder(tmp_path, a=labelled("NA", "DE", "NA")), classes=["DE", "NA"])
    assert sorted(data.data.train["a"].tensors[1].tolist()) == [0, 1, 1]


GOOD = labelled("0", "1", "0", "1")
REFUSED = {
    "total": (
        {"a": "ward,age,died\ne,1,0\nf,2,1\nTotal,3,1\n"},
        {},
        r"a.csv, line 4 looks like a row of totals, 'Total'",
    ),
    "no label": (
        {"a": GOOD, "b": "age,dead\n1,2\n"},
        {},
        "b.csv has no column 'died', the label; its columns are age, de",
    ),
    "no label at all": ({"a": "age,dead\n1,2\n"}, {}, "no column 'died': say by --data.label .* of age, dead"),
    "all missing": ({"a": "age,died\n1,\n2,NA\n"}, {}, "no row has a value in the column 'died'"),
    "one class": ({"a": "age,died\n1,0\n2,0\n"}, {}, "all labels are '0'"),
    "real": ({"a": labelled("0.5", "1.5", "2")}, {}, "3 different values.*--config table_regression.yaml"),
    "twice": ({"a": GOOD}, {"classes": ["0", "1", "1.0"]}, "data.classes names '1' and '1.0', which are one"),
    "unknown": ({"a": GOOD}, {"classes": ["0"]}, "rows of the class 1, which data.classes does not name"),
    "label a feature": ({"a": GOOD}, {"features": ["age", "died"]}, "names 'died', which is the label"),
    "unknown feature": ({"a": GOOD}, {"features": ["dose"]}, "data.features names dose, but the columns are age, died"),
    "mixed": ({"a": "age,died\n1,0\n2,1\nold,1\n"}, {}, "a.csv, line 4: 'old' in .* no number.*empty cell"),
    "infinite": ({"a": "age,died\n1,0\n2,1\ninf,1\n"}, {}, "line 4: 'inf' in the column 'age' is no number"),
    "quoted": ({"a": 'age,note,died\n1,"a\nb",0\n2,c,1\nold,d,1\n'}, {}, "line 5: 'old'"),
    "two ages": ({"a": "age,Age ,died\n1,2,0\n"}, {}, "columns that one takes for one, 'age', 'Age'"),
    "nothing": ({"a": "died\n1\n0\n"}, {}, "no column is left to learn from"),
    "short": ({"a": "age,died\n1\n"}, {}, "line 2 has 1 fields"),
    "empty": ({"a": "age,died\n"}, {}, "a.csv has no rows"),
    "no client": ({"a": "h,age,died\nx,1,0\n,2,1\n"}, {"client": "h"}, "a.csv, line 3: the column 'h' is empty"),
    "number": (
        {"a": labelled("1", "2", "x")},
        {"predicts": "number"},
        "line 4: 'x' in the column 'died', the label, is no",
    ),
    "preparation": ({"a": GOOD}, {"preparation": {"features": 3}}, "data.preparation is no preparation.*features"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_table_is_one_sentence(case, tmp_path):
    files, options, words = REFUSED[case]
    assert_refused(words, lambda: loaded(folder(tmp_path, **files), **options))


def test_there_is_no_table(tmp_path):
    assert_refused("there is no table .*absent.csv", loaded, str(tmp_path / "absent.csv"))
    assert_refused("has no file that ends in .csv", loaded, str(tmp_path))
    assert_refused("data.client is 'died', which is the label", TableDataModule, client="died", label="died")


def rows(n, shift=0.0, ward="icu", scale=1.0):
    generator = np.random.default_rng(n)
    lines = [f"{x:.3f},{ward if k % 3 else 'er'},{k % 2}" for k, x in enumerate(generator.normal(shift, scale, n))]
    return "weight,ward,died\n" + "\n".join(lines)


NAMED = {
    "units": (
        {"a": rows(30, 70), "b": rows(31, 70), "c": rows(32, 154)},
        "'weight' may have other units at c: its mean is",
    ),
    "pounds": (
        {"a": rows(30, 70, scale=15), "b": rows(31, 70, scale=15), "c": rows(32, 154, scale=33)},
        "'weight' may have other units at c",
    ),
    "same units": ({"a": rows(30, 70), "b": rows(31, 71), "c": rows(32, 70)}, ""),
    "level": ({"a": rows(30), "b": rows(31), "c": rows(32, ward="i c u")}, "one client alone has 'i c u' (c)"),
    "spelled": ({"a": rows(30), "b": rows(31, ward="ICU"), "c": rows(32)}, "one is meant by 'icu' and 'ICU'"),
    "lacking": ({"a": rows(30), "b": "ward,died\nicu,0\ner,1\n"}, "b has no value in the column 'weight'"),
    "constant": ({"a": rows(30).replace(",icu", ",er"), "b": rows(31, ward="er")}, "left out: ward"),
    "one class": ({"a": rows(30), "b": "weight,died\n1,0\n0.5,0\n"}, "all training rows of b are of the class '0'"),
    "one client": ({"a": rows(30)}, "are one client's: say by --data.client"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_a_person_should_know_is_named(case, tmp_path):
    files, words = NAMED[case]
    data = loaded(folder(tmp_path, **files), batch_size=2)
    assert words in said(data) if words else said(data) == ""


def test_layouts_of_files_are_one_table(tmp_path):
    """Semicolons, decimal commas, a byte order mark, another order of columns and pandas' index."""
    plain = "age,ward,died\n" + "".join(f"{k}.5,{'icu' if k % 3 else 'er'},{k % 2}\n" for k in range(24))
    table = pd.read_csv(folder(tmp_path, x=plain) + "/x.csv")
    (tmp_path / "x.csv").unlink()
    table.to_csv(tmp_path / "a.csv", index=True)
    table[["died", "age", "ward"]].to_csv(tmp_path / "b.csv", sep=";", decimal=",", encoding="utf-8-sig", index=False)
    (tmp_path / "c.csv").write_text("sep=\t\n" + table.rename(columns={"age": " Age"}).to_csv(sep="\t", index=False))
    data = loaded(str(tmp_path))
    assert data.preparation.inputs == ["age", "ward = er", "ward = icu"]
    own = [
        torch.cat([each[:, None] if each.dim() == 1 else each for each in d.tensors], 1)
        for d in data.data.train.values()
    ]
    first, *others = [each[each[:, 0].sort().indices] for each in own]
    assert all(torch.equal(first, each) for each in others)


def test_one_file_with_clients_whose_names_a_person_reads_as_one(tmp_path):
    lines = [
        f"{name},{k}.5,{k % 2}" for k, name in enumerate(["Ward A", "ward  a", "Ward A\u200b", "B", "B ", "b"] * 4)
    ]
    folder(tmp_path, t="\n".join(["h,age,died", *lines]))
    data = loaded(str(tmp_path / "t.csv"), client="h")
    assert {n: len(own) for n, own in data.data.train.items()} == {"B": 12, "Ward A": 12}
    assert "one client is meant by 'Ward A' and 'ward  a'" in said(data)


def test_rows_are_held_out_within_each_client_by_class(tmp_path):
    data = loaded(folder(tmp_path, a=labelled(*"0001" * 10), b=labelled(*"01" * 10)), held_out=0.3)
    counts = {n: own.tensors[1].bincount().tolist() for n, own in data.data.test.items()}
    assert counts == {"a": [9, 3], "b": [3, 3]}
    train = {n: own.tensors[1].bincount().tolist() for n, own in data.data.train.items()}
    assert train == {"a": [21, 7], "b": [7, 7]}
    weights = compute_class_weight("balanced", classes=np.arange(2), y=np.repeat([0, 1], [28, 14]))
    assert data.class_weights == pytest.approx(weights.tolist())


def test_the_majoritys_rate_stands_beside_the_classes():
    (line,) = Preparation([], Label("died", ["no", "yes"], [3, 1])).lines()
    assert line[2] == "no (3), yes (1); yes is the positive one; who always answers no has accuracy 0.750"


def test_identifiers_are_left_out_unless_they_are_asked_for(tmp_path):
    text = "patient,row,age,name,died\n" + "".join(f"{123456789 + 7 * k},{k},{k % 5},n{k},{k % 2}\n" for k in range(30))
    data = loaded(folder(tmp_path, a=text, b=text, c=text.replace("123456", "S-")))  # each writes its own
    assert data.preparation.inputs == ["age"]
    assert set(data.preparation.left_out) == {"patient", "row", "name"}
    chosen = loaded(str(tmp_path / "a.csv"), kinds={"patient": "number"}, features=["patient"])
    x = chosen.data.train["a"].tensors[0][:, 0].sort().values
    torch.testing.assert_close(x.diff(), x.diff()[:1].expand(29), rtol=1e-4, atol=0)


def test_parquet_reads_as_the_same_csv(tmp_path):
    """Written as others than pandas do: whole numbers with gaps, which a float64 would round."""
    pyarrow = pytest.importorskip("pyarrow", reason="reads and writes Parquet")
    content = {
        "id": [2**53 + 1, None, 3, 4],
        "age": [63.0, 41.5, None, 50.25],
        "day": [datetime.date(2024, 1, 31), None, datetime.date(2024, 2, 1), datetime.date(2024, 2, 2)],
        "on": [True, False, None, True],
        "dose": [Decimal("1.10"), Decimal("2.20"), None, Decimal("0.05")],
        "ward": ["ICU", None, "ward é", "ICU"],
        "died": [0, 1, 1, 0],
    }
    for kind in ("parquet", "csv"):
        (tmp_path / kind).mkdir()
    importlib.import_module("pyarrow.parquet").write_table(pyarrow.table(content), tmp_path / "parquet" / "a.parquet")
    pd.DataFrame(content, dtype=object).to_csv(tmp_path / "csv" / "a.csv", index=False)
    found, expected = (loaded(str(tmp_path / kind), kinds={"id": "category"}) for kind in ("parquet", "csv"))
    assert found.preparation == expected.preparation
    assert "id = 9007199254740993" in found.preparation.inputs
    torch.testing.assert_close(found.data.train["a"].tensors, expected.data.train["a"].tensors, rtol=0, atol=0)


def test_a_file_that_is_no_parquet_and_a_missing_package_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"")
    if find_spec("pyarrow"):
        assert_refused("cannot be read as a Parquet file", loaded, str(tmp_path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr(pd, "read_parquet", lambda *_, **__: __import__("pyarrow"))
    assert_refused("pip install pyarrow", loaded, str(tmp_path))


def classifier(data):
    return Classifier(MLPBackbone(data.data_shape, [4]), torch.nn.Linear(4, data.outputs))


def test_balanced_classes_weigh_alike(tmp_path):
    data = loaded(folder(tmp_path, a=labelled(*"0001" * 5), b=labelled(*"0001" * 5)), batch_size=64)
    module = classifier(data)
    module.balanced = True
    quiet(tmp_path, max_epochs=1, callbacks=[FederationCallback()], enable_checkpointing=False).fit(
        module, datamodule=data
    )
    outputs, y = torch.randn(8, 2), torch.tensor([0, 0, 0, 1] * 2)
    each = torch.nn.functional.cross_entropy(outputs, y, reduction="none")
    expected = 0.5 * each[y == 0].mean() + 0.5 * each[y == 1].mean()
    assert float(module.train().loss(outputs, y)) == pytest.approx(float(expected))
    assert float(module.eval().loss(outputs, y)) == pytest.approx(float(each.mean()))


def quiet(tmp_path, **options):
    return Trainer(
        default_root_dir=tmp_path, logger=False, enable_progress_bar=False, enable_model_summary=False, **options
    )


def test_private_runs_refuse_sums_and_take_ranges(tmp_path):
    path = folder(tmp_path, a=rows(40), b=rows(41))
    noise = RecordNoise(1.0, target_epsilon=3.0, ledger=str(tmp_path / "ledger"))

    def fit(**options):
        data = loaded(path, held_out=0.2, **options)
        callback = FederationCallback(mechanism=noise)
        quiet(tmp_path, max_epochs=1, callbacks=[callback], enable_checkpointing=False).fit(
            classifier(data), datamodule=data
        )
        return data

    assert_refused("which RecordNoise does not hide: give --data.preparation FILE", fit)
    fit(unprotected_sums=True)
    features = [{"name": "weight", "kind": "number", "range": [-6, 6]}]
    features.append({"name": "ward", "kind": "category", "levels": ["er", "icu"]})
    (tmp_path / "p.yaml").write_text(
        json.dumps({"features": features, "target": {"name": "died", "classes": ["0", "1"]}})
    )
    data = fit(preparation=str(tmp_path / "p.yaml"))
    x = data.data.train["a"].tensors[0]
    assert x[:, 1:].sum(1).tolist() == [1] * len(x)
    raw = pd.read_csv(tmp_path / "a.csv")["weight"].to_numpy() / (12 / np.sqrt(12))
    assert np.isin(x[:, 0].numpy().round(4), raw.astype(np.float32).round(4)).all()


@pytest.mark.slow
def test_fit_test_and_predict_need_no_more_than_a_path_and_a_label(tmp_path, monkeypatch, capsys):
    """The width and the classes follow the table; what was fitted goes with the checkpoint to other rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h").mkdir()
    folder(tmp_path / "h", a=rows(40), b=rows(41) + "\n0.3,er,\n")
    words = ["--config", "table_classifier.yaml", "--data.label", "died", "--data.path"]
    assert main(["fit", *words, "h", "--trainer.max_epochs", "2"]) == 0
    said = capsys.readouterr()
    assert "The network takes 3 inputs and gives 2" in said.err
    assert "1 is the positive one" in said.out
    assert main(["test", *words, "h"]) == 0
    tested = pd.read_csv("runs/table_classifier/test_clients.csv", index_col="client")
    assert {"accuracy", "majority", "auroc", "average_precision", "calibration_error"} <= set(tested)
    assert tested["majority"].tolist() == [0.5, 0.5]
    assert main(["predict", *words, "h"]) == 0
    first = pd.read_csv("runs/table_classifier/predictions.csv")
    assert first[["split", "client", "row"]].to_numpy().tolist() == [["unlabelled", "b", "h/b.csv, line 43"]]
    (tmp_path / "new").mkdir()
    folder(tmp_path / "new", c="ward,weight\ner,0.3\nnowhere,\n")
    assert main(["predict", *words, "new"]) == 0
    again = pd.read_csv("runs/table_classifier/predictions.csv")
    assert again["probability"][0] == pytest.approx(first["probability"][0], abs=1e-6)
    assert len(again) == 2
    assert main(["fit", *words, "h", "--model.backbone.data_shape", "[4]"]) == 2
    assert "model.backbone.data_shape follows the data: leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_a_number_is_predicted_in_its_own_unit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h").mkdir()
    text = "x,stay\n" + "".join(f"{k % 20},{100 + 3 * (k % 20)}\n" for k in range(200))
    folder(tmp_path / "h", a=text, b=text)
    words = ["--config", "table_regression.yaml", "--data.label", "stay", "--data.path", "h"]
    assert main(["fit", *words]) == 0
    assert main(["predict", *words]) == 0
    found = pd.read_csv("runs/table_regression/predictions.csv")["stay"]
    assert 95 < found.min() < 110
    assert 145 < found.max() < 165


def test_a_checkpoint_holds_the_preparation_as_data(tmp_path):
    data = loaded(folder(tmp_path, a=rows(40), b=rows(41)))
    kept = data.state_dict()
    assert json.loads(json.dumps(kept)) == kept
    (tmp_path / "n").mkdir()
    other = loaded(folder(tmp_path / "n", a=rows(50, 3)), held_out=0.5)
    before = other.data.train["a"].tensors[0]
    other.load_state_dict(kept)
    assert other.preparation == data.preparation
    assert not torch.equal(other.data.train["a"].tensors[0], before)
    with pytest.raises(UserError, match="the checkpoint is no preparation"):
        other.load_state_dict({"preparation": {}})


def test_one_client_or_all_in_one_place_trains_while_each_is_tested(tmp_path):
    path = folder(tmp_path, a=rows(40), b=rows(20))
    both = loaded(path, held_out=0.2).data
    pooled, alone = (loaded(path, held_out=0.2, trained_on=who) for who in ("pooled", "b"))
    whole = torch.cat([own.tensors[0] for own in both.train.values()])
    assert torch.equal(pooled.data.train[pooled.client_names[-1]].tensors[0], whole)
    assert [client.records for client in pooled.clients] == [0, 0, 48]
    assert [client.records for client in alone.clients] == [0, 16]
    assert {n: len(own) for n, own in pooled.data.test.items()} == {n: len(own) for n, own in both.test.items()}
    assert pooled._notes == []
    assert_refused("data.trained_on is 'c'; it is pooled, or one of a, b", loaded, path, trained_on="c")
