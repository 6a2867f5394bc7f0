"""Certificates for tests of TLS: a certificate authority, and the certificates that it signs."""

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Authority:
    """A certificate authority, which clients may or may not trust. ``certificate`` is PEM."""

    def __init__(self, name: str = "tests") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._name, self._key, x509.BasicConstraints(True, None))

    def server(self, name: str = "localhost") -> tuple[bytes, bytes]:
        """Return the key and the certificate of a server on this machine, both as PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName(
            [x509.DNSName(name), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        )
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return private, self._sign(
            x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]), key, names
        )

    def _sign(
        self, name: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType
    ) -> bytes:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key.public_key())
        )
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - day)
        builder = builder.not_valid_after(now + day).add_extension(
            extension, critical=name == self._name
        )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def make_certificates(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Write an authority's certificate, and the key and certificate chain of a server.

    Returns:
        The file of the authority's certificate, and the settings of the server.
    """
    authority = Authority()
    key, chain = authority.server()
    for name, content in (("authority", authority.certificate), ("chain", chain), ("key", key)):
        (folder / f"{name}.pem").write_bytes(content)
    return folder / "authority.pem", {
        "tls_cert": str(folder / "chain.pem"),
        "tls_key": str(folder / "key.pem"),
    }
