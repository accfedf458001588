"""Data sorted by users: LEAF's JSON, TensorFlow Federated's HDF5 and tables, in their public layouts and broken."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lit_epgan.datamodules import FederatedDataModule, FederatedEMNISTDataModule, LeafDataModule, TableDataModule
from lit_epgan.errors import UserError
from tests.users_tree import SIZES, images, leaf_content, write_emnist, write_leaf, write_table


def by_writer(kind: str, folder: Path, **options: Any) -> FederatedDataModule:
    if kind == "leaf":
        write_leaf(folder)
        return LeafDataModule(str(folder), batch_size=4, **options)
    write_emnist(folder)
    return FederatedEMNISTDataModule(str(folder), batch_size=4, **options)


@pytest.mark.parametrize("kind", ["leaf", "hdf5"])
def test_a_writers_images_are_its_own_with_a_dark_background(kind: str, tmp_path: Path) -> None:
    data = by_writer(kind, tmp_path, held_out=0.0)
    data.setup("fit")
    assert data.client_names == list(SIZES)
    for client, name in zip(data.clients, data.client_names, strict=True):
        x, y = images(name)
        (batch,) = client.batches(1, 1, "all")
        assert batch[0].shape == (min(4, SIZES[name]), 1, 28, 28)
        own = data.data.train[name]
        for k in range(SIZES[name]):
            image, label = own[k]
            torch.testing.assert_close(image[0], torch.from_numpy(1 - 2 * x[k]), rtol=0, atol=1e-6)
            assert int(label) == y[k]
    assert float(own[0][0][0, 0, 0]) == -1


@pytest.mark.parametrize("kind", ["leaf", "hdf5"])
def test_those_held_out_take_part_in_nothing_and_are_not_inverted(kind: str, tmp_path: Path) -> None:
    clean = by_writer(kind, tmp_path, held_out=0.25, clients=2).data
    faulty = by_writer(kind, tmp_path, held_out=0.25, clients=2, inverted=0.5).data
    assert len(clean.train) == 2
    assert list(clean.train) == list(faulty.train)
    flipped = [torch.allclose(faulty.train[n][0][0], -clean.train[n][0][0], atol=1e-6) for n in clean.train]
    assert sorted(flipped) == [False, True]
    assert float(faulty.test[0][0].mean()) < 0  # type: ignore[index]
    others = [name for name in SIZES if len(clean.test) == SIZES[name]]  # type: ignore[arg-type]
    assert len(others) == 1
    assert others[0] not in clean.train


def changed(content: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> str:
    change(content)
    return json.dumps(content)


FIRST = next(iter(SIZES))
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "truncated": (lambda c: json.dumps(c)[:2000], "is no whole JSON file"),
    "no object": (lambda c: "[1, 2]", "no list 'users'"),
    "wrong keys": (lambda c: changed(c, lambda c: c.pop("user_data")), "no object 'user_data'"),
    "user missing": (lambda c: changed(c, lambda c: c["user_data"].pop(FIRST)), "has no 'x' and 'y' of this user"),
    "no labels": (lambda c: changed(c, lambda c: c["user_data"][FIRST].pop("y")), "has no 'x' and 'y'"),
    "short image": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].pop()), "not numbers of one shape"),
    "all short": (lambda c: changed(c, lambda c: [x.pop() for x in c["user_data"][FIRST]["x"]]), r"\(3, 783\)"),
    "fewer labels": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].pop()), r"\(2,\)"),
    "text": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, "a")), "not numbers"),
    "nan": (
        lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, float("nan"))),
        "no number from",
    ),
    "bytes": (
        lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, 200)),
        "no number from 0 to 1",
    ),
    "label": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].__setitem__(0, 62)), "no class from 0 to 61"),
    "letter": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].__setitem__(0, "A")), "no class from 0 to 61"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_json_file_is_one_sentence(kind: str, tmp_path: Path) -> None:
    broken, words = BROKEN[kind]
    (tmp_path / "all_data_0.json").write_text(broken(leaf_content(list(SIZES)[:2])))
    with pytest.raises(UserError, match=words) as caught:
        LeafDataModule(str(tmp_path), batch_size=4).load()
    assert "all_data_0.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_writer_in_two_files_is_refused(tmp_path: Path) -> None:
    write_leaf(tmp_path)
    (tmp_path / "all_data_2.json").write_text(json.dumps(leaf_content([FIRST])))
    with pytest.raises(UserError, match=f"{FIRST}.* in another file"):
        LeafDataModule(str(tmp_path), batch_size=4).load()


def replaced(path: Path, name: str, values: Any) -> None:
    with h5py.File(path, "a") as file:
        del file[name]
        if values is not None:
            file.create_dataset(name, data=values)


def emptied(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("examples")


HDF5: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:3000]), "is no whole HDF5 file"),
    "text": (lambda p: p.write_text("pixels"), "is no whole HDF5 file"),
    "no examples": (lambda p: replaced(p, "examples", None), "no group 'examples'"),
    "examples are no group": (lambda p: replaced(p, "examples", [1.0]), "no group 'examples'"),
    "no writers": (emptied, "no group 'examples' of clients"),
    "no pixels": (lambda p: replaced(p, f"examples/{FIRST}/pixels", None), "no 'pixels' and 'label'"),
    "wrong shape": (lambda p: replaced(p, f"examples/{FIRST}/pixels", np.ones((3, 28, 27))), r"\(3, 28, 27\)"),
    "nan": (lambda p: replaced(p, f"examples/{FIRST}/pixels", np.full((3, 28, 28), np.nan)), "no number from 0 to 1"),
    "labels": (lambda p: replaced(p, f"examples/{FIRST}/label", [0.5, 1.0, 2.0]), "no class from 0 to 61"),
}


@pytest.mark.parametrize("kind", HDF5)
def test_a_broken_hdf5_file_is_one_sentence(kind: str, tmp_path: Path) -> None:
    write_emnist(tmp_path)
    change, words = HDF5[kind]
    change(tmp_path / "fed_emnist_train.h5")
    with pytest.raises(UserError, match=words) as caught:
        FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load()
    assert "fed_emnist_train.h5" in str(caught.value)


def test_missing_files_are_named_with_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=rf"place LEAF's all_data_\*.json.*in|not in {tmp_path}"):
        LeafDataModule(str(tmp_path), batch_size=4).load()
    with pytest.raises(UserError, match=r"place fed_emnist_train.h5 \(out of https"):
        FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load()
    with pytest.raises(UserError, match=r"there is no table .*absent.csv"):
        TableDataModule(str(tmp_path / "absent.csv"), batch_size=4).load()
    write_emnist(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"pip install lit_epgan\[hdf5\]"):
        FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load()


# Tables ---------------------------------------------------------------------------------------------------------------


def table(path: Path, **options: Any) -> TableDataModule:
    return TableDataModule(str(path), **{"user": "patient", "label": "outcome", "batch_size": 4, **options})


def test_a_users_rows_are_its_own(tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.csv")
    data = table(path, held_out=0.2, clients=3).load()
    assert len(data.train) == 3
    for name, own in data.train.items():
        x, y = own.tensors
        assert x[:, 0].tolist() == [int(name) * 10 + k for k in range(4)]
        assert x[:, 1].tolist() == [0.0, 0.5, 1.0, 1.5]
        assert y.tolist() == [1, 0, 1, 0]  # cat is 0
    held, _ = data.test.tensors
    assert len(held) == 4
    assert str(int(held[0, 0]) // 10) not in data.train
    chosen = table(path, features=["dose"], classes=["dog", "cat", "bird"], held_out=0.0).load()
    assert chosen.train["1"].tensors[0].shape == (4, 1)
    assert chosen.train["1"].tensors[1].tolist() == [0, 1, 0, 1]
    assert chosen.test is None


def test_classes_have_names_of_which_none_means_a_gap(tmp_path: Path) -> None:
    """NA is Namibia; where the file has blank lines, its own numbers count."""
    path = write_table(tmp_path / "table.csv", "patient,age,outcome\n\n1,2,10\n1,3,NA\n2,4,9\n")
    data = table(path, held_out=0.0)
    assert data.load().train["1"].tensors[1].tolist() == [1, 2]
    assert data.label_names == ["9", "10", "NA"]


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ("", {}, "no column 'patient': its first line names nothing"),
        ("patient,age,outcome\n", {}, "has no rows"),
        ('patient,age,outcome\n1,2,"cat\n', {}, "cannot be read as a CSV table in UTF-8"),
        ("name,age,outcome\n1,2,cat\n", {}, "no column 'patient': its first line names name, age, outcome"),
        ("patient,age,outcome\n1,2,cat\n", {"features": ["dose"]}, "no column 'dose'"),
        ("patient,age,outcome,outcome\n1,2,cat,dog\n", {}, "more than one column 'outcome'"),
        (",patient,age,outcome\n0,1,2,cat\n", {}, "gives column 1 no name"),
        ("patient,age,outcome\n\n1,2,cat,\n", {}, "line 3 has 4 fields, but the first line names 3 columns"),
        ("patient,age,outcome\n1,2\n", {}, "line 2 has 2 fields"),
        ('patient,age,outcome\n1,2,"c\nat"\n\n2,x,cat\n', {}, "line 5: 'x' in the column 'age'"),
        ("patient,outcome\n1,cat\n", {}, "no columns of features"),
        ("patient,age,outcome\n1,2,cat\n1,old,cat\n", {}, "line 3: 'old' in the column 'age' is no number"),
        ("patient,age,outcome\n1,,cat\n", {}, "line 2: '' in the column 'age'"),
        ("patient,age,outcome\n1,inf,cat\n", {}, "line 2: 'inf' in the column 'age'"),
        ("patient,age,outcome\n1,2,cat\n,3,cat\n", {}, "line 3: the column 'patient' is empty"),
        ("patient,age,outcome\n1,2,cat\n2,3,cow\n", {"classes": ["cat"]}, "class cow, which data.classes"),
    ],
)
def test_a_broken_table_is_one_sentence(text: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        table(write_table(tmp_path / "table.csv", text), **options).load()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, r"data\.clients is 0"),
        ({"held_out": 1.0}, r"data\.held_out is 1"),
        ({"clients": 9}, "only 4 users are left of 5"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "table.csv")
    with pytest.raises(UserError, match=words):
        table(path, **options).load()
    if "9" not in str(options):
        with pytest.raises(UserError, match=words):
            LeafDataModule("nowhere", batch_size=4, **options)
    with pytest.raises(UserError, match=r"data\.inverted is 2"):
        LeafDataModule("nowhere", batch_size=4, inverted=2)
