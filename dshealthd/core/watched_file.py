"""Tells whether a file has changed since it was read, by what the file system says of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Signature = tuple[int, ...]
"""Compared for equality alone."""


def signature(status: os.stat_result) -> Signature:
    """Return what differs if a watched file is another, or its content or mode was changed.

    The time of change is part of it: whoever writes a file in place can set its time of
    modification back (`cp -p`, `touch -d`), and the size may be the same.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def signatures(paths: Iterable[str | os.PathLike[str]]) -> tuple[Signature | None, ...]:
    """Return each watched file's signature; None for one that cannot be looked at. May block."""
    return tuple(map(_look, paths))


def _look(path: str | os.PathLike[str]) -> Signature | None:
    try:
        return signature(os.stat(path))
    except OSError:
        return None
