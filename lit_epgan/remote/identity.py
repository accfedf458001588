"""Who an institution is: its certificate and private key, and the root that all institutions' certificates hang on."""

from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.padding import MGF1, PSS
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from lit_epgan.errors import UserError

FILES = ("client.crt", "client.key", "rootCA.pem")  # as NVIDIA FLARE names them in a kit's folder ``startup``
PADDING = PSS(MGF1(SHA256()), PSS.DIGEST_LENGTH)


class Signature(NamedTuple):
    """A signature, and the certificate (PEM) whose key signs."""

    signature: bytes
    certificate: bytes


class Identity:
    """An institution's certificate, by which it signs, and checks what others have signed.

    Args:
        certificate: its own (PEM).
        private_key: of the certificate (PEM, without a password); RSA or an elliptic curve's.
        root: the certificate (PEM) that has issued all institutions' certificates.

    Raises:
        ValueError: one of them cannot be read, or they do not belong together.
    """

    def __init__(self, certificate: bytes, private_key: bytes, root: bytes) -> None:
        self._pem, self._root = certificate, x509.load_pem_x509_certificate(root)
        own, key = x509.load_pem_x509_certificate(certificate), load_pem_private_key(private_key, None)
        if not isinstance(key, rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey):
            raise ValueError("the private key is neither RSA nor an elliptic curve's")
        if own.public_key() != key.public_key():
            raise ValueError("the private key is another certificate's")
        self._key = key
        self.name = _name(own)
        self.check(self.name, b"", self.signs(b""))

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> "Identity":
        """The identity in the files ``client.crt``, ``client.key`` and ``rootCA.pem``.

        Args:
            folder: with the files.
            name: the institution's, which the certificate must have, too.

        Raises:
            UserError: one is missing or cannot be read, or the certificate is another institution's.
        """
        try:
            found = cls(*((folder / file).read_bytes() for file in FILES))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"the certificate in {folder} ({', '.join(FILES)}) cannot be used: {error}") from error
        if found.name != name:
            raise UserError(
                f"the certificate in {folder} is of {found.name!r}, and this institution is {name!r}: secure "
                "aggregation takes certificates whose names (CN) are the clients'; provision it under that name"
            )
        return found

    def signs(self, message: bytes) -> Signature:
        """The message's signature: RSA-PSS or ECDSA, with SHA-256."""
        if isinstance(self._key, rsa.RSAPrivateKey):
            return Signature(self._key.sign(message, PADDING, SHA256()), self._pem)
        return Signature(self._key.sign(message, ec.ECDSA(SHA256())), self._pem)

    def check(self, name: str, message: bytes, signed: Signature) -> None:
        """Whether the institution of this name has signed a message.

        Raises:
            ValueError: it has not; why.
        """
        if not signed.certificate:
            raise ValueError("it is not signed")
        certificate = x509.load_pem_x509_certificate(signed.certificate)
        try:
            certificate.verify_directly_issued_by(self._root)
        except (InvalidSignature, ValueError, TypeError) as error:
            raise ValueError("its certificate is not of this federation's root") from error
        if not certificate.not_valid_before_utc <= datetime.now(UTC) <= certificate.not_valid_after_utc:
            raise ValueError("its certificate is not valid today")
        if _name(certificate) != name:
            raise ValueError(f"its certificate is of {_name(certificate)!r}")
        try:
            _verify(certificate, message, signed.signature)
        except InvalidSignature as error:
            raise ValueError("its signature is wrong, or of another exchange") from error


def _verify(certificate: x509.Certificate, message: bytes, signature: bytes) -> None:
    key = certificate.public_key()
    if isinstance(key, rsa.RSAPublicKey):
        key.verify(signature, message, PADDING, SHA256())
    elif isinstance(key, ec.EllipticCurvePublicKey):
        key.verify(signature, message, ec.ECDSA(SHA256()))
    else:
        raise ValueError("its certificate's key is neither RSA nor an elliptic curve's")


def _name(certificate: x509.Certificate) -> str:
    """The common name (CN) of a certificate's subject."""
    named = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(named) != 1:
        raise ValueError("its certificate has no name (CN), or several")
    return str(named[0].value)
