"""Vehicle's published MATLAB file, in miniature and broken."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import savemat

from lit_epgan.datamodules import VehicleDataModule
from lit_epgan.errors import UserError

SENSORS, WIDTH = 7, 4


def cells(values: list[Any]) -> np.ndarray:
    column = np.empty((len(values), 1), dtype=object)
    column[:, 0] = values
    return column


def content(sizes: Any = (20,) * SENSORS) -> dict[str, np.ndarray]:
    """X_k (n_k, d) and Y_k (n_k, 1); a row's first number says where it is from."""
    generator = np.random.default_rng(0)
    x = [generator.normal(size=(n, WIDTH)) for n in sizes]
    for k, rows in enumerate(x):
        rows[:, 0] = 100 * k + np.arange(len(rows))
    return {"X": cells(x), "Y": cells([np.where(np.arange(n) % 4 == 0, -1, 1)[:, None].astype(float) for n in sizes])}


def vehicle(folder: Path, written: dict[str, np.ndarray] | None = None, **options: Any) -> VehicleDataModule:
    savemat(folder / "vehicle.mat", content() if written is None else written)
    return VehicleDataModule(str(folder), **{"batch_size": 4, "location": 0, "scale": 1, **options})


def test_the_first_sensors_are_the_sites(tmp_path: Path) -> None:
    module = vehicle(tmp_path, losing=0)
    data = module.load()
    assert list(data.train) == [f"sensor-{k}" for k in range(1, 7)]
    assert isinstance(data.test, dict)
    for k, name in enumerate(data.train):
        x, y = (torch.cat(pair) for pair in zip(data.train[name].tensors, data.test[name].tensors, strict=True))
        assert sorted((x[:, 0] - 100 * k).tolist()) == list(range(20))
        assert y.tolist() == [int(row % 100 % 4 != 0) for row in x[:, 0].tolist()]
    assert module.columns == ["0", "1", "2", "3"]
    assert module.label_names == ["-1", "1"]


def test_the_last_sensors_have_lost_samples_but_no_test_data(tmp_path: Path) -> None:
    """Of 20 samples 5 are negative and 15 positive; of these round(1.5) = 2 and round(4.5) = 4 are test data."""
    data = vehicle(tmp_path, kept=[0.0, 0.5]).load()
    assert [own.tensors[1].bincount().tolist() for own in data.train.values()] == [[3, 11]] * 3 + [[1, 6]] * 3
    assert isinstance(data.test, dict)
    assert {tuple(own.tensors[1].bincount().tolist()) for own in data.test.values()} == {(2, 4)}


def test_a_site_that_has_lost_its_samples_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'sensor-6': 2 training records do not determine the covariance of 4 columns"):
        vehicle(tmp_path, kept=0.01).load()


def test_a_missing_file_is_named_with_its_place(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"no {tmp_path}/vehicle.mat: place vehicle.mat \(from https://github.com"):
        VehicleDataModule(str(tmp_path)).load()


def spoilt(name: str, sensor: int, value: Any) -> dict[str, np.ndarray]:
    written = content()
    written[name][sensor, 0] = value
    return written


BROKEN = {
    "no cells": ({"X": np.ones((3, 4)), "Y": np.ones((3, 1))}, "no cell arrays X and Y"),
    "no labels": ({"X": content()["X"]}, "no cell arrays X and Y"),
    "fewer labels": ({"X": content()["X"], "Y": content()["Y"][:3]}, "no cell arrays X and Y of one length"),
    "short": (spoilt("Y", 1, np.ones((3, 1))), r"sensor 2: X is \(20, 4\) and Y \(3, 1\)"),
    "text": (spoilt("X", 2, "abc"), "sensor 3: X is"),
    "labels": (spoilt("Y", 0, np.full((20, 1), 2.0)), "sensor 1: Y holds other labels than -1 and 1"),
    "width": (spoilt("X", 3, np.ones((20, 3))), r"the sensors have \[3, 4\] features"),
    "nan": (spoilt("X", 4, np.full((20, 4), np.nan)), "site 'sensor-5': nan in the column '0', row 1"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_one_sentence(kind: str, tmp_path: Path) -> None:
    written, words = BROKEN[kind]
    with pytest.raises(UserError, match=words) as caught:
        vehicle(tmp_path, written).load()
    assert "\n" not in str(caught.value)


def test_too_many_sites_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.sites is 8, but .* has 7 sensors"):
        vehicle(tmp_path, sites=8).load()


def test_what_is_no_matlab_file_is_one_sentence(tmp_path: Path) -> None:
    whole = vehicle(tmp_path)
    whole.path.write_bytes(whole.path.read_bytes()[:300])
    with pytest.raises(UserError, match="no whole MATLAB file"):
        whole.load()
    whole.path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(UserError, match=r"format 7\.3: save it anew"):
        whole.load()
