"""Text for people: plurals, durations, and untrusted text made safe to show."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from dshealthd.core import documents

MOST_NAMED = 3
"""Most problems or ranks that a finding names."""
_LONG = ((172800, 86400, "d"), (7200, 3600, "h"), (120, 60, "min"))
"""Units: seconds from which each is used, its length in seconds, its name.

Each starts at two units, as rounding a smaller value would lose too much.
"""


def plural(number: float, one: str, several: str = "") -> str:
    """Return a number and its noun, in the plural unless it is one.

    `several` is for plurals that do not just add an s: `plural(n, "port is", "ports are")`.
    """
    figure = f"{number:,.0f}" if float(number).is_integer() else f"{number:g}"
    return f"{figure} {one if number == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Return a duration in words."""
    for least, unit, name in _LONG:
        if seconds >= least:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.3g} s"


def several(texts: Collection[str]) -> str:
    """Return a few texts in order, and how many more there are."""
    named = sorted(texts)
    more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
    return ", ".join([*named[:MOST_NAMED], *more])


def nodes_to_exclude(nodes: Sequence[str]) -> dict[str, list[str] | str]:
    """Return nodes to leave out, as schedulers and launchers read them; all is empty without any:
    none of them takes an empty list.
    """
    return {
        "nodes": list(nodes),
        "slurm": f"--exclude={','.join(nodes)}" if nodes else "",
        "kubernetes": f"kubernetes.io/hostname notin ({','.join(nodes)})" if nodes else "",
        "deepspeed": f"--exclude={'@'.join(nodes)}" if nodes else "",
    }


def first_of(error: str) -> str:
    """Return the first line of an error, and the number of further lines."""
    first, *others = error.splitlines() or [""]
    return f"{first} (and {len(others)} more)" if others else first


def printable(text: str) -> str:
    r"""Return a text as one line in which only printable characters are left as they are.

    Control characters, escape sequences, line breaks, and characters that reverse or hide text
    (bidi, zero width) become JSON escapes such as `\u001b`: users name files, functions, threads
    and programs, and no name may move a reader's cursor or add a line.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else documents.dumps(character)[1:-1]
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines with each line made printable."""
    return "\n".join(map(printable, text.split("\n")))


def print_lines(text: object, *, error: bool = False) -> None:
    """Print a text of several lines, each made printable, on standard output or error.

    Names of files, jobs and hosts in it may be users', and it is read at a terminal.
    """
    print(printable_lines(str(text)), file=sys.stderr if error else sys.stdout, flush=error)
