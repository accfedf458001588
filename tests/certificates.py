"""Certificates as NVIDIA FLARE provisions them, by its own functions."""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from nvflare.lighter.utils import Identity as Subject
from nvflare.lighter.utils import generate_cert, generate_keys, serialize_cert, serialize_pri_key

from lit_epgan.carriers.keys import FILES, Identity


class Root:
    def __init__(self, name: str = "federation") -> None:
        self._key, public = generate_keys()
        self._subject = Subject(name)
        self.certificate = generate_cert(self._subject, self._subject, self._key, public, ca=True)

    def files(self, name: str, curve: bool = False) -> dict[str, bytes]:
        key: Any = ec.generate_private_key(ec.SECP256R1()) if curve else generate_keys()[0]
        own = generate_cert(Subject(name), self._subject, self._key, key.public_key())
        values = (serialize_cert(own), serialize_pri_key(key), serialize_cert(self.certificate))
        return dict(zip(FILES, values, strict=True))

    def identity(self, name: str, **kind: Any) -> Identity:
        return Identity(*self.files(name, **kind).values())


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
