"""Credentials of the peer API: secrets in files that only their owner can read, re-read when they
change, and the switch to turn it off.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING

from dshealthd.core import background
from dshealthd.core.child import StartError
from dshealthd.core.collector import gauge
from dshealthd.core.host import signatures
from dshealthd.probe.peers.secret_files import CredentialError, Secrets, read, secret_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.core.collector import Sample
    from dshealthd.probe.options import PeerOptions


log = logging.getLogger(__name__)

RELOAD_OK = gauge(
    "dshealthd_probe_peer_credentials_last_reload_successful",
    "1 if the key and certificate files were last read successfully; at 0 the previous credentials "
    "stay in force.",
)
EXPIRY = gauge(
    "dshealthd_probe_peer_certificate_expiry_timestamp_seconds",
    "When this node's own certificate for the peer API expires; only if it has one.",
)

THREAD = "peer credentials"
CHECK_INTERVAL = 1.0
"""Seconds for which the files count as unchanged after a check."""
CHECK_PATIENCE = 0.5
"""Seconds that a call waits for a check of the files. A hung file system delays one call: later
calls do not wait for the same check.
"""
SETTLE = 0.2
"""Seconds for which a changed file must stay unchanged: half a key may look like one."""


class Credentials:
    """The secrets in force, which outlast files that cannot be used; and the off switch."""

    def __init__(
        self, options: PeerOptions, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """Read the files. Blocks, this once. Raises CredentialError."""
        self._options = options
        self._monotonic = monotonic
        files = (options.key_file, options.tls_cert_file, options.tls_key_file, options.tls_ca_file)
        self._files = tuple(secret_path(path) for path in files if path is not None)
        self._marks = signatures(self._files)
        self.secrets = read(options)
        self.off = self._is_off()
        """Whether calls are turned off by `off_file`."""
        self._checked = monotonic()
        self._check: asyncio.Task[None] | None = None
        self._overdue: asyncio.Task[None] | None = None
        self._ok = True

    async def current(self) -> Secrets:
        """Return the credentials in force, after a look at the files, unless they hang."""
        if self._check is None and self._monotonic() - self._checked >= CHECK_INTERVAL:
            self._check = asyncio.create_task(self._refresh(), name="peer credentials")
        check = self._check
        if check is not None and check is not self._overdue:
            _, pending = await asyncio.wait({check}, timeout=CHECK_PATIENCE)
            if pending:
                self._overdue = check
        return self.secrets

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of reloads and of the node's own certificate."""
        yield RELOAD_OK(float(self._ok))
        if self.secrets.own is not None and self.secrets.own.trusted:
            yield EXPIRY(self.secrets.own.ends)

    async def close(self) -> None:
        """Cancel a check of the key and certificate files that is in progress."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.gather(self._check, return_exceptions=True)

    async def _refresh(self) -> None:
        try:
            marks, self.off = await background.call(
                lambda: (signatures(self._files), self._is_off()), THREAD, None
            )
            if marks == self._marks:
                return
            await asyncio.sleep(SETTLE)
            if await background.call(lambda: signatures(self._files), THREAD, None) != marks:
                return  # still being written
            try:
                self.secrets = await background.call(
                    lambda: read(self._options), THREAD, None, CredentialError
                )
            except CredentialError as error:
                self._ok = False
                log.error(
                    "peer API: new credentials rejected, the previous ones stay in force:\n%s",
                    error,
                )
            else:
                self._ok = True
                log.info("peer API: credentials reloaded")
            self._marks = marks
        except StartError as error:  # checked again after CHECK_INTERVAL
            log.warning("%s; the previous credentials stay in force", error)
        finally:
            self._checked = self._monotonic()
            self._check = None

    def _is_off(self) -> bool:
        return self._options.off_file is not None and os.path.lexists(self._options.off_file)
