"""Data sorted by users: LEAF's JSON, TensorFlow Federated's HDF5 and tables, in their public layouts and broken."""

import json
import math
import sqlite3
import sys

import h5py
import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lit_epgan.datamodules import (
    FederatedDataModule,
    FederatedEMNISTDataModule,
    LeafDataModule,
    StackOverflowDataModule,
)
from lit_epgan.datamodules.tff_files import TFFFile, features
from lit_epgan.lib.errors import UserError
from tests.refusals import assert_refused
from tests.users_tree import SIZES, images, leaf_content, write_emnist, write_leaf


def by_writer(kind: str, folder, **options) -> FederatedDataModule:
    if kind == "leaf":
        write_leaf(folder)
        return LeafDataModule(str(folder), batch_size=4, **options)
    write_emnist(folder)
    return FederatedEMNISTDataModule(str(folder), batch_size=4, **options)


@pytest.mark.parametrize("kind", ["leaf", "hdf5"])
def test_a_writers_images_are_its_own_with_a_dark_background(kind, tmp_path):
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
def test_those_held_out_take_part_in_nothing_and_are_not_inverted(kind, tmp_path):
    clean = by_writer(kind, tmp_path, held_out=0.25, clients=2).data
    faulty = by_writer(kind, tmp_path, held_out=0.25, clients=2, inverted=0.5).data
    assert len(clean.train) == 2
    assert list(clean.train) == list(faulty.train)
    flipped = [torch.allclose(faulty.train[n][0][0], -clean.train[n][0][0], atol=1e-6) for n in clean.train]
    assert sorted(flipped) == [False, True]
    assert float(faulty.test[0][0].mean()) < 0
    others = [name for name in SIZES if len(clean.test) == SIZES[name]]
    assert len(others) == 1
    assert others[0] not in clean.train


def changed(content, change) -> str:
    change(content)
    return json.dumps(content)


FIRST = next(iter(SIZES))

BROKEN = {
    "truncated": (lambda c: json.dumps(c)[:2000], "is no whole JSON file"),
    "no object": (lambda c: "[1, 2]", "no list 'users'"),
    "wrong keys": (lambda c: changed(c, lambda c: c.pop("user_data")), "no object 'user_data'"),
    "user missing": (lambda c: changed(c, lambda c: c["user_data"].pop(FIRST)), "has no 'x' and 'y' of this user"),
    "no labels": (lambda c: changed(c, lambda c: c["user_data"][FIRST].pop("y")), "has no 'x' and 'y'"),
    "short image": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].pop()), "not numbers of one shape"),
    "all short": (lambda c: changed(c, lambda c: [x.pop() for x in c["user_data"][FIRST]["x"]]), r"\(3, 783\)"),
    "fewer labels": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].pop()), r"\(2,\)"),
    "text": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, "a")), "not numbers"),
    "nan": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, math.nan)), "no number from"),
    "bytes": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["x"][0].__setitem__(3, 200)), "from 0 to 1"),
    "twice": (lambda c: changed(c, lambda c: c["users"].append(FIRST)), f"do not agree on {FIRST}"),
    "not listed": (lambda c: changed(c, lambda c: c["users"].remove(FIRST)), f"do not agree on {FIRST}"),
    "counts": (lambda c: changed(c, lambda c: c["num_samples"].__setitem__(0, 9)), f"not how many .*{FIRST}"),
    "fewer counts": (lambda c: changed(c, lambda c: c["num_samples"].pop()), "not how many"),
    "label": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].__setitem__(0, 62)), "no class from 0 to 61"),
    "letter": (lambda c: changed(c, lambda c: c["user_data"][FIRST]["y"].__setitem__(0, "A")), "no class from 0 to 61"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_json_file_is_one_sentence(kind, tmp_path):
    broken, words = BROKEN[kind]
    (tmp_path / "all_data_0.json").write_text(broken(leaf_content(list(SIZES)[:2])))
    with pytest.raises(UserError, match=words) as caught:
        LeafDataModule(str(tmp_path), batch_size=4).load()
    assert "all_data_0.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_writer_without_images_sits_out(tmp_path):
    content = leaf_content(list(SIZES)[:3])
    content["user_data"][FIRST] = {"x": [], "y": []}
    content["num_samples"][0] = 0
    (tmp_path / "all_data_0.json").write_text(json.dumps(content))
    data = LeafDataModule(str(tmp_path), batch_size=2, held_out=0.5).load()
    assert [*data.train, len(data.test)] in (["f0002_02", SIZES["f0003_10"]], ["f0003_10", SIZES["f0002_02"]])


def test_a_writer_in_two_files_is_refused_and_no_class_means_a_gap(tmp_path):
    write_leaf(tmp_path)
    (tmp_path / "all_data_2.json").write_text(json.dumps(leaf_content([FIRST])))
    assert_refused(f"{FIRST}.* in another file", LeafDataModule(str(tmp_path), batch_size=4).load)


def replaced(path, name: str, values) -> None:
    with h5py.File(path, "a") as file:
        del file[name]
        if values is not None:
            file.create_dataset(name, data=values)


def emptied(path) -> None:
    with h5py.File(path, "w") as file:
        file.create_group("examples")


HDF5 = {
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
def test_a_broken_hdf5_file_is_one_sentence(kind, tmp_path):
    write_emnist(tmp_path)
    change, words = HDF5[kind]
    change(tmp_path / "fed_emnist_train.h5")
    with pytest.raises(UserError, match=words) as caught:
        FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load()
    assert "fed_emnist_train.h5" in str(caught.value)


def test_missing_files_are_named_with_their_place(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=rf"place LEAF's all_data_\*.json.*in|not in {tmp_path}"):
        LeafDataModule(str(tmp_path), batch_size=4).load()
    with pytest.raises(UserError, match=r"place fed_emnist_train.h5 \(out of https"):
        FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load()
    write_emnist(tmp_path)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert_refused(r"pip install lit_epgan\[hdf5\]", FederatedEMNISTDataModule(str(tmp_path), batch_size=4).load)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, r"data\.clients is 0"),
        ({"held_out": 1.0}, r"data\.held_out is 1"),
        ({"clients": 9}, "only 4 users are left of 4"),
    ],
)
def test_what_cannot_be_is_refused(options, words, tmp_path):
    write_leaf(tmp_path)
    assert_refused(words, lambda: LeafDataModule(str(tmp_path), batch_size=4, **options).load())
    assert_refused(r"data\.inverted is 2", LeafDataModule, "nowhere", batch_size=4, inverted=2)


