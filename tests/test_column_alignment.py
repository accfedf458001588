"""Sites with a table each: their columns meet by salted hashes, and what differs between sites is found and named."""

import hashlib
import hmac
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_epgan.datamodules import SitesDataModule
from lit_epgan.datamodules.alignment import (
    column_hash,
    conversion_between,
    different_categories,
    different_units,
    hashed,
    hashed_columns,
    normalised,
    offer,
    split_unit,
    without_unit,
)
from lit_epgan.errors import UserError

SALT = bytes(range(32))


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Heart Rate", " heart_rate", "HEART-RATE ", "\uff48eart  rate", "heart.rate"])
def test_names_that_people_write_differently_are_one(name: str) -> None:
    assert normalised(name) == "heart_rate"
    assert column_hash(name, SALT) == column_hash("heart rate", SALT)


def test_a_hash_is_hmac_sha256_and_needs_the_salt() -> None:
    expected = hmac.new(SALT, b"column\0heart_rate", hashlib.sha256).hexdigest()
    assert column_hash("Heart rate [1/min]", SALT) == expected
    assert column_hash("heart rate", SALT[::-1]) != expected
    assert hashed("unit", "m", SALT) != hashed("column", "m", SALT)


def test_a_salt_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UserError, match="the salt has 15 bytes: draw at least 16"):
        column_hash("age", bytes(15))


def test_a_site_tells_hashes_alone() -> None:
    own = hashed_columns(["Weight [kg]", "sex"], "mill", SALT)
    told = offer(own, {column_hash("sex", SALT): {"male", "female"}}, SALT)
    words = repr(told).casefold()
    assert not [word for word in ("weight", "kg", "sex", "male", "mill") if word in words]
    assert all(len(text) == 64 for text in (*told.units, *filter(None, told.units.values())))


@pytest.mark.parametrize(
    ("column", "parts"),
    [
        ("weight [kg]", ("weight", "kg")),
        ("weight (LBS)", ("weight", "lb")),
        ("weight_kg", ("weight", "kg")),
        ("creatinine [µmol/L]", ("creatinine", "umol/l")),  # the micro sign
        ("creatinine [μmol / l]", ("creatinine", "umol/l")),  # the Greek letter
        ("score [points]", ("score", "points")),
        ("hr (min)", ("hr (min)", "")),  # the least heart rate, not minutes
        ("hr_min", ("hr_min", "")),
        ("vitamin_c", ("vitamin_c", "")),
        ("blood type", ("blood type", "")),
        ("age (years)", ("age", "year")),
    ],
)
def test_units_are_read_from_names(column: str, parts: tuple[str, str]) -> None:
    assert split_unit(column) == parts


def offers(**sites: list[str]) -> dict[str, Any]:
    return {site: offer(hashed_columns(columns, site, SALT), {}, SALT) for site, columns in sites.items()}


def test_units_differ_where_both_are_stated() -> None:
    told = offers(a=["weight [kg]", "height [cm]", "dose"], b=["Weight_lb", "height_cm", "dose [mg]"], c=["weight"])
    assert different_units(told) == [(column_hash("weight", SALT), "b", "a")]
    assert set(without_unit(told)) == {column_hash("weight", SALT), column_hash("dose", SALT)}


def test_categories_differ_where_each_site_has_one_that_the_other_lacks() -> None:
    sex = column_hash("sex", SALT)
    sets = {"a": {"m", "f"}, "b": {"m"}, "c": {"male", "f"}}
    told = {site: offer(hashed_columns(["sex"], site, SALT), {sex: values}, SALT) for site, values in sets.items()}
    assert different_categories(told) == [(sex, "c", "a"), (sex, "c", "b")]


KILOGRAMS = (62.0, 72.0, 84.0)


def scaled(factor: float, offset: float = 0.0) -> tuple[float, float, float]:
    low, middle, high = (factor * x + offset for x in KILOGRAMS)
    return low, middle, high


def test_quartiles_betray_a_change_of_units() -> None:
    found = conversion_between(KILOGRAMS, scaled(2.2046))
    assert found is not None
    assert (found[0].of, found[0].to, found[1]) == ("kg", "lb", True)
    backwards = conversion_between(scaled(2.2046 * 1.05), KILOGRAMS)  # heavier patients by five per cent
    assert backwards is not None
    assert (backwards[0].of, backwards[1]) == ("kg", False)
    fever = conversion_between((36.6, 36.9, 37.3), (97.9, 98.5, 99.2))
    assert fever is not None
    assert fever[0].to == "Fahrenheit"


def test_middle_halves_that_overlap_betray_none() -> None:
    assert conversion_between((20.0, 72.0, 200.0), (44.1, 158.7, 440.9)) is None


@pytest.mark.parametrize(
    "others",
    [
        scaled(5),  # no known factor is near
        (150.0, 158.7, 160.0),  # the right median but another spread
        (300.0, 300.0, 300.0),  # a constant has no spread
        (-140.0, -158.7, -185.0),  # no multiple of anything positive
    ],
)
def test_quartiles_that_differ_otherwise_betray_none(others: tuple[float, float, float]) -> None:
    assert conversion_between(KILOGRAMS, others) is None


