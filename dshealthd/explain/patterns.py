"""Patterns of messages from libraries, schedulers and the kernel when a job fails.

There is one file per symptom, `dshealthd/symptoms/patterns/SLUG.toml`; a slug without a runbook has
its own `title` and `first_step`.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dshealthd.explain.events import LAYERS
from dshealthd.explain.literals import required, shortest

ROLES = ("cause", "consequence", "confirmation", "loss")
"""A cause; a consequence of one; more detail about one; a value that a training loop reports."""
PLACES = ("any", "error", "exception")
"""Any line; exceptions and lines of level E or F; only exceptions."""

GENERIC = (
    "Traceback (most", "Error", "Exception", "KeyboardInterrupt", "Root Cause (first", "Failures:",
    "During handling of", "The above exception", "will restart worker group",
    "Rendezvous'ing worker", "Starting worker group", "restart_count=", "Job restarted",
)  # fmt: skip
"""Texts that begin any traceback, summary or new attempt."""


class PatternError(ValueError):
    """A file of patterns is invalid; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One pattern of a message."""

    slug: str
    name: str
    expression: str
    literals: tuple[str, ...]
    """Every match contains one of these."""
    source: str
    """Releases and files that contain the message."""
    layer: str
    role: str
    says: str
    where: str
    """One of PLACES: the same words may also appear in warnings."""
    frames: re.Pattern[str] | None
    """Expression that the frames of the traceback, as `FILE:FUNCTION` lines, must match."""
    weak: bool
    first: bool
    match: tuple[str, ...]
    no_match: tuple[str, ...]

    @property
    def regex(self) -> re.Pattern[str]:
        """The expression, compiled when a line first needs it: few ever are."""
        return _compiled(self.expression)


@functools.cache
def _compiled(expression: str) -> re.Pattern[str]:
    return re.compile(expression)


@dataclass(frozen=True)
class Patterns:
    """All patterns, and the titles of the slugs that have no runbook."""

    every: tuple[Pattern, ...]
    titles: dict[str, tuple[str, str]]
    """By slug: title and first step."""

    @property
    def lines(self) -> tuple[Pattern, ...]:
        """The patterns for lines outside tracebacks."""
        return tuple(
            pattern
            for pattern in self.every
            if pattern.where != "exception" and pattern.frames is None
        )

    @functools.cached_property
    def literals(self) -> tuple[str, ...]:
        """The literals of all patterns: every line that matters contains at least one."""
        every = {literal for pattern in self.every for literal in pattern.literals} | {*GENERIC}
        return tuple(sorted(shortest(every)))


@functools.cache
def load() -> Patterns:
    """Return the shipped log patterns; PatternError if one is invalid."""
    found: list[Pattern] = []
    titles = {}
    folder = resources.files("dshealthd.symptoms").joinpath("patterns")
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            slug = file.name.removesuffix(".toml")
            patterns, title = parse(slug, file.read_text(encoding="utf-8"))
            found += patterns
            if title:
                titles[slug] = title
    found.sort(
        key=lambda pattern: (
            pattern.weak,
            pattern.frames is not None,
            LAYERS.index(pattern.layer),
            pattern.role != "cause",
        )
    )
    return Patterns(tuple(found), titles)


def parse(slug: str, text: str) -> tuple[list[Pattern], tuple[str, str] | None]:
    """Return the patterns in one file, and its title and first step if it has them."""
    try:
        table = tomllib.loads(text)
        found = [_pattern(slug, dict(row)) for row in table.pop("pattern")]
        title = (table.pop("title"), table.pop("first_step")) if table else None
    except (tomllib.TOMLDecodeError, KeyError, TypeError, re.error) as error:
        message = f"{slug}.toml: {type(error).__name__}: {error}"
        raise PatternError(message) from error
    if table:
        message = f"{slug}.toml: unknown keys {', '.join(sorted(table))}"
        raise PatternError(message)
    return found, title


def _literals(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the literals given in a pattern, or those that its expression requires."""
    given = row.pop("literals", None)
    if given:
        _compiled(row["regex"])
        return tuple(given)
    return required(row["regex"])


def _pattern(slug: str, row: dict[str, Any]) -> Pattern:
    frames = row.pop("frames", None)
    pattern = Pattern(
        slug=slug,
        name=row.pop("name"),
        expression=row["regex"],
        literals=_literals(row),
        source=row.pop("source"),
        layer=row.pop("layer"),
        role=row.pop("role", "cause"),
        says=row.pop("says"),
        where=row.pop("where", "any"),
        frames=re.compile(frames) if frames else None,
        weak=row.pop("weak", False),
        first=row.pop("first", False),
        match=tuple(row.pop("match")),
        no_match=tuple(row.pop("no_match")),
    )
    row.pop("regex")
    if row:
        message = f"{pattern.name}: unknown keys {', '.join(sorted(row))}"
        raise TypeError(message)
    for value, known in ((pattern.layer, LAYERS), (pattern.role, ROLES), (pattern.where, PLACES)):
        if value not in known:
            message = f"{pattern.name}: {value!r} is not one of {', '.join(known)}"
            raise TypeError(message)
    return pattern
