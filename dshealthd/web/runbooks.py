"""The runbooks that every agent serves.

So a finding's link works without Internet access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.catalogue import RUNBOOKS
from dshealthd.symptoms import all_symptoms

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dshealthd.symptoms.entry import Symptom


def runbooks() -> Mapping[str, bytes]:
    """Return all runbooks by path, as Markdown in UTF-8.

    The first call reads the package's files: make it before the event loop runs.
    """
    return {RUNBOOKS + slug: _text(symptom).encode() for slug, symptom in all_symptoms().items()}


def _text(symptom: Symptom) -> str:
    """Return the text of a runbook: its alerts, then its sections in order."""
    alerts = "".join(
        f"- {alert.name} ({alert.severity}): {alert.summary}\n" for alert in symptom.entries
    )
    parts = [f"# {symptom.title}\n"]
    if alerts:
        parts.append(f"## Alerts\n\n{alerts}")
    parts += [f"## {heading}\n\n{text}\n" for heading, text in symptom.sections.items()]
    return "\n".join(parts)
