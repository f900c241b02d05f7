"""A check of the doctor, its results and their outcomes, as data."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


class Outcome(enum.Enum):
    """What a check concludes."""

    OK = "ok"
    WARNING = "warning"
    CRITICAL = "critical"
    UNKNOWN = "unknown"
    """It could not be looked at; the text says why."""


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
