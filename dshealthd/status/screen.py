"""The screen of `--watch`: redraws in place, as `top` does.

Six control sequences do what a terminal library would need megabytes on every node for. Every
terminal since the VT220 understands them, and so does xterm.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dshealthd.core.text import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Switches to the alternate screen, hides the cursor, and cuts long lines at the edge."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
CLEAR = "\x1b[H\x1b[J"
"""Moves to the first line and clears everything below."""


class Screen:
    """Redraws in place while it is entered; without a terminal, prints one frame after another."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> Self:
        """Switch to the alternate screen, so that the terminal's contents are kept."""
        if self._terminal:
            sys.stdout.write(ENTER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the terminal's contents."""
        if self._terminal:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Show as many lines as fit, and the number of those left out."""
        if not self._terminal:
            print("\n".join(lines), flush=True)
            return
        room = os.get_terminal_size(sys.stdout.fileno()).lines  # LINES may be stale
        if len(lines) > room:
            left = len(lines) - room + 1
            lines = [
                *lines[: room - 1],
                f"\u2026 {plural(left, 'more line')}: enlarge the window",
            ]
        sys.stdout.write(CLEAR + "\n".join(lines))
        sys.stdout.flush()
