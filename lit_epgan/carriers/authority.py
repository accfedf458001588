"""The authority: it signs who takes part in a federation. The private key of a member never leaves it.

    member -> authority   NAME.csr: its name and the public half of its key, signed by the private half
    authority -> member   a kit: its certificate, the list of all members, and settings; nothing in it is secret

All go by the list (``keys.MemberList``). A certificate that is not on it has been revoked, or replaced by a newer one.
"""

import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from nvflare.lighter.utils import Identity as Subject
from nvflare.lighter.utils import generate_cert, generate_keys, serialize_cert, serialize_pri_key, x509_name

from lit_epgan.carriers.keys import CERTIFICATE, KEY, MEMBERS, MemberList, fingerprint, name_in
from lit_epgan.lib.errors import UserError

DAYS, AUTHORITYS_DAYS, SOON = 360, 3650, 30  # that certificates hold, the authority's does, and a renewal may take
EARLY = timedelta(1)  # before it is signed, a certificate holds already: somebody's clock may be behind
LONGEST = 64  # letters of a name in a certificate (X.509's bound of CN)
BITS = 2048  # of a key, at least
ORGANISATION = "federation"
ROOT, ROOT_KEY = "rootCA.pem", "rootCA.key"
REVOKED = "revoked"  # in the authority's folder: certificates of members that are none any more, or have newer ones
OWNERS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@+-]*")


def request(name: str, folder: Path) -> tuple[Path, str]:
    """Make a member's key, ``NAME.key``, and its request, ``NAME.csr``; the request, and the key's digest. UserError:
    the name cannot be one, or there is such a key already."""
    if not OWNERS.fullmatch(name) or len(name) > LONGEST:
        raise UserError(f"{name!r} is no member's name: at most {LONGEST} letters, digits, and - _ . @ +")
    key, _ = generate_keys()
    write_key(folder / f"{name}.key", key)
    made = x509.CertificateSigningRequestBuilder().subject_name(x509_name(name, ORGANISATION)).sign(key, SHA256())
    path = folder / f"{name}.csr"
    path.write_bytes(made.public_bytes(Encoding.PEM))
    return path, fingerprint(made)


def assemble(kit: Path, folder: Path) -> tuple[str, MemberList]:
    """Move a member's key from ``folder`` into its kit; the member's name, and whom it knows from now on. UserError:
    it is no kit, or there is no key, or another certificate's."""
    certificate, startup = certificate_of(kit), kit / "startup"
    name = name_in(certificate)
    key = folder / f"{name}.key"
    if not _is_key(key, certificate):
        raise UserError(f"{key} is not the key that the certificate in {kit} was requested with by --request {name}")
    members = MemberList.read(startup / MEMBERS)
    key.replace(startup / own_files(startup)[1])
    kit.chmod(0o700)
    return name, members


def _is_key(path: Path, certificate: x509.Certificate) -> bool:
    """Whether a file holds the private key of a certificate."""
    try:
        return load_pem_private_key(path.read_bytes(), None).public_key() == certificate.public_key()
    except (OSError, ValueError, TypeError):
        return False


def own_files(startup: Path) -> tuple[str, str]:
    """The names of a kit's certificate and key, by FLARE: a server's are others."""
    return ("server.crt", "server.key") if (startup / "fed_server.json").is_file() else (CERTIFICATE, KEY)


def certificate_of(kit: Path) -> x509.Certificate:
    """The certificate in a kit. UserError: there is none."""
    path = kit / "startup" / own_files(kit / "startup")[0]
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{kit} is no kit of a federation's member: {error}") from error


