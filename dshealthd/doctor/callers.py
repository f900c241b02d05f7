"""The lines and exit statuses that other programs expect: `--for`.

None of them ends or drains anything for what is unknown: that a check could not look is no reason
to take a node away.
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
"""Characters of a message that node-problem-detector keeps."""
REASON = 256
"""Characters of a reason that Slurm's tools show in one line."""
TERMINATION = 4096
"""Bytes of a container's termination message."""


def summary(report: Report, least: Outcome, most: int) -> str:
    """Return one line for callers: slugs and parts of what is at least so bad; `ok` without any."""
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
    """Fail Slurm's prolog for what is critical, which drains; the reason is in slurmd's log."""
    critical = report.outcome is Outcome.CRITICAL
    if critical:
        print(f"dshealthd: {summary(report, Outcome.CRITICAL, REASON)}", file=sys.stderr)
    return int(critical)


def slurm_health(report: Report) -> int:
    """Print a line for Slurm's health check; its status is ignored, `dshealthd slurm health`
    drains.
    """
    print(f"dshealthd: {summary(report, Outcome.WARNING, REASON)}")
    return 0


def kubernetes(report: Report) -> int:
    """Fail an init container or a readiness probe of Kubernetes for what is critical."""
    print(summary(report, Outcome.WARNING, TERMINATION))
    return int(report.outcome is Outcome.CRITICAL)


def node_problem_detector(report: Report) -> int:
    """Return the plugin's status: 0 no problem, 1 one, 2 unknown, with a line of 80 characters."""
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
