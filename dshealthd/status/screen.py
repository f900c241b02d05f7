"""The screen of `--watch`: one picture after the other in place, as `top` does.

A library for terminals would bring megabytes onto every node for what six control sequences do;
they are those of every terminal since the VT220 and of xterm.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""The alternate screen, without a cursor; lines that are too long are cut at the edge."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
CLEAR = "\x1b[H\x1b[J"
"""Moves to the first line and clears what is below."""


class Screen:
    """Shows pictures while it is entered; on what is no terminal one below the other."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()

    def __enter__(self) -> Self:
        """Leave what the terminal shows as it is, and take another screen."""
        if self._terminal:
            sys.stdout.write(ENTER)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Go back to what the terminal showed before."""
        if self._terminal:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()

    def show(self, lines: Sequence[str]) -> None:
        """Show as many lines as the screen has room for, and how many are left out."""
        if not self._terminal:
            print("\n".join(lines), flush=True)
            return
        room = os.get_terminal_size(sys.stdout.fileno()).lines  # LINES may be old
        if len(lines) > room:
            left = len(lines) - room + 1
            lines = [
                *lines[: room - 1],
                f"\u2026 {plural(left, 'more line')}: make the window higher",
            ]
        sys.stdout.write(CLEAR + "\n".join(lines))
        sys.stdout.flush()