def check_kit(kit: Path) -> str:
    """What the owner of a kit is to know before it is used: the digest of the list of members, and how long the
    certificate holds. UserError: the kit has no key yet, or its certificate is not on the list or has run out."""
    certificate, startup = certificate_of(kit), kit / "startup"
    name, members = name_in(certificate), MemberList.read(startup / MEMBERS)
    if not _is_key(startup / own_files(startup)[1], certificate):
        raise UserError(f"{kit} lacks its key: python -m lit_epgan federate --assemble {kit}, where {name}.key is")
    again = f"python -m lit_epgan federate --request {name}, and send {name}.csr to who keeps the authority"
    if not members.has(name, certificate):
        raise UserError(f"the certificate in {kit} is not the one of {startup / MEMBERS}: it is revoked. {again}")
    end, now = certificate.not_valid_after_utc, datetime.now(UTC)
    if not certificate.not_valid_before_utc <= now <= end:
        raise UserError(
            f"the certificate in {kit} holds from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} to "
            f"{end:%Y-%m-%d %H:%M} (UTC), and this machine's clock says {now:%Y-%m-%d %H:%M}. {again}"
        )
    soon = f" That is soon: {again}." if end - now < timedelta(SOON) else ""
    return f"Members: {members.digest}, as at all others. The certificate holds until {end:%Y-%m-%d}.{soon}"


def write_key(path: Path, key: RSAPrivateKey) -> None:
    """Write a private key for its owner's eyes alone. UserError: there is one, which is not overwritten."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise UserError(f"{path} exists, and a key is not overwritten: it may be in use. Move it away") from error
    with os.fdopen(file, "wb") as opened:
        opened.write(serialize_pri_key(key))


class Authority:
    """Signs requests, and keeps the certificates of those who are members now.

    Args:
        folder: holds its own key, which nobody else must read; made where there is none.
        name: of the federation.

    Attributes:
        root: its own certificate.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / ROOT).is_file():
            key, public = generate_keys()
            write_key(folder / ROOT_KEY, key)
            begin = datetime.now(UTC) - EARLY
            made = generate_cert(
                Subject(name), Subject(name), key, public, AUTHORITYS_DAYS, ca=True, not_valid_before=begin
            )
            (folder / ROOT).write_bytes(serialize_cert(made))
        self._key: Any = load_pem_private_key((folder / ROOT_KEY).read_bytes(), None)
        self.root = x509.load_pem_x509_certificate((folder / ROOT).read_bytes())

    def certificates(self) -> dict[str, x509.Certificate]:
        """Those of all members, by name."""
        return {path.stem: x509.load_pem_x509_certificate(path.read_bytes()) for path in self._folder.glob("*.crt")}

    def revoke(self, name: str) -> None:
        """The certificate of this name is a member's no more."""
        path = self._folder / f"{name}.crt"
        revoked = self._folder / REVOKED / f"{fingerprint(self.certificates()[name])}.crt"
        revoked.parent.mkdir(exist_ok=True)
        path.replace(revoked)

    def sign(self, name: str, path: Path, host: str | None = None, role: str | None = None) -> str:
        """Sign the request of a member in a file; its digest. "" where its key has a certificate already.

        ``host`` is a server's, ``role`` an operator's. UserError: it is no request, another one's, or its key has been
        revoked or replaced."""
        try:
            asked = x509.load_pem_x509_csr(path.read_bytes())
            public, whose, signed = asked.public_key(), name_in(asked), asked.is_signature_valid
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no request: {error}") from error
        if not signed or whose != name:
            raise UserError(
                f"{path} is no request of {name}: {f'its name is {whose}' if signed else 'its key has not signed it'}"
            )
        if not isinstance(public, RSAPublicKey) or public.key_size < BITS:
            raise UserError(f"{path}: the key is not RSA of at least {BITS} bits; federate --request makes one")
        now = self.certificates().get(name)
        if now is not None and now.public_key() == public:
            return ""
        for old in (self._folder / REVOKED).glob("*.crt"):
            if x509.load_pem_x509_certificate(old.read_bytes()).public_key() == public:
                raise UserError(f"{path}: this key has been revoked or replaced; federate --request makes a new one")
        if now is not None:
            self.revoke(name)
        subject, issuer = Subject(name, ORGANISATION, role), Subject(name_in(self.root))
        begin = datetime.now(UTC) - EARLY
        end = min(begin + timedelta(DAYS), self.root.not_valid_after_utc)
        made = generate_cert(
            subject, issuer, self._key, public, server_default_host=host, not_valid_before=begin, not_valid_after=end,
            extra_extensions=[(x509.BasicConstraints(ca=False, path_length=None), True)],
        )  # fmt: skip
        (self._folder / f"{name}.crt").write_bytes(serialize_cert(made))
        return fingerprint(asked)
