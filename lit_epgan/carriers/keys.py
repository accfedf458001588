"""Who an institution is, whom it knows, and the keys by which it agrees on a pad with each other one.

Messages are carried by the server. The key is X25519 (RFC 7748) and is made anew for each exchange, so that no pad is
used twice, whoever starts again. An institution with a certificate signs it, and takes the keys of those alone whose
certificates stand in a list of its own, which is the same at all of them. Without certificates a server that lies
about the keys can unmask reports; one that keeps to the protocol, and looks at all that it gets, cannot.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import NameOID
from numpy.typing import NDArray

from lit_epgan.lib.errors import UserError

CERTIFICATE, KEY, MEMBERS = "client.crt", "client.key", "members.json"  # in a kit's folder ``startup``
PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)
CHUNK = 2**20  # words of a pad that are made at a time, 8 MB

Words = NDArray[np.uint64]


def fingerprint(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """SHA-256 of a certificate or a request, in hexadecimal digits."""
    return hashlib.sha256(certificate.public_bytes(Encoding.DER)).hexdigest()


@dataclass
class MemberList:
    """The fingerprints of all certificates that may take part, by their names. Another one is a stranger's, or revoked.

    Attributes:
        authority, server, sites, operator: whose.
    """

    authority: dict[str, str] = field(default_factory=dict)
    server: dict[str, str] = field(default_factory=dict)
    sites: dict[str, str] = field(default_factory=dict)
    operator: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "MemberList":
        """The list in a file. UserError: there is none."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path} is no list of a federation's members: {error}") from error

    def has(self, name: str, certificate: x509.Certificate) -> bool:
        """Whether this is the certificate of the member of this name."""
        every = {**self.server, **self.operator, **self.sites}
        return every.get(name) == fingerprint(certificate)

    @property
    def digest(self) -> str:
        """32 digits that differ where two lists do, in groups to be read out on the telephone."""
        digits = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return " ".join(digits[i : i + 4] for i in range(0, 32, 4))


class Identity:
    """An institution's certificate, by which it signs, and checks what others have signed.

    Args:
        certificate: its own (PEM).
        private_key: of the certificate (PEM, without a password); RSA, as all of a federation's are.
        members: all whom it knows. No server adds to them.

    Attributes:
        name: the institution's, as its certificate has it.
        pem: its certificate.

    Raises:
        ValueError: one of them cannot be read, or they do not belong together.
    """

    def __init__(self, certificate: bytes, private_key: bytes, members: MemberList) -> None:
        self.pem, self.members = certificate, members
        own, key = x509.load_pem_x509_certificate(certificate), load_pem_private_key(private_key, None)
        if not isinstance(key, RSAPrivateKey):
            raise ValueError("the private key is not RSA")
        if own.public_key() != key.public_key():
            raise ValueError("the private key is another certificate's")
        self._key = key
        self.name = name_in(own)
        self.check(self.name, b"", self.signs(b""), certificate)

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> "Identity":
        """The identity in the files ``client.crt``, ``client.key`` and ``members.json`` of a folder. UserError: one is
        missing or cannot be read, or the certificate is another institution's."""
        members = MemberList.read(folder / MEMBERS)
        try:
            found = cls((folder / CERTIFICATE).read_bytes(), (folder / KEY).read_bytes(), members)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"the certificate in {folder} ({CERTIFICATE}, {KEY}) cannot be used: {error}") from error
        if found.name != name:
            raise UserError(
                f"the certificate in {folder} is of {found.name!r}, and this institution is {name!r}: secure "
                "aggregation takes certificates whose names (CN) are the clients'; provision it under that name"
            )
        return found

    def signs(self, message: bytes) -> bytes:
        """The message's signature: RSA-PSS with SHA-256."""
        return self._key.sign(message, PADDING, SHA256())

    def check(self, name: str, message: bytes, signature: bytes, pem: bytes) -> None:
        """Whether the institution of this name has signed a message, by the certificate that stands in ``pem``.
        ValueError: it has not; why."""
        if not pem:
            raise ValueError("it is not signed")
        certificate = x509.load_pem_x509_certificate(pem)
        if self.members.sites.get(name) != fingerprint(certificate):
            raise ValueError(f"its certificate is not the one that {MEMBERS} has for a site of this name")
        if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
            raise ValueError("its certificate is not valid today")
        key = certificate.public_key()
        if not isinstance(key, RSAPublicKey):
            raise ValueError("its certificate's key is not RSA")
        try:
            key.verify(signature, message, PADDING, SHA256())
        except InvalidSignature as error:
            raise ValueError(f"its signature is wrong, of another exchange, or of another {MEMBERS}") from error


