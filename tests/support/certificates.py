"""Certificates for tests of TLS, as openssl makes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["make_authority", "make_certificate"]

KEYS = {"ec": ["ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"], "rsa": ["rsa:2048"]}


def make_authority(folder: Path) -> Path:
    """The certificate of an authority; its key is beside it."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    authority = folder / "authority.pem"
    _make(authority, folder / "authority.key", "ec", "-subj", "/CN=authority")
    return authority


def make_certificate(authority: Path, certificate: Path, key: Path, kind: str = "ec") -> None:
    """Make a certificate of this machine that ``authority`` has signed, and its key."""
    signer = ["-CA", str(authority), "-CAkey", str(authority.with_suffix(".key"))]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:false"]
    _make(certificate, key, kind, "-subj", "/CN=localhost", *signer, *names)


def _make(certificate: Path, key: Path, kind: str, *options: str) -> None:
    made = ["openssl", "req", "-x509", "-newkey", *KEYS[kind], "-nodes", "-days", "2", *options]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
