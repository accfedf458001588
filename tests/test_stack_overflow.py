"""Text by user from files laid out as TensorFlow Federated's, HDF5 and SQLite, written here."""

import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from lit_epgan.datamodules import StackOverflowDataModule
from lit_epgan.datamodules.tff_files import TFFFile, features
from lit_epgan.errors import UserError

USERS = {f"{k:08d}": [f"this is sentence {n} of user {k} ." for n in range(4)] for k in range(6)}


def example_class() -> Any:
    """tf.train.Example, whose fields are numbered so in TensorFlow's example.proto and feature.proto."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="t", syntax="proto3")
    kinds = descriptor_pb2.FieldDescriptorProto

    def message(name: str, *fields: tuple[str, int, int, int, str]) -> Any:
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


def write_hdf5(path: Path) -> Path:
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        for name, own in USERS.items():
            group = file.create_group(f"examples/{name}")
            group["tokens"] = [text.encode() for text in own]
            group["type"] = [b"question"] * len(own)
            group["score"] = [1] * len(own)
    return path


def write_sqlite(path: Path) -> Path:
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
def test_both_layouts_give_the_users_sentences(write: Any, tmp_path: Path) -> None:
    file = TFFFile(write(tmp_path / "file"))
    assert file.clients() == sorted(USERS)
    assert file.texts(["00000002"], "tokens", 2) == {"00000002": USERS["00000002"][:2]}
    assert file.texts(list(USERS), "tokens") == USERS
    with pytest.raises(UserError, match="tokenz"):
        file.texts(["00000002"], "tokenz")
    data = StackOverflowDataModule(
        str(file.path), clients=3, held_out_users=2, sentences_per_user=3, vocabulary=5, batch_size=2
    )
    loaded = data.load()
    assert len(loaded.train) == 3
    assert len(loaded.val) == 6
    assert all(len(own) == 3 and own[0][:3] == ["this", "is", "sentence"] for own in data.sentences.values())


def test_users_are_drawn_by_the_seed(tmp_path: Path) -> None:
    path = write_sqlite(tmp_path / "file")

    def drawn(seed: int) -> list[str]:
        data = StackOverflowDataModule(str(path), clients=1, held_out_users=2, split_seed=seed, batch_size=2)
        return sorted(data.users())

    assert drawn(7) == drawn(7)
    assert [len(drawn(seed)) for seed in range(5)] == [3] * 5
    assert len({tuple(drawn(seed)) for seed in range(5)}) > 1
    with pytest.raises(UserError, match=r"data\.sentences_per_user is 0"):
        StackOverflowDataModule(str(path), sentences_per_user=0)


def test_an_example_is_read_as_protocol_buffers_write_it() -> None:
    long = ("word " * 100).encode()
    assert features(serialized(tokens=long, score=7, title=b"", tags=b"a|b")) == {
        "tokens": long,
        "title": b"",
        "tags": b"a|b",
    }
    assert features(b"") == {}


def test_an_example_is_read_byte_by_byte() -> None:
    """Lengths of two bytes, the first of two values, and what is passed over: numbers of three kinds, other fields."""

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


def test_other_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text.txt"
    path.write_text("no database")
    with pytest.raises(UserError, match="neither HDF5 nor SQLite"):
        TFFFile(path)
    with pytest.raises(UserError, match="No such file"):
        TFFFile(tmp_path / "nothing")
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as file:
        file.execute("CREATE TABLE something (a TEXT)")
    with pytest.raises(UserError, match="not laid out as TensorFlow Federated's SQLite files: no such table"):
        TFFFile(other).clients()
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["a"] = [1]
    with pytest.raises(UserError, match="no group 'examples'"):
        TFFFile(tmp_path / "other.h5").clients()
    broken = write_hdf5(tmp_path / "broken.h5")
    broken.write_bytes(broken.read_bytes()[:3000])
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=rf"{broken} is no whole HDF5 file \(.*\); place it anew"):
        TFFFile("~/broken.h5").clients()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"pip install lit_epgan\[hdf5\]"):
        TFFFile(broken).clients()
