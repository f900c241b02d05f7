"""What a command waits for, while it does."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from dshealthd.core.text import printable

_WIPE = "\r\x1b[K"


class Progress:
    """Progress line on standard error, shown only if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._last = ""

    def __call__(self, done: int, total: int, waiting: Sequence[str]) -> None:
        """Show the progress and the longest-running items."""
        if not self._shown:
            return
        text = f"{done}/{total} {self._what}"
        if waiting:
            text += f", waiting for {', '.join(waiting[:3])}"
        text = printable(text)[: shutil.get_terminal_size().columns - 1]
        if text != self._last:
            self._last = text
            sys.stderr.write(f"{_WIPE}{text}")
            sys.stderr.flush()

    def close(self) -> None:
        """Erase the progress line."""
        if self._last:
            sys.stderr.write(_WIPE)
            sys.stderr.flush()
