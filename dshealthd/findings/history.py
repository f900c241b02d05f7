"""Since when each finding has been there, where its source does not say so."""

from __future__ import annotations

import dataclasses

from dshealthd.findings.finding import Finding, Verdict


class FirstSeen:
    """Remembers when a finding was seen first, for as long as each judgement finds it again.

    It knows no more than the judgements that it is given: they come every few seconds.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._first: dict[tuple[str, str, str], float] = {}

    def update(self, verdict: Verdict, wall: float) -> Verdict:
        """Return the verdict with `since` filled in; `wall` is the Unix time in seconds."""
        self._first = {
            finding.key: self._first.get(finding.key, wall) for finding in verdict.findings
        }
        return Verdict(tuple(map(self._dated, verdict.findings)))

    def _dated(self, finding: Finding) -> Finding:
        if finding.since is not None:
            return finding
        return dataclasses.replace(finding, since=self._first[finding.key])
