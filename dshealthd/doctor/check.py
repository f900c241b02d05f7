"""A check of the doctor, its results and their outcomes, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from dshealthd.core import schema
from dshealthd.core.text import printable
from dshealthd.findings.finding import ORDER, State

T = TypeVar("T")
Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that a check found, made printable: users name files, keys and hosts."""

    outcome: State
    text: str
    """What was found, in one line that names the key, file or device."""
    remedy: str = ""
    """A command to paste; it is never run automatically."""
    value: str = ""
    """What was measured, with its unit."""
    limit: str = ""
    """What it was compared with."""
    source: str = ""
    """Where the limit comes from."""
    component: str = ""
    """The part concerned, such as `gpu 3` or `ds_config.json: train_batch_size`."""
    slug: str = ""
    """The symptom of the finding that it shows, which may be another one than the check's."""
    accepted: str | None = None
    """Why it does not count, if the administrator accepts it."""

    def __post_init__(self) -> None:
        """Escape control characters; a command with some would act on the terminal, so drop it."""
        for name in ("text", "value", "limit", "source", "component"):
            object.__setattr__(self, name, printable(getattr(self, name)))
        object.__setattr__(self, "remedy", self.remedy if self.remedy.isprintable() else "")


RESULTS = schema.of(tuple[Result, ...])
"""Results as JSON."""
ok = partial(Result, State.OK)
warning = partial(Result, State.WARNING)
critical = partial(Result, State.CRITICAL)
unknown = partial(Result, State.UNKNOWN)


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a context `T`.

    If `run` raises or yields no result, the check is unknown, never ok: a check that finds nothing
    wrong yields one ok result that says what it looked at.
    """

    slug: str
    """The symptom, and the name of its runbook."""
    name: str
    """Unique, in kebab case; used by `--only` and `--skip`."""
    title: str
    run: Callable[[T], Iterable[Result]]
    deadline: float = 5.0
    """Seconds after which the check is killed and reported as hung."""
    applies: Callable[[T], object] = lambda _context: True
    """Whether there is something to check; where there is not, the result is unknown, not ok."""


def check_of(
    given: Callable[[T], Given | None],
    missing: str,
    slug: str,
    name: str,
    title: str,
    find: Callable[[T, Given], Iterable[Result]],
    deadline: float = 5.0,
    *,
    applies: Callable[[T], object] | None = None,
) -> Check[T]:
    """Return the check of what a user may have given; `missing` is its result if there is nothing.

    Its ok result, where nothing is found, is its title. `applies` is for a check that also has a
    result where it need not be run.
    """

    def run(context: T) -> Iterable[Result]:
        if not (found := given(context)):
            return [unknown(missing)]
        return list(find(context, found)) or [ok(title)]

    return Check(slug, name, title, run, deadline, applies or given)


def worst(outcomes: Iterable[State]) -> State:
    """Return the worst of these outcomes of checks; ok if there are none."""
    return max(outcomes, key=ORDER.index, default=State.OK)
