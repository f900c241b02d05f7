"""Credentials of the peer API: the keys in force, re-read when their file changes, and the switch
to turn it off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.child import StartError
from dshealthd.core.collector import Sample, gauge
from dshealthd.core.host import signatures

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.probe.options import PeerOptions

log = logging.getLogger(__name__)

RELOAD_OK = gauge(
    "dshealthd_probe_peer_credentials_last_reload_successful",
    "1 if the key file was last read successfully; at 0 the previous keys stay in force.",
)

THREAD = "peer credentials"
CHECK_INTERVAL = 1.0
"""Seconds for which the key file counts as unchanged after a check."""
SETTLE = 0.2
"""Seconds for which a changed file must stay unchanged: half a key may look like one."""
MIN_KEY = 32
"""Characters of a key: hexadecimal digits of 128 bits."""
MAX_KEY_FILE = 4096
"""Bytes: two keys of `openssl rand -hex 32` and their comments have some 200."""
MAX_KEYS = 2
"""The current key and, during a rotation, the previous or the next one."""


class CredentialError(Exception):
    """A key file that cannot be used; the message says why and never quotes its content."""


class Credentials:
    """The keys in force, which outlast a file that cannot be used; and the off switch."""

    def __init__(
        self, options: PeerOptions, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the key file of the peer API. Blocks, this once. Raises CredentialError."""
        self._options = options
        self._monotonic = monotonic
        self._marks = self._signature()
        self.keys = read(options.key_file)
        """The first key signs, all are accepted."""
        self.off = self._is_off()
        """Whether calls are turned off by `off_file`."""
        self._checked = monotonic()
        self._check: asyncio.Task[None] | None = None
        self._ok = True

    def current(self) -> tuple[bytes, ...]:
        """Return the keys in force. Begin a check of their file if one is due, for later calls: no
        call waits for the disk.
        """
        if self._check is None and self._monotonic() - self._checked >= CHECK_INTERVAL:
            self._check = asyncio.create_task(self._refresh(), name="peer credentials")
        return self.keys

    def samples(self) -> Iterator[Sample]:
        """Yield the metric of reloads."""
        yield RELOAD_OK(float(self._ok))

    async def close(self) -> None:
        """Cancel a check of the key file that is in progress."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            marks, self.off = await background.call(
                lambda: (self._signature(), self._is_off()), THREAD, None
            )
            # What could not be read may be readable now, though the file is as it was.
            if marks == self._marks and self._ok:
                return
            await asyncio.sleep(SETTLE)
            if await background.call(self._signature, THREAD, None) != marks:
                return  # still being written
            try:
                self.keys = await background.call(
                    lambda: read(self._options.key_file), THREAD, None, CredentialError
                )
            except CredentialError as error:
                if marks != self._marks:
                    log.error(
                        "peer API: new credentials rejected, the previous ones stay in force:\n%s",
                        error,
                    )
                self._ok = False
            else:
                self._ok = True
                log.info("peer API: credentials reloaded")
            self._marks = marks
        except StartError as error:  # checked again after CHECK_INTERVAL
            log.warning("%s; the previous credentials stay in force", error)
        finally:
            self._checked = self._monotonic()
            self._check = None

    def _signature(self) -> object:
        path = self._options.key_file
        return None if path is None else signatures((secret_path(path),))

    def _is_off(self) -> bool:
        return self._options.off_file is not None and os.path.lexists(self._options.off_file)


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


def read_secret(path: Path) -> bytes:
    """Return the content of a key file. Raises ValueError, and OSError; PermissionError if others
    than its owner can reach it. systemd's directory of credentials is itself closed to others, and
    file modes in it are up to systemd. Blocks.
    """
    where = secret_path(path)
    # Open first, then check the descriptor: the file at the path may be replaced in between.
    # Opening a FIFO must not wait for its writer.
    descriptor = os.open(where, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if problem := _exposed(os.fstat(descriptor), ours=where == str(path)):
            raise PermissionError(problem)
        data = os.read(descriptor, MAX_KEY_FILE + 1)
    finally:
        os.close(descriptor)
    if len(data) > MAX_KEY_FILE:
        raise ValueError(f"is larger than {MAX_KEY_FILE} bytes")
    return data


def _exposed(status: os.stat_result, *, ours: bool) -> str:
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
    return ""


def parse_keys(data: bytes) -> tuple[bytes, ...]:
    """Return the keys of a file with `#` comments; ValueError, which never quotes the file."""
    keys = [line.strip() for line in data.splitlines()]
    keys = [key for key in keys if key and not key.startswith(b"#")]
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ValueError(f"holds {len(keys)} keys; it must be one, or {MAX_KEYS} during a rotation")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_KEY:
            raise ValueError(
                f"key {number} has {len(key)} characters; at least {MIN_KEY} are needed "
                "(openssl rand -hex 32)"
            )
        # ASCII's visible characters
        if not all(0x21 <= byte <= 0x7E for byte in key):  # noqa: PLR2004
            raise ValueError(f"key {number} is not made of visible ASCII characters")
    return tuple(keys)


def read(path: Path | None) -> tuple[bytes, ...]:
    """Return the keys of the key file: the first signs, all are accepted. Raises CredentialError.
    Blocks.
    """
    if path is None:
        raise CredentialError("key_file: is not set")
    try:
        return parse_keys(read_secret(path))
    except (OSError, ValueError, ArithmeticError) as error:
        why = str(error)
        if isinstance(error, OSError) and error.strerror:
            why = f"cannot be read: {error.strerror}"
        raise CredentialError(f"key_file: {path} {why}") from error
