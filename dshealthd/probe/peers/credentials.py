"""Credentials of the peer API: the keys in force, re-read when their file changes, and the switch
to turn it off.
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
from dshealthd.probe.peers.key_file import CredentialError, read, secret_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dshealthd.core.collector import Sample
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
            if marks == self._marks:
                return
            await asyncio.sleep(SETTLE)
            if await background.call(self._signature, THREAD, None) != marks:
                return  # still being written
            try:
                self.keys = await background.call(
                    lambda: read(self._options.key_file), THREAD, None, CredentialError
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

    def _signature(self) -> object:
        path = self._options.key_file
        return None if path is None else signatures((secret_path(path),))

    def _is_off(self) -> bool:
        return self._options.off_file is not None and os.path.lexists(self._options.off_file)
