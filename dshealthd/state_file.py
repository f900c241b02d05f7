"""Files in `path.state` that the agent finds again after a restart."""

from __future__ import annotations

import contextlib
import os

_MODE = 0o644  # nothing in them is secret, and the agent may later run as another user


def replace(place: str | os.PathLike[str], content: bytes, *, durable: bool) -> None:
    """Replace a file; on OSError, and when killed at any point, the old one is as it was.

    `durable` waits for the disk, so that it outlives the boot as well: call it in a thread.
    """
    temporary = f"{os.fspath(place)}.new"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            while content:
                content = content[os.write(descriptor, content) :]
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
