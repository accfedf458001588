"""Text by user in the files of TensorFlow Federated's simulation data sets: HDF5, and the SQLite that followed it."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_epgan.lib.errors import UserError

SIGNATURES = {b"\x89HDF\r\n\x1a\n": "hdf5", b"SQLite format 3\x00": "sqlite"}


class TFFFile:
    """A file of clients and their examples.

    HDF5: the group ``examples`` has a group for each client, and that a data set for each feature. SQLite: the table
    ``client_metadata`` has a row for each client and split, ``examples`` one for each example, whose column
    ``serialized_example_proto`` is a ``tf.train.Example``.

    Args:
        path: of the file.
        split: of a SQLite file, which holds all of them: ``train``, ``heldout`` or ``test``.

    Raises:
        UserError: there is no such file, it is neither, or h5py is needed and missing.
    """

    def __init__(self, path: str | Path, split: str = "train") -> None:
        self.path, self.split = Path(path).expanduser(), split
        try:
            with self.path.open("rb") as file:
                start = file.read(16)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror or error}") from error
        kinds = [kind for signature, kind in SIGNATURES.items() if start.startswith(signature)]
        if not kinds:
            raise UserError(
                f"{self.path} is neither HDF5 nor SQLite: give a file of TensorFlow Federated's, as "
                "stackoverflow_train.h5 or stackoverflow.sqlite, unpacked"
            )
        self.kind = kinds[0]

    def clients(self) -> list[str]:
        """The clients' names, sorted. UserError: the file is not laid out so."""
        if self.kind == "hdf5":
            with hdf5_examples(self.path) as examples:
                return sorted(examples)
        return sorted(
            row[0] for row in self._rows("SELECT DISTINCT client_id FROM client_metadata WHERE split_name = ?")
        )

    def texts(self, clients: Sequence[str], feature: str, most: int | None = None) -> dict[str, list[str]]:
        """By client the values of a feature that is text, of its first ``most`` examples. UserError: the file is not
        laid out so, or has no such client or feature."""
        if self.kind == "hdf5":
            with hdf5_examples(self.path) as examples:
                try:
                    return {client: [v.decode() for v in examples[client][feature][:most]] for client in clients}
                except KeyError as error:
                    raise UserError(f"{self.path} has no such client or feature: {error}") from error
        return {client: list(self._of_sqlite(client, feature, most)) for client in clients}

    def _of_sqlite(self, client: str, feature: str, most: int | None) -> Iterator[str]:
        query = "SELECT serialized_example_proto FROM examples WHERE split_name = ? AND client_id = ? LIMIT ?"
        for (example,) in self._rows(query, client, -1 if most is None else most):
            values = features(example)
            if feature not in values:
                raise UserError(f"an example of client {client!r} of {self.path} has no feature {feature!r}")
            yield values[feature].decode()

    def _rows(self, query: str, *arguments: Any) -> list[tuple[Any, ...]]:
        connection = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return connection.execute(query, (self.split, *arguments)).fetchall()
        except sqlite3.Error as error:
            raise UserError(f"{self.path} is not laid out as TensorFlow Federated's SQLite files: {error}") from error
        finally:
            connection.close()


@contextmanager
def hdf5_examples(path: Path) -> Iterator[Any]:
    """The open group ``examples`` of an HDF5 file: a group for each client, and in it a data set for each feature.
    UserError: h5py is missing, or the file is not as TensorFlow Federated writes it."""
    try:
        import h5py  # an extra
    except ImportError as error:
        raise UserError(f"{path} is an HDF5 file: pip install lit_epgan[hdf5] (h5py)") from error
    try:
        with h5py.File(path, "r") as file:
            examples = file.get("examples")
            if not isinstance(examples, h5py.Group) or not len(examples):
                raise UserError(f"{path} has no group 'examples' of clients; place the published file")
            yield examples
    except (OSError, KeyError, RuntimeError) as error:  # what h5py raises on broken files
        raise UserError(f"{path} is no whole HDF5 file ({str(error).splitlines()[0]}); place it anew") from error


def features(example: bytes) -> dict[str, bytes]:
    """The features of a serialized ``tf.train.Example`` that are bytes, by name; of a list the first.

    An Example is {1: {1: {1: name, 2: {1: {1: value}}}, ...}}: messages within messages, by the fields' numbers.
    """
    found = {}
    for entry in _fields(dict(_fields(example)).get(1, b"")):
        name, value = (dict(_fields(entry[1])).get(number, b"") for number in (1, 2))
        if entry[0] == 1 and 1 in (kinds := dict(_fields(value))):  # 2 and 3 are numbers
            found[name.decode()] = next((v for number, v in _fields(kinds[1]) if number == 1), b"")
    return found


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The numbers and contents of a protocol buffer's fields that have a length; others are passed over."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            _, at = _varint(message, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        else:
            length, at = _varint(message, at)
            yield key >> 3, message[at : at + length]
            at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where the next begins."""
    number = shift = 0
    while at < len(message):
        byte = message[at]
        number, at, shift = number | (byte & 127) << shift, at + 1, shift + 7
        if byte < 128:
            break
    return number, at
