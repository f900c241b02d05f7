"""The secrets of the peer API: the shared key and the node's certificate, re-read as their files change.

They are in files that only their owner can read, or among systemd's credentials; never in an environment, an argument or the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import stat
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dshealthd.collector import counter, gauge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dshealthd.collector import Sample
    from dshealthd.probe.peer import PeerOptions

log = logging.getLogger(__name__)

RELOAD_OK = gauge(
    "dshealthd_probe_peer_credentials_last_reload_successful",
    "1 if the last reading of the key and certificate files could be used; at 0 what was read before is in force.",
)
RELOAD_FAILURES = counter(
    "dshealthd_probe_peer_credentials_reload_failures_total", "Changes of the key or certificate files that could not be used."
)
METRICS = (RELOAD_OK, RELOAD_FAILURES)

MIN_KEY = 32
"""Characters of a key: hexadecimal digits of 128 bits."""
MAX_KEY_FILE = 4096
MAX_KEYS = 2
"""The one in force and, during a rotation, the one before or after it."""
CHECK_INTERVAL = 1.0
"""Seconds for which the files count as unchanged after they were looked at."""
CHECK_PATIENCE = 0.5
"""Seconds that a call waits for the files to be looked at; a file system that hangs costs that once."""
SETTLE = 0.2
"""Seconds for which a changed file must stay as it is before it is read: half a key may be a key."""

Mark = tuple[int, int, int, int] | None


class CredentialError(Exception):
    """Secrets that cannot be used; `errors` has one `key: reason` for each thing that is wrong, and nothing of what the files hold."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(errors))
        self.errors = errors


@dataclass(frozen=True, slots=True)
class Secrets:
    """What is in force."""

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    """The first one signs, each is accepted; none without a key file."""
    server: ssl.SSLContext | None = None
    """For connections that are accepted; None without TLS."""
    client: ssl.SSLContext | None = None
    """For connections that are made."""


def place(path: Path) -> str:
    """Return where a secret is: a name without a slash is one of systemd's credentials, where there are any."""
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return os.path.join(directory, path) if directory and os.path.basename(path) == str(path) else str(path)


def open_secret(path: Path) -> int:
    """Return a descriptor of a file with a secret. OSError; PermissionError where others than its owner can read or replace it.

    In systemd's directory of credentials it is the directory that keeps others out, and modes are systemd's own.
    """
    where = place(path)
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    problem = _exposed(os.fstat(descriptor), ours=where == str(path))
    if problem is not None:
        os.close(descriptor)
        raise PermissionError(problem)
    return descriptor


def _exposed(status: os.stat_result, *, ours: bool) -> str | None:
    """Say why a file cannot be trusted with a secret, or None; only for `ours` is it for modes and owners to tell."""
    if not stat.S_ISREG(status.st_mode):
        return "is no file"
    if ours and status.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(status.st_mode):04o}, so that others than its owner can reach it; it must be 0600"
    if ours and status.st_uid not in {0, os.geteuid()}:
        return f"belongs to user {status.st_uid}, not to root or to the user of this process"
    return None


def parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Return the keys of a key file; ValueError says what is wrong without telling any of it. Empty lines and `#` lines are left out."""
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
    """Return what the files hold; CredentialError with everything that is wrong. Blocks."""
    errors: list[str] = []
    keys: tuple[bytes, ...] = ()
    if options.key_file is not None:
        try:
            keys = parse_keys(_content(options.key_file))
        except (OSError, ValueError) as error:
            errors.append(f"key_file: {options.key_file} {_reason(error)}")
    server = client = None
    if options.tls:
        try:
            server = _context(options, ssl.PROTOCOL_TLS_SERVER)
            client = _context(options, ssl.PROTOCOL_TLS_CLIENT)
        except _TlsFileError as error:
            errors.append(str(error))
    if errors:
        raise CredentialError(errors)
    return Secrets(keys, server, client)


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
    context.check_hostname = False  # the peer's exact name is compared by who knows which node it must be
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
        context.load_cert_chain(place(options.tls_cert_file), f"/proc/self/fd/{descriptor}", password=lambda: "")
    except OSError as error:
        message = f"tls_cert_file: {options.tls_cert_file} and tls_key_file are no certificate and its key: {_reason(error)}"
        raise _TlsFileError(message) from error
    finally:
        os.close(descriptor)
    return context


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"cannot be used: {error.reason or 'no PEM'}"
    if isinstance(error, OSError) and error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error)


class Credentials:
    """The secrets in force, and the switch that turns calls off. Where a change cannot be used, what was read before stays in force."""

    def __init__(self, options: PeerOptions, monotonic: Callable[[], float] = time.monotonic) -> None:
        """Read the files; CredentialError. Blocks, once."""
        self._options = options
        self._monotonic = monotonic
        self._files = tuple(
            place(path) for path in (options.key_file, options.tls_cert_file, options.tls_key_file, options.tls_ca_file) if path is not None
        )
        self._marks = _marks(self._files)
        self.secrets = read(options)
        self.off = self._is_off()
        """Whether calls are turned off by `off_file`."""
        self._checked = monotonic()
        self._check: asyncio.Task[None] | None = None
        self._ok = True
        self._failures = 0

    async def current(self) -> Secrets:
        """Return what is in force now, after looking whether a file has changed; a file system that hangs is not waited for."""
        if self._check is None and self._monotonic() - self._checked >= CHECK_INTERVAL:
            self._check = asyncio.create_task(self._refresh(), name="peer credentials")
        if self._check is not None:
            await asyncio.wait({self._check}, timeout=CHECK_PATIENCE)
        return self.secrets

    def samples(self) -> Iterator[Sample]:
        """Yield whether the files in force are the ones on disk."""
        yield RELOAD_OK(float(self._ok))
        yield RELOAD_FAILURES(float(self._failures))

    async def close(self) -> None:
        """Give up a look that is in progress."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            marks, self.off = await asyncio.to_thread(self._look)
            if marks == self._marks:
                return
            await asyncio.sleep(SETTLE)
            if await asyncio.to_thread(_marks, self._files) != marks:
                return  # still being written
            try:
                self.secrets = await asyncio.to_thread(read, self._options)
            except CredentialError as error:
                self._ok = False
                self._failures += 1
                log.error("credentials of the peer API not used, those before stay in force:\n%s", error)
            else:
                self._ok = True
                log.info("credentials of the peer API: read again")
            self._marks = marks
        finally:
            self._checked = self._monotonic()
            self._check = None

    def _look(self) -> tuple[tuple[Mark, ...], bool]:
        return _marks(self._files), self._is_off()

    def _is_off(self) -> bool:
        return self._options.off_file is not None and os.path.lexists(self._options.off_file)


def _marks(files: tuple[str, ...]) -> tuple[Mark, ...]:
    """Return what changes when one of the files, or who may read it, does."""
    marks: list[Mark] = []
    for file in files:
        try:
            status = os.stat(file)
        except OSError:
            marks.append(None)
        else:
            marks.append((status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))
    return tuple(marks)
