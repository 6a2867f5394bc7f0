"""Certificates for tests of TLS: an authority, and what it signs."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """An authority that clients trust, or do not; ``certificate`` is PEM."""

    certificate: bytes
    _certificate: x509.Certificate
    _key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, name: str = "tests") -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _name(name)
        own = _builder(subject, subject, key).add_extension(x509.BasicConstraints(True, None), critical=True)
        certificate = own.sign(key, hashes.SHA256())
        return cls(certificate.public_bytes(serialization.Encoding.PEM), certificate, key)

    def server(self, name: str = "localhost") -> tuple[bytes, bytes]:
        """Key and certificate, both PEM, of a server on this machine."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(_name(name), self._certificate.subject, key)
        signed = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(
            self._key, hashes.SHA256()
        )
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, signed.public_bytes(serialization.Encoding.PEM)


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate, and the chain and key of a server on localhost."""

    authority: Path
    chain: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Write the files of an authority and of a server."""
    authority = Authority.make()
    found = Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")
    key, chain = authority.server()
    for path, content in ((found.authority, authority.certificate), (found.chain, chain), (found.key, key)):
        path.write_bytes(content)
    return found


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
    )
