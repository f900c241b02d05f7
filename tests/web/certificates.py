"""Certificates for tests, made with openssl."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def authority(directory: Path, name: str) -> None:
    """Make a certificate authority: `name.pem` and `name.key`."""
    _openssl(directory, f"req -x509 {KEY} {name}.key -subj /CN={name} -days 2 -out {name}.pem")


def certificate(directory: Path, name: str, issuer: str, names: str) -> None:
    """Make a certificate with subject alternative names, as openssl writes them: `name.pem` and
    `name.key`.
    """
    (directory / f"{name}.ext").write_text(f"subjectAltName={names}\n", encoding="ascii")
    _openssl(directory, f"req {KEY} {name}.key -subj /CN={name} -out {name}.csr")
    signer = f"-CA {issuer}.pem -CAkey {issuer}.key -CAcreateserial"
    request = f"x509 -req -in {name}.csr -extfile {name}.ext"
    _openssl(directory, f"{request} {signer} -days 2 -out {name}.pem")


def dated(directory: Path, name: str, issuer: str, names: str, start: float, end: float) -> None:
    """Make a certificate that is valid between two times, in seconds from now."""
    (directory / "ca.cnf").write_text(
        "[ca]\ndefault_ca=it\n[it]\ndatabase=index\nnew_certs_dir=.\nrand_serial=yes\n"
        "default_md=sha256\npolicy=any\nunique_subject=no\nx509_extensions=ext\n"
        f"[any]\ncommonName=supplied\n[ext]\nsubjectAltName={names}\n",
        encoding="ascii",
    )
    (directory / "index").touch()
    begin, over = (
        time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + moment)) for moment in (start, end)
    )
    _openssl(directory, f"req {KEY} {name}.key -subj /CN={name} -out {name}.csr")
    signer = f"-cert {issuer}.pem -keyfile {issuer}.key -startdate {begin} -enddate {over}"
    _openssl(directory, f"ca -batch -notext -config ca.cnf {signer} -in {name}.csr -out {name}.pem")


def encrypted(directory: Path, name: str) -> None:
    """Make an encrypted copy of a key: `name.encrypted.key`."""
    words = "-aes128 -passout pass:secret"
    _openssl(directory, f"ec -in {name}.key {words} -out {name}.encrypted.key")


KEY = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout"


def _openssl(directory: Path, words: str) -> None:
    subprocess.run(
        ["openssl", *words.split()],
        check=True,
        capture_output=True,
        timeout=60,
        cwd=directory,
        umask=0o077,  # a key that others can read is warned of
    )
