"""A DeepSpeed configuration with what the installed DeepSpeed says about it, to check its keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from dshealthd.doctor.check import Outcome, Result

if TYPE_CHECKING:
    from dshealthd.doctor.job_context import JobContext
    from dshealthd.doctor.job_sources.deepspeed_config import Parsed
    from dshealthd.doctor.job_sources.inspection import Inspection
    from dshealthd.doctor.job_sources.source import Source


class InspectedConfig(NamedTuple):
    """A configuration that DeepSpeed has inspected."""

    config: Source[Parsed]
    document: dict[str, Any]
    inspection: Inspection
    source: str
    """Which DeepSpeed inspected it, for people."""


def inspected_config(context: JobContext) -> InspectedConfig | Result:
    """Return a job's configuration and its inspection, or an unknown result if one is missing."""
    inspection = context.inspection
    if context.config is None or context.document is None:
        return Result(Outcome.UNKNOWN, "there is no readable configuration")
    if inspection is None or inspection.problem:
        return Result(Outcome.UNKNOWN, f"keys are not checked: {context.why_not_inspected}")
    source = f"DeepSpeed {inspection.version} of {context.python}"
    return InspectedConfig(context.config, context.document, inspection, source)
