"""A DeepSpeed configuration beside what the installed DeepSpeed says of it, for checks of its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.doctor.check import Outcome, Result

if TYPE_CHECKING:
    from dshealthd.doctor.job_context import JobContext
    from dshealthd.doctor.job_sources.inspection import Inspection


class InspectedConfig(NamedTuple):
    """A configuration that DeepSpeed has seen."""

    name: str
    """Of its file."""
    document: dict[str, Any]
    inspection: Inspection
    source: str
    """Which DeepSpeed it was, in words."""


def inspected_config(context: JobContext) -> InspectedConfig | Result:
    """Return a job's configuration and what DeepSpeed says; where one is missing, a result that says so."""
    inspection = context.inspection
    if context.config is None or context.document is None:
        return Result(Outcome.UNKNOWN, "there is no configuration that can be read")
    if inspection is None or inspection.problem:
        return Result(Outcome.UNKNOWN, f"keys are not checked: {context.why_not_inspected}")
    source = f"DeepSpeed {inspection.version} of {context.python}"
    return InspectedConfig(context.config.name, context.document, inspection, source)
