"""An institution's key for one exchange: it agrees on a pad with each other one, by messages that the server carries.

The key is X25519 (RFC 7748) and is made anew for each exchange, so that no pad is used twice, whoever starts again.
An institution with a certificate signs it. Without certificates a server that lies about the keys can unmask reports;
one that keeps to the protocol, and looks at all that it gets, cannot.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from lit_epgan.errors import UserError
from lit_epgan.remote.identity import Identity, Signature
from lit_epgan.remote.masks import pad_key


class Announced(NamedTuple):
    """What an institution tells the others of its key; all are hexadecimal digits, or PEM.

    Attributes:
        key: the public half.
        signature: of the key and what it is for.
        certificate: whose key signs.
    """

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
            signed = identity.signs(self._message(name, key))
            self.announced = Announced(key, signed.signature.hex(), signed.certificate.decode())

    def pads(self, announced: Mapping[str, Announced]) -> list[Pad]:
        """The pads that this institution shares with the others; the private half of its key is thrown away.

        Args:
            announced: what all members of the sum have announced, by name, this one among them.

        Raises:
            UserError: the key has been used before, or what another one, or this one, is said to have announced is
                not theirs.
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
                signature = Signature(bytes.fromhex(other.signature), other.certificate.encode())
                self._identity.check(name, self._message(name, other.key), signature)
            secret = private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(other.key)))
        except ValueError as error:
            raise UserError(f"{self._about}: the key of {name!r} is refused: {error}") from error
        pair = sorted([[self._name, self.announced.key], [name, other.key]])
        about = json.dumps(["lit_epgan pad", self._round, self._exchange, pair]).encode()
        return Pad(pad_key(secret, about), self._name < name)

    def _message(self, name: str, key: str) -> bytes:
        """What is signed: a key signed for another exchange, or by another institution, is of no use."""
        return json.dumps(["lit_epgan key", name, self._round, self._exchange, key]).encode()

    @property
    def _about(self) -> str:
        return f"round {self._round}, exchange {self._exchange}"
