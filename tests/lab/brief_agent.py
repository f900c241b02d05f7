"""The agent, with findings that begin and end seconds after their cause; of the shipped ones some
wait for minutes.

Takes the command line of `dshealthd`.
"""

from __future__ import annotations

import dataclasses
import sys

from dshealthd.cli import main as cli
from dshealthd.findings import catalogue, heat
from dshealthd.findings.finding import Finding, Sign
from dshealthd.findings.limits import Limits

KEEP_SECONDS = 15
HOLD_SECONDS = 20.0
PATIENT = {"DshealthdFilesystemFull", "DshealthdGpuThrottled", "DshealthdRendezvousPortsBusy"}
"""Findings whose hold is cut to HOLD_SECONDS.

A fault of the lab leads to each. The others keep theirs: a busy machine must not look ill.
"""

_found = catalogue.finding_of


def _brief(sign: Sign, node: str, limits: Limits, rule: str = "") -> Finding:
    """Return the finding for a sign, which begins and ends soon."""
    finding = _found(sign, node, limits, rule)
    hold = HOLD_SECONDS if finding.alert in PATIENT else finding.hold_seconds
    return dataclasses.replace(
        finding,
        hold_seconds=min(hold, finding.hold_seconds),
        keep_seconds=min(finding.keep_seconds, KEEP_SECONDS),
    )


if __name__ == "__main__":
    catalogue.finding_of = _brief
    heat.AGAIN = float(KEEP_SECONDS)
    sys.exit(cli.main())