def name_in(certificate: x509.Certificate | x509.CertificateSigningRequest) -> str:
    """The common name (CN) of its subject. ValueError: it has none, or several."""
    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(named) != 1:
        raise ValueError("its certificate has no name (CN), or several")
    return str(named[0].value)


class Announced(NamedTuple):
    """The public half of an institution's key and its signature, in hexadecimal digits, and the certificate (PEM)."""

    key: str
    signature: str = ""
    certificate: str = ""


class Pad(NamedTuple):
    """A pad's key, and whether this institution adds the pad; else it subtracts it."""

    key: bytes
    adds: bool


class ExchangeKey:
    """The key of one institution for one exchange.

    Args:
        name: the institution's.
        round_, exchange: the exchange's numbers.
        identity: the institution's certificate; None where it has none.

    Attributes:
        announced: what the others have to know.
    """

    def __init__(self, name: str, round_: int, exchange: int, identity: Identity | None = None) -> None:
        self._name, self._round, self._exchange, self._identity = name, round_, exchange, identity
        self._private: X25519PrivateKey | None = X25519PrivateKey.generate()
        key = self._private.public_key().public_bytes_raw().hex()
        self.announced = Announced(key)
        if identity is not None:
            self.announced = Announced(key, identity.signs(self._message(name, key)).hex(), identity.pem.decode())

    def pads(self, announced: Mapping[str, Announced]) -> list[Pad]:
        """The pads that this institution shares with the others; the private half of its key is thrown away.

        ``announced`` is by the members' names, this one among them. UserError: the key has been used before, or what
        another one, or this one, is said to have announced is not theirs.
        """
        if self._private is None:
            raise UserError(f"{self._about} has been masked before, and the same pads again would give both away")
        if announced.get(self._name) != self.announced:
            raise UserError(f"{self._about}: the server hands out another key in this institution's name")
        pads = [self._pad(self._private, name, each) for name, each in announced.items() if name != self._name]
        self._private = None
        return pads

    def _pad(self, private: X25519PrivateKey, name: str, other: Announced) -> Pad:
        try:
            if self._identity is not None:
                signature, pem = bytes.fromhex(other.signature), other.certificate.encode()
                self._identity.check(name, self._message(name, other.key), signature, pem)
            secret = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other.key)))
        except ValueError as error:
            raise UserError(f"{self._about}: the key of {name!r} is refused: {error}") from error
        pair = sorted([[self._name, self.announced.key], [name, other.key]])
        about = json.dumps(["lit_epgan pad", self._round, self._exchange, pair]).encode()
        return Pad(pad_key(secret, about), self._name < name)

    def _message(self, name: str, key: str) -> bytes:
        """What is signed: a key signed for another exchange, by another institution, or by one that knows others as
        members than this one does, is of no use."""
        sites = self._identity.members.sites if self._identity is not None else {}
        return json.dumps(["lit_epgan key", name, self._round, self._exchange, key, sorted(sites.items())]).encode()

    @property
    def _about(self) -> str:
        return f"round {self._round}, exchange {self._exchange}"


def pad_key(secret: bytes, about: bytes) -> bytes:
    """The 32 bytes that a pad grows from, by HKDF-SHA256: of the ``secret`` that two clients share, and of what the
    pad is ``about``."""
    return HKDF(SHA256(), 32, None, about).derive(secret)


def add_pad(words: Words, key: bytes, adds: bool) -> None:
    """Add a pad to words (n,), or subtract it, in place.

    The pad is the keystream of ChaCha20 (RFC 8439) under a ``key`` of ``pad_key``. A key serves for one pad: then a
    fixed nonce is safe. One client of the pair ``adds`` it, the other one subtracts it.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        pad = np.frombuffer(stream.update(bytes(part.nbytes)), "<u8")
        (np.add if adds else np.subtract)(part, pad, out=part)
