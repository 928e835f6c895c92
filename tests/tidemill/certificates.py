"""Certificates for tests of TLS, made by openssl and good for a day."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    certificate: Path
    key: Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_authority(folder: Path, name: str) -> Certificate:
    """A certificate authority."""
    made = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", made.key)
    _openssl("req", "-x509", *key, "-days", "1", "-subj", f"/CN={name}", "-out", made.certificate)
    return made


def make_certificate(folder: Path, authority: Certificate) -> Certificate:
    """One for 127.0.0.1, and for no name."""
    made = Certificate(folder / "server.pem", folder / "server.key")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", made.key)
    signer = ("-CA", authority.certificate, "-CAkey", authority.key)
    subject = ("-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1")
    _openssl("req", "-x509", *key, *signer, *subject, "-days", "1", "-out", made.certificate)
    return made