USERS = {f"{k:08d}": [f"this is sentence {n} of user {k} ." for n in range(4)] for k in range(6)}


def example_class():
    """tf.train.Example, whose fields are numbered so in TensorFlow's example.proto and feature.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]):
        made = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            made.field.add(name=field, number=number, label=label, type=kind, type_name=of or None)
        return made

    message("BytesList", ("value", 1, kinds.LABEL_REPEATED, kinds.TYPE_BYTES, ""))
    message("Int64List", ("value", 1, kinds.LABEL_REPEATED, kinds.TYPE_INT64, ""))
    message("Feature", ("bytes_list", 1, kinds.LABEL_OPTIONAL, kinds.TYPE_MESSAGE, ".t.BytesList"),
            ("int64_list", 3, kinds.LABEL_OPTIONAL, kinds.TYPE_MESSAGE, ".t.Int64List"))  # fmt: skip
    held = message("Features", ("feature", 1, kinds.LABEL_REPEATED, kinds.TYPE_MESSAGE, ".t.Features.FeatureEntry"))
    entry = held.nested_type.add(name="FeatureEntry", options=descriptor_pb2.MessageOptions(map_entry=True))
    entry.field.add(name="key", number=1, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=kinds.LABEL_OPTIONAL, type=kinds.TYPE_MESSAGE, type_name=".t.Feature")
    message("Example", ("features", 1, kinds.LABEL_OPTIONAL, kinds.TYPE_MESSAGE, ".t.Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Example"))


def serialized(**values: bytes | int) -> bytes:
    example = example_class()()
    for name, value in values.items():
        feature = example.features.feature[name]
        (feature.int64_list if isinstance(value, int) else feature.bytes_list).value.append(value)
    return example.SerializeToString()


def write_hdf5(path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, own in USERS.items():
            group = file.create_group(f"examples/{name}")
            group["tokens"] = [text.encode() for text in own]
            group["type"] = [b"question"] * len(own)
            group["score"] = [1] * len(own)
    return path


def write_sqlite(path):
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        file.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        for name, own in USERS.items():
            file.execute("INSERT INTO client_metadata VALUES (?, 'train', ?)", (name, len(own)))
            for text in own:
                row = serialized(tokens=text.encode(), type=b"question", score=-(2**40))
                file.execute("INSERT INTO examples VALUES ('train', ?, ?)", (name, row))
            file.execute("INSERT INTO examples VALUES ('test', ?, ?)", (name, serialized(tokens=b"of the test")))
        file.execute("INSERT INTO client_metadata VALUES ('of the test', 'test', 0)")
    return path


@pytest.mark.parametrize("write", [write_hdf5, write_sqlite])
def test_both_layouts_give_the_users_sentences(write, tmp_path):
    file = TFFFile(write(tmp_path / "file"))
    assert file.clients() == sorted(USERS)
    assert file.texts(["00000002"], "tokens", 2) == {"00000002": USERS["00000002"][:2]}
    assert file.texts(list(USERS), "tokens") == USERS
    assert_refused("tokenz", file.texts, ["00000002"], "tokenz")
    data = StackOverflowDataModule(
        str(file.path), clients=3, held_out_users=2, sentences_per_user=3, vocabulary=5, batch_size=2
    )
    loaded = data.load()
    assert len(loaded.train) == 3
    assert len(loaded.val) == 6
    assert all(len(own) == 3 and own[0][:3] == ["this", "is", "sentence"] for own in data.sentences.values())


def test_users_are_drawn_by_the_seed(tmp_path):
    path = write_sqlite(tmp_path / "file")

    def drawn(seed: int) -> list[str]:
        data = StackOverflowDataModule(str(path), clients=1, held_out_users=2, split_seed=seed, batch_size=2)
        return sorted(data.users())

    assert drawn(7) == drawn(7)
    assert [len(drawn(seed)) for seed in range(5)] == [3] * 5
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1
    assert_refused(r"data\.sentences_per_user is 0", StackOverflowDataModule, str(path), sentences_per_user=0)


def test_an_example_is_read_as_protocol_buffers_write_it_byte_by_byte():
    long = ("word " * 100).encode()
    found = features(serialized(tokens=long, score=7, title=b"", tags=b"a|b"))
    assert found == {"tokens": long, "title": b"", "tags": b"a|b"}
    assert features(b"") == {}

    # lengths of two bytes, the first of two values, and what is passed over: numbers of three kinds, other fields
    def field(number: int, content: bytes) -> bytes:
        length = len(content)
        return bytes([number << 3 | 2, *([length % 128 + 128, length // 128] if length > 127 else [length])]) + content

    def entry(name: bytes, *values: bytes) -> bytes:
        return field(1, name) + field(2, field(1, b"".join(field(1, value) for value in values)))

    numbers = b"\x78\xac\x02" + b"\x79" + b"\x0a" * 8 + b"\x7d" + b"\x0a" * 4  # of field 15: 300, a double, a float
    long, other = b"x" * 280, field(2, entry(b"other", b"no feature"))
    held = field(1, entry(b"long", long)) + other + field(1, entry(b"two", b"first", b"second"))
    assert len(entry(b"long", long)) // 128 == 2
    assert len(entry(b"long", long)) % 256 < 128
    assert features(numbers + field(1, numbers + held)) == {"long": long, "two": b"first"}


def test_other_files_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("no database")
    assert_refused("neither HDF5 nor SQLite", TFFFile, path)
    assert_refused("No such file", TFFFile, tmp_path / "nothing")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE something (a TEXT)")
    assert_refused("not laid out as TensorFlow Federated's SQLite files: no such table", TFFFile(other).clients)
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["a"] = [1]
    assert_refused("no group 'examples'", TFFFile(tmp_path / "other.h5").clients)
    broken = write_hdf5(tmp_path / "broken.h5")
    broken.write_bytes(broken.read_bytes()[:3000])
    monkeypatch.setenv("HOME", str(tmp_path))
    assert_refused(rf"{broken} is no whole HDF5 file \(.*\); place it anew", TFFFile("~/broken.h5").clients)
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert_refused(r"pip install lit_epgan\[hdf5\]", TFFFile(broken).clients)
