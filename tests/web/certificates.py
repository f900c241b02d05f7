"""Certificates for tests, made with openssl."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def authority(directory: Path, name: str) -> None:
    """Make a certificate authority: `name.pem` and `name.key`."""
    _openssl(
        "req",
        "-x509",
        *_key(directory, name),
        "-subj",
        f"/CN={name}",
        "-days",
        "2",
        "-out",
        f"{directory}/{name}.pem",
    )


def certificate(directory: Path, name: str, issuer: str, names: str) -> None:
    """Make a certificate with subject alternative names, as openssl writes them. `name.pem` and
    `name.key`.
    """
    request, extensions = directory / f"{name}.csr", directory / f"{name}.ext"
    extensions.write_text(f"subjectAltName={names}\n", encoding="ascii")
    _openssl("req", *_key(directory, name), "-subj", f"/CN={name}", "-out", str(request))
    signer = (
        "-CA",
        f"{directory}/{issuer}.pem",
        "-CAkey",
        f"{directory}/{issuer}.key",
        "-CAcreateserial",
    )
    _openssl(
        "x509", "-req", "-in", str(request), *signer, "-days", "2", "-extfile", str(extensions), "-out", f"{directory}/{name}.pem"
    )  # fmt: skip


def encrypted(directory: Path, name: str) -> None:
    """Make an encrypted copy of a key: `name.encrypted.key`."""
    _openssl(
        "ec",
        "-in",
        f"{directory}/{name}.key",
        "-aes128",
        "-passout",
        "pass:secret",
        "-out",
        f"{directory}/{name}.encrypted.key",
    )


def _key(directory: Path, name: str) -> tuple[str, ...]:
    return (
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        f"{directory}/{name}.key",
    )


def _openssl(*arguments: str) -> None:
    subprocess.run(
        ["openssl", *arguments],
        check=True,
        capture_output=True,
        timeout=60,
        umask=0o077,  # a key that others can read is warned of
    )
