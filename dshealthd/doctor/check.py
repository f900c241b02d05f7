"""A check of the doctor, its results and their outcomes, as data."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Outcome(enum.Enum):
    """What a check concludes."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"
    """It could not be looked at; the text says why."""


ORDER = (Outcome.OK, Outcome.WARNING, Outcome.UNKNOWN, Outcome.CRITICAL)
"""From well to worst: what is unknown may hide anything, so it counts for more than a warning."""


@dataclass(frozen=True, slots=True)
class Result:
    """One thing that a check found."""

    outcome: Outcome
    text: str
    """What was found, in one line that names the key, file or device."""
    remedy: str = ""
    """A command to paste; nothing runs it unasked."""
    value: str = ""
    """What was measured, with its unit."""
    limit: str = ""
    """What it was compared with."""
    source: str = ""
    """Where the limit comes from."""
    component: str = ""
    """Which part it is about, such as `gpu 3` or `ds_config.json: train_batch_size`."""


@dataclass(frozen=True)
class Check(Generic[T]):
    """One check of a context `T`.

    An exception of `run`, and a `run` without results, count as unknown, never as ok: a check that
    finds nothing wrong yields one ok result that says what it looked at.
    """

    slug: str
    """The symptom, which is also the runbook's name."""
    name: str
    """Unique, in kebab case; `--only` and `--skip` take it."""
    title: str
    run: Callable[[T], Iterable[Result]]
    deadline: float = 5.0
    """Seconds after which the check is killed and reported as hung."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst of these outcomes; ok without any."""
    return max(outcomes, key=ORDER.index, default=Outcome.OK)


def encode(result: Result) -> dict[str, Any]:
    """Return a check's result as JSON has it."""
    return dataclasses.asdict(result) | {"outcome": result.outcome.value}


def decode(document: Mapping[str, Any]) -> Result:
    """Return the check's result of a document; KeyError, TypeError, ValueError for any other."""
    fields = {field.name: str(document[field.name]) for field in dataclasses.fields(Result)}
    return Result(**(fields | {"outcome": Outcome(document["outcome"])}))  # type: ignore[arg-type] # all but outcome are text
