"""Certificates as NVIDIA FLARE provisions them, by its own functions."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from nvflare.lighter.utils import Identity as Subject
from nvflare.lighter.utils import generate_cert, generate_keys, serialize_cert, serialize_pri_key

from lit_epgan.carriers.keys import CERTIFICATE, KEY, MEMBERS, Identity, MemberList, fingerprint


class Root:
    """Issues certificates, and knows the last one of each name.

    Attributes:
        members: the list, which grows.
    """

    def __init__(self, name: str = "federation") -> None:
        self._key, public = generate_keys()
        self._subject = Subject(name)
        self.certificate = generate_cert(self._subject, self._subject, self._key, public, ca=True)
        self.members = MemberList()

    def pair(self, name: str, curve: bool = False) -> tuple[bytes, bytes]:
        """A certificate and its private key."""
        key: Any = ec.generate_private_key(ec.SECP256R1()) if curve else generate_keys()[0]
        own = generate_cert(Subject(name), self._subject, self._key, key.public_key())
        self.members.sites[name] = fingerprint(own)
        return serialize_cert(own), serialize_pri_key(key)

    def files(self, name: str, curve: bool = False) -> dict[str, bytes]:
        pair = self.pair(name, curve)
        return {**dict(zip((CERTIFICATE, KEY), pair, strict=True)), MEMBERS: json.dumps(asdict(self.members)).encode()}

    def identity(self, name: str, **kind: Any) -> Identity:
        return Identity(*self.pair(name, **kind), self.members)


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
