"""A finding, the verdict over all of them, and both as JSON."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = 1
"""Version of `findings` and `verdict` in `/api/v1/status`; see docs/status-api.md."""
MAX_TEXT = 1000
"""Characters of a text; errors of drivers and file systems may be long."""


class State(enum.StrEnum):
    """How bad it is: of one finding, or of the node."""

    OK = "ok"
    """Of the node only: all sources were read, and none shows a fault."""
    WARNING = "warning"
    UNKNOWN = "unknown"
    """A source could not be read. It may hide anything, so it counts for more than a warning."""
    CRITICAL = "critical"


ORDER = (State.OK, State.WARNING, State.UNKNOWN, State.CRITICAL)
"""From well to worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rule saw: an alert that would fire for these labels if this lasted."""

    alert: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the alert would have, apart from those of the node."""
    value: float | None = None
    limit: float | None = None
    limit_source: str = ""
    """The threshold or the metric that `limit` is from."""
    source: str = ""
    """The metric that `value` is from."""
    since: float | None = None
    """Unix time in seconds, where the source tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with this node, or could not be looked at."""

    slug: str
    """The symptom, which is the runbook's name."""
    alert: str
    """The alert rule that fires for it; empty for what is unknown of a part."""
    severity: State
    component: str
    """Kind of what it is about, as in the alerts: node, gpu, nic, link, path, job."""
    part: str
    """Which one: `GPU 3`, `mlx5_0/1`, a path, a job, a source; empty for the node itself."""
    origins: tuple[str, ...] = ()
    """The collectors that could not be read, of a finding that something is unknown."""
    summary: str
    """What is wrong, in one line."""
    detail: str
    """The same with its figures; the alert's own words where there is one."""
    first_step: str
    runbook: str
    """Where to read on; a URL."""
    reason: str = ""
    """Why something could not be read or is a suspect, where the source says so."""
    value: float | None = None
    """What was measured, in the unit of `source`."""
    limit: float | None = None
    source: str = ""
    limit_source: str = ""
    since: float | None = None
    """Unix time in seconds since when.

    None where the source does not say so, until `FirstSeen` has filled it in.
    """
    hold_seconds: float = 0.0
    """How long it must last before the alert fires."""

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes a finding the same one a moment later."""
        return self.slug, self.alert, self.part

    def document(self) -> dict[str, Any]:
        """Return the finding as JSON has it; a number that JSON lacks is null."""
        return {
            "slug": self.slug,
            "alert": self.alert,
            "severity": str(self.severity),
            "component": self.component,
            "part": _text(self.part),
            "summary": _text(self.summary),
            "detail": _text(self.detail),
            "first_step": _text(self.first_step),
            "runbook": self.runbook,
            "reason": self.reason,
            "value": _number(self.value),
            "limit": _number(self.limit),
            "source": self.source,
            "limit_source": self.limit_source,
            "since": None if self.since is None else round(self.since, 3),
            "hold_seconds": self.hold_seconds,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings of one moment, the worst first."""

    findings: tuple[Finding, ...]

    @property
    def state(self) -> State:
        """The worst severity of the verdict's findings; ok without any."""
        return max(
            (finding.severity for finding in self.findings), key=ORDER.index, default=State.OK
        )

    def document(self) -> dict[str, Any]:
        """Return the parts of the status document that are about findings."""
        return {
            "schema": SCHEMA,
            "verdict": str(self.state),
            "findings": [finding.document() for finding in self.findings],
        }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _text(text: str) -> str:
    return text[:MAX_TEXT].encode(errors="replace").decode()
