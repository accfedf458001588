"""Certificates as NVIDIA FLARE provisions them, by its own functions."""

import json
from dataclasses import asdict
from pathlib import Path

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

    def pair(self, name: str) -> tuple[bytes, bytes]:
        """A certificate and its private key."""
        key, public = generate_keys()
        own = generate_cert(Subject(name), self._subject, self._key, public)
        self.members.sites[name] = fingerprint(own)
        return serialize_cert(own), serialize_pri_key(key)

    def files(self, name: str) -> dict[str, bytes]:
        pair = self.pair(name)
        return {**dict(zip((CERTIFICATE, KEY), pair, strict=True)), MEMBERS: json.dumps(asdict(self.members)).encode()}

    def identity(self, name: str) -> Identity:
        return Identity(*self.pair(name), self.members)


def written(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
