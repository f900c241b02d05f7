"""Patterns of messages from libraries, schedulers and the kernel when a job fails.

There is one file per symptom, `dshealthd/symptoms/patterns/SLUG.toml`; a slug without a runbook has
its own `title`.

What a pattern says, and the first step that it advises, are texts with the names of its groups in
braces; `{host|the node}` also has the words for an unknown one. Each may be a list: the first text
whose other values are all known is used. A first step belongs to the pattern, not to the slug: one
symptom has many causes. A pattern without a good one has none.

Lines of the kernel are those that the agent knows: `events` names events of `kernel_lines`, and
`xids` is an expression for the numbers of Xids.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dshealthd.explain.events import LAYERS
from dshealthd.explain.prefilter import Need, Prefilter, needed
from dshealthd.explain.remarks import WORDS
from dshealthd.linux.kernel_lines import event_expressions, xid_expression
from dshealthd.symptoms import entry

ROLES = ("cause", "consequence", "confirmation", "loss")
"""A cause; a consequence of one; more detail about one; a value that a training loop reports."""
PLACES = ("any", "error", "exception")
"""Any line; exceptions and lines of level E or F; only exceptions."""

GENERIC = (
    "Traceback (most", "Error", "Exception", "KeyboardInterrupt", "Root Cause (first", "Failures:",
    "During handling of", "The above exception", "==> ",
)  # fmt: skip
"""Texts that begin any traceback, summary or file."""
_NUMBERED = re.compile(r"_\d{1,2}$")
_VALUE = re.compile(r"\{(\w+)(?:\|([^{}]+))?\}")
_PASTED = re.compile(r"[\w./:@%+,=-]{1,200}")
"""A value that is safe in a command: a user may choose a path in a log, and root may paste it."""
_READ = re.compile(r"[^`\n]{1,200}")


class PatternError(ValueError):
    """A file of patterns is invalid; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pattern:
    """One pattern of a message: a table of a file."""

    slug: str
    name: str
    expression: str
    names: Mapping[str, str]
    """The value that each group of the expression has: `port_2` is the port in another wording, as
    an expression cannot have a group twice."""
    need: Need
    """What every match contains."""
    source: str
    """Releases and files that contain the message."""
    layer: str
    role: str = "cause"
    title: str = ""
    """What it is in a few words; empty where the slug's title fits."""
    says: tuple[str, ...]
    step: tuple[str, ...] = ()
    """First steps, the most specific first; empty if there is no good one."""
    where: str = "any"
    """One of PLACES: the same words may also appear in warnings."""
    least: int = 1
    """Number of times that make a value a loss: a single one may be harmless."""
    weak: bool = False
    first: bool = False
    match: tuple[str, ...]
    no_match: tuple[str, ...]

    @property
    def id(self) -> str:
        """`SLUG/NAME`."""
        return f"{self.slug}/{self.name}"

    @property
    def regex(self) -> re.Pattern[str]:
        """The expression, compiled when a line first needs it: few ever are."""
        return _compiled(self.expression)


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


@functools.cache
def needs(text: str) -> frozenset[str]:
    """Return the values without which a text cannot be used."""
    return frozenset(match[1] for match in _VALUE.finditer(text) if match[2] is None)


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _VALUE.sub(lambda match: values.get(match[1], match[2] or "unknown"), text)


