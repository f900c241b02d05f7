"""The output and exit status that other programs expect: `--for`.

No caller ends or drains anything because of an unknown result: a check that could not run is not a
reason to take a node out of service.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome
from dshealthd.doctor.report import as_json, found
from dshealthd.status.paint import safe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dshealthd.doctor.report import Report

NPD_LINE = 80
"""Maximum characters of a message that node-problem-detector keeps."""
REASON = 256
"""Maximum characters of a reason that Slurm's tools show in one line."""
TERMINATION = 4096
"""Maximum bytes of a container's termination message."""


def summary(report: Report, least: Outcome, most: int) -> str:
    """Return one line with the slugs and parts of results at least this bad; `ok` if none is."""
    wanted = (Outcome.CRITICAL,) if least is Outcome.CRITICAL else tuple(Outcome)[1:]
    parts = [f"{safe(node.node)} unreachable" for node in report.nodes if node.problem]
    for node in report.nodes:
        parts += [
            " ".join(filter(None, (safe(one.slug), safe(result.component).replace(" ", "="))))
            for one, result, accepted in found((*node.checks, *report.across))
            if result.outcome in wanted and not accepted
        ]
    line = ", ".join(dict.fromkeys(parts)) or "ok"
    return line if len(line) <= most else f"{line[: most - 3]}..."


def slurm_prolog(report: Report) -> int:
    """Fail Slurm's prolog on a critical result, which drains; slurmd's log has the reason."""
    critical = report.outcome is Outcome.CRITICAL
    if critical:
        print(f"dshealthd: {summary(report, Outcome.CRITICAL, REASON)}", file=sys.stderr)
    return int(critical)


def slurm_health(report: Report) -> int:
    """Print a line for Slurm's health check, which ignores the status.

    `dshealthd slurm health` drains.
    """
    print(f"dshealthd: {summary(report, Outcome.WARNING, REASON)}")
    return 0


def kubernetes(report: Report) -> int:
    """Fail a Kubernetes init container or readiness probe on a critical result."""
    print(summary(report, Outcome.WARNING, TERMINATION))
    return int(report.outcome is Outcome.CRITICAL)


def node_problem_detector(report: Report) -> int:
    """Print one line of 80 characters; return 0 for no problem, 1 for a problem, 2 for unknown."""
    print(summary(report, Outcome.CRITICAL, NPD_LINE))
    codes = {Outcome.CRITICAL: 1, Outcome.UNKNOWN: 2}
    return codes.get(report.outcome, 0)


def ansible(report: Report) -> int:
    """Print what an Ansible module returns: `changed`, `failed`, `msg`, and the whole report."""
    failed = report.outcome is Outcome.CRITICAL
    print(
        json.dumps(
            {
                "changed": False,
                "failed": failed,
                "msg": summary(report, Outcome.WARNING, TERMINATION),
                "doctor": json.loads(as_json(report)),
            }
        )
    )
    return int(failed)


CALLERS: Mapping[str, Callable[[Report], int]] = {
    "slurm-prolog": slurm_prolog,
    "slurm-health": slurm_health,
    "kubernetes": kubernetes,
    "npd": node_problem_detector,
    "ansible": ansible,
}
