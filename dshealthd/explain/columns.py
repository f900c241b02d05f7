"""What stands before every line of a log: numbers, marks, and columns of names, ranks and tasks."""

from __future__ import annotations

import os.path
import re
from collections.abc import Sequence
from itertools import pairwise

from dshealthd.explain.events import is_name_of_host

NEARLY_ALL = 0.9
"""Share of a file's first lines that must have what a collector puts before every line."""
SAMPLE = 0.6
"""Share of a file's first lines that must begin with `77: `, or with a host, for it to be a prefix:
launchers add lines of their own."""
TASK = re.compile(r"[ ]*(?:(?P<task>\d{1,6}):|\[(?P<task_2>\d{1,6})\]:?)(?:[ ]|$)")
"""As srun and Hydra number the tasks before their lines."""
RANKED = re.compile(
    r"[\[(<|]?(?:(?P<host>[\w.-]{0,62}\d[\w.-]{0,62})[/ :@|,\[(<>]{1,3}"
    r"|node[ =:]?\d{1,6}[ ,]{1,2}|(?:\w+ ?[:|] ?){1,3}[\[(]?)?"
    r"(?:global[ _-]?)?(?:[Rr]ank|RANK)[ :=_-]{0,2}(?P<rank>\d{1,6})(?:/\d{1,6})?"
    r"(?:(?:[ ,]{1,2}host=|[@|]| on )(?P<host_2>[\w.-]*\d[\w.-]*))?"
    r"(?:[\])>:|]{1,2}[ ]{1,8}[|>-](?= )|[\])>:|]{1,2}|\s{1,8}[|>-](?= )|(?= \w+=))(?:[ ]|$|(?=\[))"
    r"|(?P<host_3>[A-Za-z][\w.-]{0,62}\d[\w.-]{0,62}|\d{1,3}(?:\.\d{1,3}){3})"
    r"[ ]r(?:ank)?(?P<rank_2>\d{1,6})(?:[ ]|$)"
)
"""A rank before every line, as any logger may put it, and a host beside it."""
NODE = re.compile(
    r"\[?(?P<path>(?:[A-Za-z][\w.-]{0,62}[/@]){1,4})?"
    r"(?P<host>[A-Za-z][\w.-]*\w|\d{1,3}(?:\.\d{1,3}){3})"
    r"(?::|\]|(?: \S{1,63})? {1,40}[|>]|(?(path)|(?!))| (?P<container>[a-z][a-z\d-]{1,62}))"
    r"(?:[ ]|$|(?=\[))"
)
"""A node or pod before every line, as pdsh, compose, stern, loggers of launchers, and collectors
that name a stream (`job/container/host`) put it."""
ENOUGH = 4
"""A file must have more lines than this to tell a prefix from what its lines say."""
_UNNAMED = re.compile(
    r"(?:[\w./-]{1,200}+(?<=\.log|\.txt|\.out|\.err)(?=[:-]\d)|[A-Z][a-z]{2}(?= +\d)"
    r"|(?<=\d)[TZ]|[^A-Za-z])*+"
)
"""A prefix that names nothing: numbers, dates and marks, and a file whose lines are numbered."""
_NUMBER = re.compile(r"\d+")
_BREAK = re.compile(r"\s+|(?<=\d)[:-](?=\D|$)")
_NUMBERED = re.compile(r"\s*(\d+)[:-]")
_INDENT = re.compile(r"^\s+(?=\d)")


def name_at(line: str, begin: int) -> re.Match[str] | None:
    """Return the match of a name in a column before a line; None if it may be another word."""
    match = NODE.match(line, begin)
    if match is None or not (is_name_of_host(match["host"]) or match[0].rstrip()[-1] in "|>"):
        return None
    return match


def is_column(found: Sequence[object]) -> bool:
    """Return whether most lines have something, but for what a launcher prints before and after."""
    having = [number for number, one in enumerate(found) if one is not None]
    return len(having) > 1 and len(having) >= SAMPLE * (having[-1] + 1 - having[0])


def are_of_tasks(lines: Sequence[str]) -> bool:
    """Return whether lines begin with numbers of tasks, not with their own."""
    found = filter(None, map(TASK.match, lines))
    numbers = [int(match["task"] or match["task_2"]) for match in found]
    return len(numbers) == len(lines) and not _are_ascending(numbers)


def _are_ascending(numbers: Sequence[int]) -> bool:
    """Return whether numbers are those of lines, of which there is none with 0."""
    return numbers[0] > 0 and all(one < other for one, other in pairwise(numbers))


def mark_before(lines: Sequence[str]) -> str | None:
    """Return an expression for a mark that names nothing before all lines; None without one."""
    own = list(filter(None, map(_NUMBERED.match, lines)))
    if len(own) == len(lines) and _are_ascending([int(one[1]) for one in own]):
        return _NUMBERED.pattern
    for indent in ("", r"\s*"):  # numbers of lines are aligned to the right
        forms = [_NUMBER.sub("0", _INDENT.sub("", line) if indent else line) for line in lines]
        whole = os.path.commonprefix(forms)  # noqa: RUF071 - of characters
        for found in _BREAK.finditer(whole):
            mark = whole[: found.end()]
            if _UNNAMED.fullmatch(mark):
                numbered = r"\d+".join(map(re.escape, mark.rstrip().split("0")))
                return indent + ended(numbered, mark)
    return None


def ended(expression: str, text: str) -> str:
    """Return the expression of a prefix whose blanks an empty line lacks."""
    return f"{expression}(?:{re.escape(text[len(text.rstrip()) :])}|$)"