def said(texts: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the first text whose values are all known, else the last with `unknown` in it."""
    return _filled(next((one for one in texts if needs(one) <= values.keys()), texts[-1]), values)


def advised(steps: Sequence[str], values: Mapping[str, str]) -> str:
    """Return the first step whose values are all known, and harmless in commands; else empty."""
    for step in steps:
        # Every other part is a command, between backticks.
        unfit = {
            match[1]
            for number, part in enumerate(step.split("`"))
            for match in _VALUE.finditer(part)
            if not (_PASTED if number % 2 else _READ).fullmatch(values.get(match[1], ""))
        }
        if unfit.isdisjoint(needs(step)):
            return _filled(step, {name: values[name] for name in values.keys() - unfit})
    return ""


@functools.cache
def heading(slug: str) -> tuple[str, str]:
    """Return the title of a slug and the path of its runbook, which is empty if it has none."""
    file = resources.files("dshealthd.symptoms").joinpath(f"{slug}.md")
    if not file.is_file():
        return load().titles.get(slug, slug), ""
    return entry.parse(slug, file.read_text(encoding="utf-8")).title, f"/runbooks/{slug}"


@dataclass(frozen=True)
class Patterns:
    """All patterns, and the titles of the slugs that have no runbook."""

    every: tuple[Pattern, ...]
    titles: dict[str, str]
    hang: dict[str, tuple[str, ...]]
    """First steps by the kind of verdict on a hang."""

    def by_id(self, name: str) -> Pattern:
        """Return the pattern called `SLUG/NAME`."""
        return next(pattern for pattern in self.every if pattern.id == name)

    @functools.cached_property
    def prefilter(self) -> Prefilter:
        """The search for what patterns need, by their number; greater numbers are texts of
        GENERIC, then words of remarks.
        """
        needs = [pattern.need for pattern in self.every]
        return Prefilter([*needs, *(Need((text,)) for text in (*GENERIC, *WORDS))])

    def candidates(self, text: str) -> tuple[list[Pattern], bool]:
        """Return the patterns that may match a text without digits, in the order of `every`, and
        whether it may be a remark.
        """
        numbers = self.prefilter.find(text)
        found = [self.every[number] for number in numbers if number < len(self.every)]
        return found, len(found) < len(numbers)


@functools.cache
def load() -> Patterns:
    """Return the shipped log patterns; PatternError if one is invalid."""
    found: list[Pattern] = []
    titles: dict[str, str] = {}
    hang: dict[str, tuple[str, ...]] = {}
    folder = resources.files("dshealthd.symptoms").joinpath("patterns")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            slug = file.name.removesuffix(".toml")
            patterns, others = parse(slug, file.read_text(encoding="utf-8"))
            found += patterns
            if "title" in others:
                titles[slug] = others["title"]
            hang |= {kind: _texts(steps) for kind, steps in others.get("hang", {}).items()}
    found.sort(
        key=lambda pattern: (pattern.weak, LAYERS.index(pattern.layer), pattern.role != "cause")
    )
    return Patterns(tuple(found), titles, hang)


def parse(slug: str, text: str) -> tuple[list[Pattern], dict[str, Any]]:
    """Return the patterns in one file, and what else it has: `title` and `hang`."""
    try:
        table = tomllib.loads(text)
        found = [_pattern(slug, dict(row)) for row in table.pop("pattern")]
    except (ValueError, ArithmeticError, KeyError, TypeError, re.error) as error:
        raise PatternError(f"{slug}.toml: {type(error).__name__}: {error}") from error
    if unknown := sorted(table.keys() - {"title", "hang"}):
        raise PatternError(f"{slug}.toml: unknown keys {', '.join(unknown)}")
    return found, table


def _texts(value: str | list[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _expression(row: dict[str, Any]) -> str:
    """Return the expression of a pattern: its own, and those of events and Xids of the kernel.

    What the kernel prints counts wherever it is in a line: there is no end to the prefixes that
    collectors, editors and people put before it, and each of its expressions spells out the driver
    or the device and what it says, which nothing else prints.
    Groups of all but the first get a number, as an expression cannot have a group twice.
    """
    parts = [row.pop("regex")] if "regex" in row else []
    if codes := row.pop("xids", ""):
        parts.append(xid_expression(codes))
        # NCCL's own report of Xids, from release 2.31.
        parts.append(
            rf"NCCL DIAG \[INFO\] Xid (?P<code>{codes}) detected .{{1,40}} on host "
            rf"(?P<host>[\w.-]{{1,64}}?)\. "
        )
    for event in row.pop("events", ()):
        parts += event_expressions(event)
    names: Counter[str] = Counter()

    def numbered(match: re.Match[str]) -> str:
        names[match[1]] += 1
        number = names[match[1]]
        return f"(?P<{match[1]}>" if number == 1 else f"(?P<{match[1]}_{number}>"

    return re.sub(r"\(\?P<(\w+?)(?:_\d{1,2})?>", numbered, "|".join(parts))


def _pattern(slug: str, row: dict[str, Any]) -> Pattern:
    expression = _expression(row)
    _compiled(expression)
    names = {group: _NUMBERED.sub("", group) for group in re.findall(r"\(\?P<(\w+)>", expression)}
    row |= {key: _texts(row[key]) for key in ("says", "step", "match", "no_match") if key in row}
    pattern = Pattern(slug=slug, expression=expression, names=names, need=needed(expression), **row)
    for value, known in ((pattern.layer, LAYERS), (pattern.role, ROLES), (pattern.where, PLACES)):
        if value not in known:
            raise TypeError(f"{pattern.name}: {value!r} is not one of {', '.join(known)}")
    return pattern