# Files ----------------------------------------------------------------------------------------------------------------


def table(site: str, weight: float = 72.0, records: int = 20) -> dict[str, list[Any]]:
    """Twenty patients of a site."""
    generator = np.random.default_rng(sum(map(ord, site)))
    return {
        "weight": np.round(generator.normal(weight, weight / 8, records), 1).tolist(),
        "age": generator.integers(30, 90, records).tolist(),
        "sex": ["f", "m"] * (records // 2),
        "label": ["ill", "well", "well", "ill"] * (records // 4),
    }


def write(folder: Path, **tables: dict[str, list[Any]]) -> Path:
    for site, columns in tables.items():
        lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True))]
        (folder / f"{site}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")
    return folder


def renamed(columns: dict[str, list[Any]], **names: str) -> dict[str, list[Any]]:
    return {names.get(name, name): values for name, values in columns.items()}


def sites(folder: Path, **options: Any) -> SitesDataModule:
    defaults = {"features": ["weight", "age"], "batch_size": 4, "location": 0, "scale": 1, "test_fraction": 0}
    return SitesDataModule(str(folder), **{**defaults, **options})


def refused(folder: Path, words: str, **options: Any) -> bool:
    """Whether the tables are refused in one line that holds these words."""
    with pytest.raises(UserError) as caught:
        sites(folder, **options).load()
    return re.search(words, str(caught.value)) is not None and "\n" not in str(caught.value)


def test_columns_meet_whatever_their_order_and_spelling(tmp_path: Path) -> None:
    first, second = table("mill"), table("dale")
    turned = dict(reversed(list(renamed(second, weight=" Weight [kg]", age="AGE", label="Label").items())))
    write(tmp_path, dale=turned, mill=renamed(first, weight="weight_kg"))
    module = sites(tmp_path)
    data = module.load()
    assert list(data.train) == ["dale", "mill"]
    assert module.columns == ["Weight [kg]", "AGE"]
    assert module.label_names == ["ill", "well"]
    for name, own in (("mill", first), ("dale", second)):
        x, y = data.train[name].tensors
        expected = torch.tensor(sorted(zip(own["weight"], own["age"], strict=True)), dtype=torch.float32)
        assert torch.equal(x[np.lexsort(x.T.numpy()[::-1])], expected)
        assert y.bincount().tolist() == [10, 10]


def test_rows_keep_their_labels(tmp_path: Path) -> None:
    columns = table("mill")
    columns["label"] = ["10" if age > 60 else "9" for age in columns["age"]]
    module = sites(write(tmp_path, mill=columns), features=["age"])
    x, y = module.load().train["mill"].tensors
    assert torch.equal(y, (x[:, 0] > 60).long())
    assert module.label_names == ["9", "10"]  # as numbers


def test_files_can_be_named_one_by_one(tmp_path: Path) -> None:
    write(tmp_path, mill=table("mill"), dale=table("dale"))
    module = SitesDataModule({"a": str(tmp_path / "dale.csv")}, features=["age"], batch_size=4)
    assert list(module.load().train) == ["a"]


def test_categories_become_indicators(tmp_path: Path) -> None:
    write(tmp_path, mill=table("mill"), dale=table("dale"))
    for given, columns in ((None, ["age", "sex=f", "sex=m"]), (["m", "f", "x"], ["age", "sex=m", "sex=f", "sex=x"])):
        module = sites(tmp_path, features=["age", "sex"], categories={"Sex": given}, doubtful="warn")
        if given is None:
            data = module.load()
        else:
            with pytest.warns(UserWarning, match="site 'dale'.* same value in the column 'sex=x'"):
                data = module.load()
        x, _ = data.train["mill"].tensors
        assert module.columns == columns
        assert x[:, 1:3].sum(0).tolist() == [10, 10]
        assert (x[:, 1:].sum(1) == 1).all()


def test_a_missing_column_is_refused_with_both_sites(tmp_path: Path) -> None:
    lacking = {name: values for name, values in table("mill").items() if name != "weight"}
    write(tmp_path, mill=lacking, dale=table("dale"))
    assert refused(tmp_path, "site 'mill' has no column 'weight', but site 'dale' has.*--data.missing mask")
    assert sites(tmp_path, features=["age"]).load()


def test_a_missing_column_is_masked_where_asked(tmp_path: Path) -> None:
    whole, lacking = table("dale"), {k: v for k, v in table("mill").items() if k != "weight"}
    write(tmp_path, mill=lacking, dale=whole)
    module = sites(tmp_path, missing="mask", location=None, scale=None)
    with pytest.warns(UserWarning, match="site 'mill' has no column 'weight': it is filled by 0"):
        data = module.load()
    assert {site: seen.tolist() for site, seen in module.observed.items()} == {
        "dale": [True, True],
        "mill": [False, True],
    }
    assert (data.train["mill"].tensors[0][:, 0] == 0).all()
    observed = torch.tensor(whole["weight"], dtype=torch.float64)
    expected = (observed - observed.mean()) / observed.std(correction=0)
    torch.testing.assert_close(data.train["dale"].tensors[0][:, 0].sort()[0], expected.float().sort()[0])


