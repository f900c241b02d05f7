"""Text that others wrote, made safe to show in a terminal, a log or a summary."""

from __future__ import annotations

import json


def printable(text: str) -> str:
    r"""Return a text as one line in which nothing but printable characters stands as it is.

    Control characters, escape sequences, line breaks, and what reverses or hides text (bidi,
    zero width) become escapes as JSON has them, such as `\u001b`: a user names files, functions,
    threads and programs, and none of these may move a reader's cursor or add a line.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else json.dumps(character)[1:-1] for character in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines, each printable."""
    return "\n".join(map(printable, text.split("\n")))
