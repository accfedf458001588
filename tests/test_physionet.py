"""PhysioNet 2012's published files, in miniature and broken."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lit_epgan.datamodules import PhysioNet2012DataModule
from lit_epgan.datamodules.physionet2012_parameters import DESCRIPTORS, SERIES
from lit_epgan.errors import UserError

STAYS = {
    132539: "Age,54 Gender,0 Height,-1 ICUType,4 Weight,-1",
    132540: "Age,76 Gender,1 Height,175.3 ICUType,2 Weight,80",
    132541: "Age,44 Gender,-1 Height,1.8 ICUType,3 Weight,0",
}
LATER = {
    132539: ["00:07,HR,73", "10:07,HR,65", "02:07,HR,90", "11:00,pH,735", "12:00,pH,7.3", "13:00,Lactate,0"],
    132540: ["10:00,Weight,82"],
}


def write(folder: Path, stays: dict[int, list[str]], died: dict[int, int]) -> None:
    (folder / "set-a").mkdir(exist_ok=True)
    for record, lines in stays.items():
        head = ["Time,Parameter,Value", f"00:00,RecordID,{record}"]
        (folder / "set-a" / f"{record}.txt").write_text("\n".join([*head, *lines]) + "\n")
    rows = [f"{record},6,1,5,-1,{death}" for record, death in died.items()]
    head = "RecordID,SAPS-I,SOFA,Length_of_stay,Survival,In-hospital_death"
    (folder / "Outcomes-a.txt").write_text("\n".join([head, *rows]) + "\n")


def miniature(folder: Path, **options: Any) -> PhysioNet2012DataModule:
    admissions = {record: [f"00:00,{each}" for each in text.split()] for record, text in STAYS.items()}
    stays = {record: lines + LATER.get(record, []) for record, lines in admissions.items()}
    write(folder, stays, {132539: 0, 132541: 1, 132540: 0})
    return PhysioNet2012DataModule(str(folder), batch_size=4, **options)


def values(module: PhysioNet2012DataModule) -> tuple[dict[str, list[float]], Tensor]:
    table = module.whole()
    return dict(zip(module.columns, table.features.T.tolist(), strict=True)), table.labels


def test_a_stays_features_by_hand(tmp_path: Path) -> None:
    """Records come as the outcomes do: 132539, 132541, 132540."""
    module = miniature(tmp_path)
    columns, labels = values(module)
    assert labels.tolist() == [0, 1, 0]
    assert module.label_names == ["survived", "died"]
    assert columns["Age"] == [54, 44, 76]
    assert columns["Gender"] == [0, 0.5, 1]  # unknown: between both
    assert columns["Height"] == [170, 170, 175.3]  # -1 is unknown, 1.8 a slip
    assert columns["ICU surgical"] == [1, 0, 0]
    assert columns["ICU medical"] == [0, 1, 0]
    assert columns["ICU cardiac surgery"] == [0, 0, 1]
    assert columns["ICU coronary"] == [0, 0, 0]
    assert columns["HR mean"] == [pytest.approx(76), 75, 75]
    assert columns["pH mean"] == [7.3, 7.4, 7.4]  # 735 is none
    assert columns["Lactate mean"] == [0, 1.2, 1.2]  # 0 is a value
    assert columns["Weight mean"] == [75, 75, 81]
    assert len(columns) == 3 + 4 + 37


def test_statistics_go_by_time_and_not_by_line(tmp_path: Path) -> None:
    columns, _ = values(miniature(tmp_path, statistics=["first", "last", "min", "max"]))
    heart = {name: columns[f"HR {name}"][0] for name in ("first", "last", "min", "max")}
    assert heart == {"first": 73, "last": 65, "min": 65, "max": 90}
    assert len(columns) == 3 + 4 + 4 * 37


def test_what_stands_for_a_missing_value_is_possible() -> None:
    every = DESCRIPTORS | SERIES
    assert all(p.low <= p.normal <= p.high for name, p in every.items() if name != "ICUType")
    assert all(p.low > -1 for p in every.values())  # -1 means unknown
    assert len(SERIES) == 37


def test_stays_go_to_hospitals_in_the_papers_ratios(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    stays = {
        1000 + k: [f"00:00,Age,{generator.integers(20, 90)}", "00:00,ICUType,1", f"01:00,HR,{generator.normal(80, 9)}"]
        for k in range(140)
    }
    write(tmp_path, stays, {record: int(record % 7 == 0) for record in stays})  # 20 deaths, 120 survivors
    data = PhysioNet2012DataModule(str(tmp_path), batch_size=4, features=["Age", "HR mean"], test_fraction=0).load()
    left = {name: own.tensors[1].bincount().tolist() for name, own in data.train.items()}
    assert left == {"site-1": [35, 7], "site-2": [35, 7], "site-3": [36, 6]}
    assert data.train["site-1"].tensors[0].dtype == torch.float32


def line(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "set-a" / "132541.txt").write_text("Time,Parameter,Value\n00:00,Age,4\n" + text)


def outcomes(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "Outcomes-a.txt").write_text(text)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no outcomes": (lambda f: (f / "Outcomes-a.txt").unlink(), "place Outcomes-a.txt and the unpacked folder set-a"),
    "no stay": (lambda f: (f / "set-a" / "132540.txt").unlink(), "132540.txt is missing, but Outcomes-a.txt names it"),
    "text": (line("00:07,HR,high\n"), "132541.txt, line 3: the value is no number"),
    "ragged": (line("00:07,HR,1,2\n"), "132541.txt cannot be read"),
    "other columns": (
        lambda f: (f / "set-a" / "132541.txt").write_text("a,b\n1,2\n"),
        "132541.txt has no column 'Time'",
    ),
    "no death": (outcomes("RecordID,SOFA\n132541,1\n"), "Outcomes-a.txt has no column 'In-hospital_death'"),
    "death": (outcomes("RecordID,In-hospital_death\n132541,2\n"), "with a death of 0 or 1"),
    "twice": (outcomes("RecordID,In-hospital_death\n132541,1\n132541,0\n"), "give every record once"),
    "empty": (outcomes("RecordID,In-hospital_death\n"), "give every record once"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_one_sentence(kind: str, tmp_path: Path) -> None:
    module = miniature(tmp_path)
    change, words = BROKEN[kind]
    change(tmp_path)
    with pytest.raises(UserError, match=words) as caught:
        module.load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("statistics", [[], ["median"]])
def test_unknown_statistics_are_refused(statistics: Any) -> None:
    with pytest.raises(UserError, match="choose some of mean, first"):
        PhysioNet2012DataModule(statistics=statistics)
