"""One item of the checklist: what it takes, and what came of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dshealthd.core.text import printable

MOST = 400
"""Characters of a finding: one line of a terminal's scrollback, and a cell of a table."""


class State(enum.StrEnum):
    """What became of an item."""

    EXPECTED = "ran, as expected"
    UNEXPECTED = "ran, NOT as expected"
    NOT_RUN = "could not run"


@dataclass(frozen=True, slots=True)
class Item:
    """An item, once it is done with."""

    title: str
    command: str
    """What a person types for the same."""
    state: State
    text: str
    """What was found, or why it could not run."""

    def line(self, number: int) -> str:
        """Return the item for a terminal."""
        return f"{number:>2}. {self.title}: {self.state}\n    {self.text}\n    $ {self.command}"

    def row(self, number: int) -> str:
        """Return the item as a row of a table in Markdown."""
        cells = (str(number), self.title, str(self.state), self.text)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def ran(title: str, command: str, text: str, wrong: str = "") -> Item:
    """Return an item that ran; `wrong` is what is not as expected."""
    state = State.UNEXPECTED if wrong else State.EXPECTED
    return Item(
        title, command, state, shown(f"{wrong}; {text}" if wrong and text else wrong or text)
    )


def not_run(title: str, command: str, why: str) -> Item:
    """Return an item that could not run."""
    return Item(title, command, State.NOT_RUN, shown(why))


def shown(text: str) -> str:
    """Return what a program or another node said as one safe line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= MOST else f"{line[:MOST]}…"
