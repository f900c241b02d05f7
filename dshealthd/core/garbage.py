"""Memory of processes that run for months: garbage in cycles is freed, and free pages returned."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

EVERY = 60.0
"""Seconds between two searches for cycles."""
_EARLY = 0.5
"""Seconds by which a search may be early: timers are not exact."""
_NEW_OBJECTS = 10_000
"""Surplus of created over freed objects that triggers a search in between.

A sweep replaces thousands of samples at once, none of them in a cycle. With Python's default of
700, checking them takes a tenth of the CPU of the agent and its workers.
"""


class Cycles:
    """Frees cycles every minute, at a moment of its owner's choice.

    Cycles are rare, but a traceback in one can pin large texts: memory would grow for hours if only
    their number counted.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        """Free the cycles so far, and treat all other objects as permanent: they are not checked
        again.
        """
        self._monotonic = monotonic
        self._trim = _trim()
        self._free()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)

    def free(self) -> None:
        """Free all cycles among new objects, if the last search was a minute ago."""
        if self._monotonic() - self._freed >= EVERY - _EARLY:
            self._free()

    def _free(self) -> None:
        gc.collect()
        # glibc keeps the pages below the last block in use: each burst of large texts, such as 50
        # invalid requests, would leave the process larger.
        self._trim(0)
        self._freed = self._monotonic()


def free_transport(transport: asyncio.BaseTransport) -> None:
    """Break the cycle in which a transport of asyncio refers to itself, at `connection_lost`.

    Otherwise each connection leaves 0.6 KiB until the next search for cycles (python/cpython
    #100348; Python 3.12 breaks it too, but not in a transport that was aborted). The event loop
    reads no more from it by then. The transport below one of TLS is left to that search.
    """
    for own in ("_read_ready_cb", "_write_ready"):  # the latter since Python 3.12
        if hasattr(transport, own):
            setattr(transport, own, None)  # there is no public way


def free_frames(error: BaseException) -> None:
    """Free the frames that an exception comes from, once it has been handled for good.

    If one of them refers to the exception, as those of asyncio's TLS handshake do, everything in
    them stays until the next search for cycles: 200 KiB for each handshake that failed.
    """
    error.__traceback__ = None


def _trim() -> Callable[[int], object]:
    """Return `malloc_trim(3)`; a function that does nothing with a C library that lacks it."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda _pad: 0)