def test_units_that_names_state_are_compared(tmp_path: Path) -> None:
    pounds = renamed(table("mill", 158.0), weight="weight [lb]")
    write(tmp_path, mill=pounds, dale=renamed(table("dale"), weight="Weight (kg)"))
    assert refused(
        tmp_path, r"'Weight \(kg\)' has different units: site 'dale' has 'Weight \(kg\)' and site 'mill' 'weight \["
    )


def test_units_that_names_do_not_state_are_found_by_their_factor(tmp_path: Path) -> None:
    columns = table("mill")
    columns["weight"] = [round(2.2046 * x, 1) for x in columns["weight"]]
    write(tmp_path, mill=columns, dale=renamed(table("dale"), weight="weight [kg]"))
    assert refused(tmp_path, "differs between sites as kg and lb do, since site 'dale' has a median of 7")
    write(tmp_path, mill=renamed(columns, weight="weight [kg]"))  # states what it is: heavy patients
    assert sites(tmp_path).load()


def test_categories_of_other_names_are_found(tmp_path: Path) -> None:
    columns = table("mill")
    columns["sex"] = [{"f": "female", "m": "male"}[value] for value in columns["sex"]]
    write(tmp_path, mill=columns, dale=table("dale"))
    both: dict[str, Any] = {"features": ["age", "sex"], "categories": {"sex": None}}
    assert refused(tmp_path, "'mill' has 'female', 'male' in the column 'sex' where site 'dale' has 'f', 'm'", **both)
    both["categories"] = {"sex": ["f", "m"]}
    assert refused(
        tmp_path, "site 'mill', line 2: the column 'sex' holds 'female', which data.categories does not name", **both
    )


def test_classes_of_other_names_are_found(tmp_path: Path) -> None:
    columns = table("mill")
    columns["label"] = ["1" if value == "ill" else "0" for value in columns["label"]]
    write(tmp_path, mill=columns, dale=table("dale"))
    assert refused(tmp_path, "site 'mill' has '0', '1' in the column 'label' where site 'dale' has 'ill', 'well'")
    assert refused(
        tmp_path, "site 'mill', line 2: the column 'label' holds '1', which data.classes", classes=["ill", "well"]
    )


def cell(column: str, value: str) -> dict[str, list[Any]]:
    columns = table("mill")
    columns[column][3] = value
    return columns


FAULTS = {
    "text": (cell("age", "old"), "site 'mill', line 5: the column 'age' holds 'old', which is no finite number"),
    "infinite": (cell("age", "inf"), "site 'mill', line 5: the column 'age' holds 'inf', which is no finite number"),
    "empty": (cell("age", ""), "site 'mill', line 5: the column 'age' is empty"),
    "nan": (cell("weight", "NaN"), "site 'mill', line 5: the column 'weight' is empty"),
    "no label": (cell("label", ""), "site 'mill', line 5: the column 'label' is empty"),
    "one class": (
        table("mill") | {"label": ["ill"] * 20},
        "site 'mill': all 20 training labels are of the class 'ill'",
    ),
    "constant": (table("mill") | {"age": [50] * 20}, "site 'mill'.* the same value in the column 'age'"),
    "no label column": (renamed(table("mill"), label="outcome"), "site 'mill' has no column 'label', only weight"),
    "twice": (table("mill") | {"Age": [50] * 20}, "site 'mill' has the columns 'age' and 'Age', which are one"),
    "no name": (renamed(table("mill"), sex=""), "mill.csv has no name for column 3"),
    "no rows": ({name: [] for name in table("mill")}, "mill.csv has no rows"),
    "ragged": (cell("age", "5,6,7"), "site 'mill': .*mill.csv cannot be read as a CSV file"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_faulty_file_is_one_sentence_with_site_and_column(kind: str, tmp_path: Path) -> None:
    columns, words = FAULTS[kind]
    assert refused(write(tmp_path, mill=columns, dale=table("dale")), words)


def test_missing_files_and_wrong_settings_are_one_sentence(tmp_path: Path) -> None:
    assert refused(tmp_path, "no SITE.csv in .*: place a CSV table for each site there")
    with pytest.raises(UserError, match=r"site 'a': there is no file .*absent.csv"):
        SitesDataModule({"a": str(tmp_path / "absent.csv")}).load()
    with pytest.raises(UserError, match=r"data\.missing is 'drop': choose refuse or mask"):
        SitesDataModule(missing="drop")  # type: ignore[arg-type]
    write(tmp_path, mill=table("mill"), dale=table("dale"))
    assert refused(tmp_path, "data.features names height, which no site has", features=["height"])
    assert refused(tmp_path, "data.categories names race, which no site has", categories={"race": None})
    assert refused(tmp_path, "data.features names 'label', which is the label", features=["age", "label"])
    assert refused(tmp_path, "'dale', line 2: the column 'sex' holds 'f', which is no finite number", features=None)
    write(tmp_path, mill={"label": ["a", "b"]}, dale={"label": ["a", "b"]})
    assert refused(tmp_path, "no columns of features beside 'label'", features=None)
