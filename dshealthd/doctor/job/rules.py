"""Rules of single programs and their settings: tables, in `rules_of_…`, read by one evaluator.

A row holds where all of its terms, joined by ` & `, hold. A term is `KEY`, which is given;
`KEY=a|b`, whose value is one of these; `KEY~PATTERN`, in which the pattern is found; `KEY<OTHER`
and `KEY>OTHER`: a number below or above another. A `!` in front says that it is not so. No row
speaks of a value that only a shell or a template knows, nor of the absence of an option where such
a value, as the key `open` says, may hold more of them.

A key is an option of the row's subject, a program, or the dotted path of a setting of DeepSpeed.
`PROGRAM:KEY` is an option of another program, `$NAME` a variable of the processes, `script:text`
the training's program, `job:KEY` a quantity of the job.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dshealthd.doctor.check import Result, critical
from dshealthd.doctor.job.sources.fields import quantity
from dshealthd.jobs.environment import natural

Values = Callable[[str], Sequence[str]]
"""The values of a key; none where it is not given."""

_TERM = re.compile(r"(!?)(\S+?)(?:(=|~|<|>)(.*))?", re.DOTALL)
_OPEN = re.compile(r"\$|\{\{|^<.*>$|^%|^auto$")
"""In a value that is filled in before it is read."""


class JobRule(NamedTuple):
    """Something that one program does with what it is given."""

    subject: str
    when: str
    text: str
    """What happens; `{0}` is the value of the first term's key, and so on."""
    source: str
    make: Callable[..., Result] = critical


def broken(rule: JobRule, values: Values) -> str:
    """Return what a rule says of these values; empty where it does not hold."""
    found = []
    for term in rule.when.split(" & "):
        if (value := _held(term, values)) is None:
            return ""
        found.append(value[:60])
    return rule.text.format(*found)


def _held(term: str, values: Values) -> str | None:
    """Return the value for which a term holds; None where it does not."""
    match = _TERM.fullmatch(term)
    assert match, term  # noqa: S101 - the table is ours
    denied, key, relation, other = match.groups()
    given = values(key)
    if denied and not given and not re.search(r"[$:]", key) and values("open"):
        return None
    if relation is None:
        return None if bool(given) == bool(denied) else (given or ("",))[0]
    known = [value for value in given if not _OPEN.search(value)]
    holding = [one for one in known if _related(one, relation, other, values)]
    if denied:
        return (known or [""])[0] if not holding and len(known) == len(given) else None
    return holding[0] if holding else None


def _related(value: str, relation: str, other: str, values: Values) -> bool:
    if relation == "=":
        return value in other.split("|")
    if relation == "~":
        return re.search(other, value) is not None
    others = [other] if natural(other) is not None else values(other)
    if not others or _OPEN.search(others[0]):
        return False
    left, right = quantity(value), quantity(others[0])
    if left is None or right is None:
        return False
    return left < right if relation == "<" else left > right


def rows(
    subject: str, source: str, *pairs: tuple[str, str], make: Callable[..., Result] = critical
) -> Iterator[JobRule]:
    """Yield the rules of one subject and source: each when it holds, and its text."""
    yield from (JobRule(subject, when, text, source, make) for when, text in pairs)
