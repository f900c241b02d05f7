"""Detects whether a file has changed since it was read, from its metadata."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

Signature = tuple[int, ...]
"""Only compared for equality."""


def signature(status: os.stat_result) -> Signature:
    """Return a value that differs if a file was replaced, or its content or mode changed.

    It includes the change time (ctime): a writer in place can set the modification time back
    (`cp -p`, `touch -d`), and the size may be the same.
    """
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def signatures(paths: Iterable[str | os.PathLike[str]]) -> tuple[Signature | None, ...]:
    """Return each file's signature; None for one without readable metadata. May block."""
    return tuple(map(_look, paths))


def _look(path: str | os.PathLike[str]) -> Signature | None:
    try:
        return signature(os.stat(path))
    except OSError:
        return None
