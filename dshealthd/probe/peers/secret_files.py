"""The secret files of the peer API: which can be trusted, and what keys and certificates they hold.

They are files that only their owner can read, or among systemd's credentials; never an environment,
an argument or the log.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.probe.options import PeerOptions

MIN_KEY = 32
"""Characters of a key: hexadecimal digits of 128 bits."""
MAX_KEY_FILE = 4096
MAX_KEYS = 2
"""The one in force and, during a rotation, the one before or after it."""
NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python has no name for."""


class CredentialError(Exception):
    """Secrets that cannot be used; `errors` has one `key.

    Reason` for each thing that is wrong, and nothing of what the files hold.
    """

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """When this node's certificate is valid, in Unix time; `trusted` by its own authorities."""

    begins: float
    ends: float
    trusted: bool = True

    def problem(self, now: float) -> str:
        """Return a slug for what is wrong with the certificate, or "" if its owner sees nothing
        wrong with it.
        """
        if not self.trusted:
            return "own_certificate_untrusted"
        if now > self.ends:
            return "own_certificate_expired"
        return "own_certificate_not_yet_valid" if now < self.begins else ""


@dataclass(frozen=True, slots=True)
class Secrets:
    """What is in force."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    """The first one signs, each is accepted; none without a key file."""
    server: ssl.SSLContext | None = None
    """For connections that are accepted; None without TLS."""
    client: ssl.SSLContext | None = None
    """For connections that are made."""
    own: OwnCertificate | None = None
    """The node's own certificate; None without TLS."""


def place(path: Path) -> str:
    """Return where a secret file is: a name without a slash is one of systemd's credentials, where
    there are any.
    """
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return (
        os.path.join(directory, path)
        if directory and os.path.basename(path) == str(path)
        else str(path)
    )


def open_secret(path: Path) -> int:
    """Return a descriptor of a file with a secret.

    OSError; PermissionError where others than its owner can read or replace it.

    In systemd's directory of credentials it is the directory that keeps others out, and modes are
    systemd's own.
    """
    where = place(path)
    # Opened first and looked at by descriptor: what is at the path may be replaced in between.
    # Opening a FIFO must not wait for its writer.
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    problem = _exposed(os.fstat(descriptor), ours=where == str(path))
    if problem is not None:
        os.close(descriptor)
        raise PermissionError(problem)
    return descriptor


def _exposed(status: os.stat_result, *, ours: bool) -> str | None:
    """Say why a file cannot be trusted with a secret, or None.

    Only for `ours` is it for modes and owners to tell.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if ours and status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, so that others than its owner can reach it; it must be 0600"
    if ours and status.st_uid not in {0, os.geteuid()}:
        return f"belongs to user {status.st_uid}, not to root or to the user of this process"
    return None


def parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Return the keys of a key file; ValueError says what is wrong without telling any of it.

    Empty lines and `#` lines are left out.
    """
    keys = [line.strip() for line in data.splitlines()]
    keys = [key for key in keys if key and not key.startswith(b"#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        message = f"holds {len(keys)} keys; it must be one, or {MAX_KEYS} during a rotation"
        raise ValueError(message)
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY:
            message = f"key {number} has {len(key)} characters; at least {MIN_KEY} are needed (openssl rand -hex 32)"
            raise ValueError(message)
        if not all(0x21 <= byte <= 0x7E for byte in key):  # noqa: PLR2004 - ASCII's visible characters
            message = f"key {number} is not made of visible ASCII characters"
            raise ValueError(message)
    return tuple(keys)


def read(options: PeerOptions) -> Secrets:
    """Return what the secret files hold; CredentialError with everything that is wrong. Blocks."""
    errors: list[str] = []
    keys: tuple[bytes, ...] = ()
    if options.key_file is not None:
        try:
            keys = parse_keys(_content(options.key_file))
        except (OSError, ValueError) as error:
            errors.append(f"key_file: {options.key_file} {_reason(error)}")
    server = client = own = None
    if options.tls:
        try:
            server = _context(options, ssl.PROTOCOL_TLS_SERVER)
            client = _context(options, ssl.PROTOCOL_TLS_CLIENT)
            own = own_certificate(server, _context(options, ssl.PROTOCOL_TLS_CLIENT))
        except _TlsFileError as error:
            errors.append(str(error))
    if errors:
        raise CredentialError(errors)
    return Secrets(keys, server, client, own)


class _TlsFileError(Exception):
    """A file for TLS that cannot be used."""


def _content(path: Path) -> bytes:
    descriptor = open_secret(path)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(MAX_KEY_FILE + 1)
    if len(data) > MAX_KEY_FILE:
        message = f"is larger than {MAX_KEY_FILE} bytes"
        raise ValueError(message)
    return data


def _context(options: PeerOptions, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    assert options.tls_cert_file is not None  # noqa: S101 - options.tls
    assert options.tls_key_file is not None  # noqa: S101 - options.tls
    assert options.tls_ca_file is not None  # noqa: S101 - options.tls
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The peer's exact name is compared by who knows which node it must be.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # every connection shows its certificate anew
    try:
        context.load_verify_locations(place(options.tls_ca_file))
    except OSError as error:  # what ssl raises is one too
        message = f"tls_ca_file: {options.tls_ca_file} {_reason(error)}"
        raise _TlsFileError(message) from error
    try:
        descriptor = open_secret(options.tls_key_file)
    except OSError as error:
        message = f"tls_key_file: {options.tls_key_file} {_reason(error)}"
        raise _TlsFileError(message) from error
    try:  # by its descriptor, so that it is the file that was looked at
        context.load_cert_chain(
            # Without a password OpenSSL would ask for that of an encrypted key at the terminal.
            place(options.tls_cert_file),
            f"/proc/self/fd/{descriptor}",
            password=lambda: "",
        )
    except OSError as error:
        message = f"tls_cert_file: {options.tls_cert_file} and tls_key_file are no certificate and its key: {_reason(error)}"
        raise _TlsFileError(message) from error
    finally:
        os.close(descriptor)
    return context


def own_certificate(server: ssl.SSLContext, client: ssl.SSLContext) -> OwnCertificate:
    """Return what a node sees of its own certificate when it calls itself, in memory.

    `client` is used for this alone.
    """
    # An expired certificate is to be told from one that nobody trusts.
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


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"cannot be used: {error.reason or 'no PEM'}"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error)
