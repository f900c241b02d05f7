"""Secrets of the peer API in files that only their owner can read: keys and certificates."""

from __future__ import annotations

import contextlib
import os
import ssl
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.core.host import regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dshealthd.probe.options import PeerOptions


MIN_KEY = 32
"""Characters of a key: hexadecimal digits of 128 bits."""
MAX_KEY_FILE = 4096
MAX_KEYS = 2
"""The current key and, during a rotation, the previous or the next one."""
NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, for which Python has no name."""


class CredentialError(Exception):
    """Secrets that cannot be used; `errors` has one "option: reason" for each problem. The errors
    never quote the files' contents.
    """

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """The validity of this node's certificate in Unix time; `trusted`: by its own authorities."""

    begins: float
    ends: float
    trusted: bool = True

    def problem(self, now: float) -> str:
        """Return a slug for what is wrong with the certificate as its owner sees it, or ""."""
        if not self.trusted:
            return "own_certificate_untrusted"
        if now > self.ends:
            return "own_certificate_expired"
        return "own_certificate_not_yet_valid" if now < self.begins else ""


@dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets in force."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    """The first key signs, all are accepted; empty without a key file."""
    server: ssl.SSLContext | None = None
    """Context for accepted connections; None without TLS."""
    client: ssl.SSLContext | None = None
    """Context for outgoing connections; None without TLS."""
    own: OwnCertificate | None = None
    """The node's own certificate; None without TLS."""


def secret_path(path: Path) -> str:
    """Return the path of a secret file; a name without a slash is one of systemd's credentials, if
    the unit has any.
    """
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return (
        os.path.join(directory, path)
        if directory and os.path.basename(path) == str(path)
        else str(path)
    )


def open_secret(path: Path) -> int:
    """Return a descriptor of a file with a secret. Raises OSError; PermissionError if others than
    its owner can reach it. systemd's directory of credentials is itself closed to others, and file
    modes in it are up to systemd.
    """
    where = secret_path(path)
    # Open first, then check the descriptor: the file at the path may be replaced in between.
    # Opening a FIFO must not wait for its writer.
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    problem = _exposed(os.fstat(descriptor), ours=where == str(path))
    if problem is not None:
        os.close(descriptor)
        raise PermissionError(problem)
    return descriptor


def _exposed(status: os.stat_result, *, ours: bool) -> str | None:
    """Return why a file cannot be trusted with a secret; modes and owners count for `ours`."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if ours and status.st_mode & 0o077:
        return (
            f"has mode {stat.S_IMODE(status.st_mode):04o}, so others than its owner can "
            "access it; it must be 0600"
        )
    if ours and status.st_uid not in {0, os.geteuid()}:
        return f"belongs to user {status.st_uid}; it must belong to root or this process's user"
    return None


def parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Return the keys of a file with `#` comments; ValueError, which never quotes the file."""
    keys = [line.strip() for line in data.splitlines()]
    keys = [key for key in keys if key and not key.startswith(b"#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        message = f"holds {len(keys)} keys; it must be one, or {MAX_KEYS} during a rotation"
        raise ValueError(message)
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY:
            message = (
                f"key {number} has {len(key)} characters; at least {MIN_KEY} are needed "
                "(openssl rand -hex 32)"
            )
            raise ValueError(message)
        # ASCII's visible characters
        if not all(0x21 <= byte <= 0x7E for byte in key):  # noqa: PLR2004
            message = f"key {number} is not made of visible ASCII characters"
            raise ValueError(message)
    return tuple(keys)


def read(options: PeerOptions) -> Secrets:
    """Return what the secret files hold. Raises CredentialError with all problems. Blocks."""
    errors: list[str] = []
    keys: tuple[bytes, ...] = ()
    server = client = own = None
    try:
        if options.key_file is not None:
            with _using(f"key_file: {options.key_file}"):
                keys = parse_keys(_content(options.key_file))
    except CredentialError as error:
        errors += error.errors
    try:
        if options.tls:
            server = _context(options, ssl.PROTOCOL_TLS_SERVER)
            client = _context(options, ssl.PROTOCOL_TLS_CLIENT)
            own = own_certificate(server, _context(options, ssl.PROTOCOL_TLS_CLIENT))
    except CredentialError as error:
        errors += error.errors
    if errors:
        raise CredentialError(errors)
    return Secrets(keys, server, client, own)


@contextlib.contextmanager
def _using(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ArithmeticError) as error:  # what ssl raises is an OSError too
        raise CredentialError([f"{what} {_reason(error)}"]) from error


def _content(path: Path) -> bytes:
    descriptor = open_secret(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_KEY_FILE + 1)
    if len(data) > MAX_KEY_FILE:
        message = f"is larger than {MAX_KEY_FILE} bytes"
        raise ValueError(message)
    return data


def _context(options: PeerOptions, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    # As `options.tls` is set.
    assert options.tls_cert_file and options.tls_key_file and options.tls_ca_file  # noqa: PT018, S101
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The caller, which knows which node the peer must be, compares its exact name.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection shows its certificate anew
    with _using(f"tls_ca_file: {options.tls_ca_file}"):
        context.load_verify_locations(regular(secret_path(options.tls_ca_file)))
    with _using(f"tls_key_file: {options.tls_key_file}"):
        descriptor = open_secret(options.tls_key_file)
    pair = f"{options.tls_cert_file} and tls_key_file are not a certificate and its key:"
    try:  # by its descriptor, so that it is the file that was checked
        with _using(f"tls_cert_file: {pair}"):
            context.load_cert_chain(
                # Without a password OpenSSL would ask for that of an encrypted key at the terminal.
                regular(secret_path(options.tls_cert_file)),
                f"/proc/self/fd/{descriptor}",
                password=lambda: "",
            )
    finally:
        os.close(descriptor)
    return context


def own_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> OwnCertificate:
    """Return a node's own certificate as its own authorities see it, from a handshake in memory.
    `client` is not usable for anything else afterwards.
    """
    # Tell an expired certificate from one that is not trusted.
    client.verify_flags |= NO_CHECK_TIME
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller, called = client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)
    for side in (caller, called, caller):  # one flight each
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return OwnCertificate(0.0, 0.0, trusted=False)
    shown = caller.getpeercert() or {}
    begins, ends = (
        float(ssl.cert_time_to_seconds(str(shown[name]))) for name in ("notBefore", "notAfter")
    )
    return OwnCertificate(begins, ends)


def _reason(error: OSError | ValueError | ArithmeticError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"cannot be used: {error.reason or 'not PEM'}"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error)
