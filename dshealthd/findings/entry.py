"""An entry of the node's record, as its file, `/api/v1/history` and commands have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from dshealthd.core import schema
from dshealthd.findings.finding import Finding, Moment, State
from dshealthd.jobs.goodput import Card

MARKS = {State.OK: ".", State.WARNING: "w", State.UNKNOWN: "?", State.CRITICAL: "C", None: " "}
"""A cell of a strip as a character, by its worst severity; None while no agent watched."""
RUN = "run"
"""The kind of an entry that is an attempt of a training."""
MAX_TEXT = 200
"""Most characters of a text in it."""
Words = Annotated[str, schema.String(MAX_TEXT)]


@dataclass(slots=True)
class Entry:
    """One line of the record. Times are Unix time in seconds."""

    kind: Words
    """`finding`, `maintenance`, `repair`, `boot`, `agent`, `driver`, `clock` or `run`."""
    what: Words
    """Name of the finding or run; for others, what tells them apart: a version."""
    says: Words
    """What it was, in words."""
    begin: Annotated[float, schema.UNIX_TIME]
    end: Moment
    """None while it lasts, which is never recorded."""
    part: Words = ""
    reason: Words = ""
    job: Words = ""
    """The training job that it was about, or that it struck first."""
    severity: State | None = None
    """The worst that it had; None for what is no finding."""
    value: float | None = None
    """What it measured at its worst; of a run, the steps that it has made."""
    times: Annotated[int, schema.Integer(1)] = 1
    """How often it came back within the hour."""
    card: Card | None = None
    """Of a run."""
    text: str = schema.transient(default="", compare=False, repr=False)
    """The same as JSON, where the record keeps it."""

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies a recorded finding when it comes back: an OOM kill is not a shortage of
        memory that has come back, nor a rank that is stopped the one that has ended.
        """
        return self.kind, self.what, self.part, self.reason

    def document(self) -> dict[str, Any]:
        """Return the entry of the record for JSON."""
        fields: dict[str, Any] = schema.of(Entry).write(self)
        if self.card is None:
            del fields["card"]
        return fields

    @classmethod
    def of(cls, finding: Finding, end: float | None, worst: float | None) -> Entry:
        """Return the record's entry of a finding that lasted until `end`."""
        planned = finding.slug == "maintenance"
        return cls(
            kind="maintenance" if planned else "finding",
            what=finding.name,
            says=finding.summary,
            begin=max(0.0, round(finding.since or 0.0, 3)),
            end=None if end is None else max(0.0, round(end, 3)),
            part=finding.part,
            reason=finding.reason,
            job=finding.training_job,
            severity=None if planned else finding.severity,
            value=None if planned else worst,
        )
