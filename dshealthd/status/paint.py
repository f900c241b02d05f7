"""Text for the terminal in color, and the exit status of a verdict."""

from __future__ import annotations

import os
import sys

from dshealthd.findings.finding import State

EXIT = {State.OK: 0, State.WARNING: 1, State.CRITICAL: 2, State.UNKNOWN: 3}
"""Exit status by verdict, as in Nagios plugins."""
COLORS = {State.OK: 32, State.WARNING: 33, State.UNKNOWN: 35, State.CRITICAL: 31}
"""SGR codes: green, yellow, magenta, red."""


class Paint:
    """Colors text if the terminal shows colors."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def __call__(self, state: State | None, text: str) -> str:
        """Return `text` in the color of a state; None has no color."""
        if state is None or not self._color:
            return text
        return f"\x1b[1;{COLORS[state]}m{text}\x1b[0m"


def colored() -> bool:
    """Return whether standard output shows colors: a terminal, without NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
