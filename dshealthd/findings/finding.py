"""A finding, the verdict over all findings, and both as JSON."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any

from dshealthd.core import schema

SCHEMA = 1
"""Version of `findings` and `verdict` in `/api/v1/status`; see docs/status-api.md."""
Moment = Annotated[float | None, schema.OrNull(schema.UNIX_TIME)]
_INTERNAL = ("origins", "keep_seconds", "page_seconds", "rule", "variant")
"""Fields that only the agent's own state has."""


class State(enum.StrEnum):
    """Severity of a finding, or of the node."""

    OK = "ok"
    """For the node only: all sources were read, and none shows a fault."""
    WARNING = "warning"
    UNKNOWN = "unknown"
    """A source could not be read. It may hide anything, so it ranks above a warning."""
    CRITICAL = "critical"


ORDER = (State.OK, State.WARNING, State.UNKNOWN, State.CRITICAL)
"""From best to worst."""


@dataclass(frozen=True, slots=True)
class Sign:
    """What a rule saw: an alert that would fire for these labels if the condition lasted."""

    alert: str
    reason: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the series that shows it: the part is derived from them."""
    _: KW_ONLY
    part: str = ""
    """The affected part, as people call it; empty to derive it from the labels, or if it is the
    job."""
    job: str = ""
    """The training job that it is about."""
    case: str = ""
    """The case of its finding's `steps`, if it is not the reason."""
    value: float | None = None
    limit: float | str | None = None
    """What `value` is beyond: an option of `Limits` by its name, or a figure."""
    limit_source: str = ""
    """The threshold or metric that a figure as `limit` comes from."""
    source: str = ""
    """The metric that `value` comes from, as `Series` names it."""
    since: float | None = None
    """Unix time in seconds; None where the source does not give it."""
    hold: float | None = None
    """Seconds that it must last, where that differs from its finding's own hold.

    0 for certain evidence, which is a page at once.
    """
    keep: float | None = None
    """Seconds that it remains a finding, where that differs from its finding's own keep."""
    apart: str = ""
    """What sets it apart from other signs of its finding on the same part; empty for degrees of one
    thing, of which a part has one, with the reason that it began with.
    """
    mild: bool = False
    """Whether it stops no job, though other signs of its finding do: it is never a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with this node, or could not be checked."""

    slug: str
    """The symptom's slug, which also names the runbook."""
    alert: str
    """The alert rule that fires for it; empty while the agent has not read all sources yet."""
    severity: State
    component: str
    """Kind of the affected part, as in the alerts: node, gpu, nic, link, path, job."""
    part: str
    """The affected part: `GPU 3`, `mlx5_0/1`, a path, a job, a source; empty for the node."""
    origins: tuple[str, ...] = ()
    """For a finding of unknown state, the collectors that failed or have not run."""
    summary: str
    """What is wrong, in one line."""
    detail: str
    """The same with figures; the alert's own wording where there is an alert."""
    first_step: str
    runbook: str
    """Path of the runbook's URL."""
    reason: str = ""
    """Why something could not be read or is a suspect, where the source gives a reason."""
    value: float | None = None
    """Measured value, in the unit of `source`."""
    limit: float | None = None
    source: str = ""
    limit_source: str = ""
    since: Moment = None
    """Unix time in seconds at which it began.

    None where the source does not give it, until `Episodes` fills it in.
    """
    hold_seconds: float = 0.0
    """How long its sign must last before it is a finding."""
    keep_seconds: float = 0.0
    """How long it remains one after its sign is gone."""
    page_seconds: float = 0.0
    """How long its sign must last before it is critical; a warning until then."""
    rule: str = ""
    """The rule that yields its sign; empty for what could not be read."""
    training_job: str = ""
    """The training job that the finding is about, or that used the part when it began."""
    variant: str = ""
    """What sets it apart from findings of the same name and part."""
    trend: str = ""
    """Whether what it is about rises or falls, in words; empty if unknown."""

    @property
    def name(self) -> str:
        """The value of the label `finding`: the alert's name, without the prefix of all alerts."""
        return (self.alert or "DshealthdCollectorFailing").removeprefix("Dshealthd")

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What identifies a finding from one judgement to the next."""
        return self.slug, self.alert, self.part, self.variant

    def document(self) -> dict[str, Any]:
        """Return the finding for JSON; a number that JSON cannot represent is null."""
        whole = schema.of(Finding).write(self)
        return {name: value for name, value in whole.items() if name not in _INTERNAL}


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings of one moment, worst first."""

    findings: tuple[Finding, ...]
    watched: tuple[Finding, ...] = ()
    """Signs that are no findings yet, as they have not lasted for their hold; they decide
    nothing."""

    @classmethod
    def of(cls, findings: Iterable[Finding]) -> Verdict:
        """Return the verdict over these findings."""
        return cls(tuple(sorted(findings, key=lambda one: -ORDER.index(one.severity))))

    @property
    def state(self) -> State:
        """The worst severity among the findings; ok if there are none."""
        return max(
            (finding.severity for finding in self.findings), key=ORDER.index, default=State.OK
        )

    def document(self) -> dict[str, Any]:
        """Return the status document's fields about findings."""
        return {
            "schema": SCHEMA,
            "verdict": self.state,
            "findings": [finding.document() for finding in self.findings],
            "watched": [finding.document() for finding in self.watched],
        }
