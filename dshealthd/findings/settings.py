"""Findings about the settings with which jobs run: the variables that their ranks have here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.findings.series import Series

DEVICES = {
    "absent": "names nothing on this node",
    "down": "names what is down",
    "loopback": "leaves a job of several nodes only the loopback interface",
}
"""What is wrong with a variable that names interfaces or adapters, by the collector's word."""
VALUES = {
    "out_of_range": "has a value out of its range",
    "no_number": "has a value that NCCL reads as a different number",
    "misspelt": "is probably what a misspelt name means",
    "exposed": "opens a port without authentication to other hosts",
}
"""What is wrong with any other NCCL variable."""
OF_DEVICES = frozenset(("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"))
MOST_NAMED = 3
"""Most problems that a finding names; the job's owner corrects them in one place."""


def variables(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs whose NCCL variables do not mean what was intended."""
    name = "job_environment_problems"
    # By alert and job: what is wrong, with the number of ranks.
    found: dict[tuple[str, str], dict[str, float]] = {}
    for labels, ranks in series(name, problem={*DEVICES, *VALUES}):
        alert, wrong = _wrong(labels)
        if wrong:
            of_job = found.setdefault((alert, labels["job"]), {})
            of_job[wrong] = max(of_job.get(wrong, 0.0), ranks)
    for (alert, job), problems in found.items():
        named = sorted(problems)
        more = [f"and {len(named) - MOST_NAMED} more"] if len(named) > MOST_NAMED else []
        yield Sign(
            alert=alert,
            part=job,
            job=job,
            labels={"reason": ", ".join([*named[:MOST_NAMED], *more])},
            value=max(problems.values()),
            source=f"dshealthd_{name}",
        )


def _wrong(labels: Mapping[str, str]) -> tuple[str, str]:
    """Return which finding a problem of a variable is, and what is wrong; empty for none."""
    variable, problem = labels["variable"], labels["problem"]
    if variable in OF_DEVICES and problem in DEVICES:
        return "DshealthdNcclDeviceUnfit", f"{variable} {DEVICES[problem]}"
    if variable.startswith(("NCCL_", "TORCH_NCCL_")) and problem in VALUES:
        return "DshealthdNcclSettingWrong", f"{variable} {VALUES[problem]}"
    return "", ""


RULES = (variables,)
