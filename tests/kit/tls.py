"""A certification authority of the test's own, and a server's certificate from it."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


@dataclass(frozen=True)
class Certificates:
    """PEM files: the authority's certificate, and the chain and key of a server on localhost."""

    authority: Path
    chain: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    """Make them with the openssl program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl(
        folder, "req", "-x509", *_KEY, "-days", "2", "-subj", "/CN=authority of the tests", "-keyout", "authority.key",
        "-out", "authority.pem", "-addext", "keyUsage=critical,keyCertSign",
    )  # fmt: skip
    _openssl(folder, "req", *_KEY, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    _openssl(
        folder, "x509", "-req", "-in", "server.csr", "-CA", "authority.pem", "-CAkey", "authority.key", "-days", "2",
        "-CAcreateserial", "-extfile", "names", "-out", "server.pem",
    )  # fmt: skip
    return Certificates(folder / "authority.pem", folder / "server.pem", folder / "server.key")


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)
