"""The options of Slurm's hooks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dshealthd.core.options import option

if TYPE_CHECKING:
    from collections.abc import Iterator

DRAIN_FOR = (
    "DshealthdGpuLost",
    "DshealthdGpuMissing",
    "DshealthdGpuUnreadable",
    "DshealthdGpuMemoryErrorUncorrected",
    "DshealthdGpuRowRemapFailed",
    "DshealthdGpuResetNeeded",
    "DshealthdNvmlHung",
    "DshealthdNvmlFailing",
)
"""Alerts of this node's own GPUs that no job on it survives.

A full disk, a hung job or a link, whose other end may be the culprit, is for people to judge.
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions:
    """Slurm's hooks: `dshealthd slurm health`, `prolog` and `epilog`."""

    drain_for: tuple[str, ...] = option(
        list(DRAIN_FOR),
        "Alerts that drain the node while their finding is critical; see docs/runbooks.md.",
    )
    bad_checks: int = option(
        2, "Consecutive checks that must find the same before the node is drained.", minimum=1
    )
    budget_ratio: float = option(
        0.02,
        "Share of the cluster's nodes that all agents together may drain in an hour; "
        "at least one node.",
        minimum=0.0,
        maximum=1.0,
    )
    daily_budget_ratio: float = option(
        0.1,
        "Share of the cluster's nodes that dshealthd may have drained in 24 hours and that are "
        "still drained; at least two nodes, and at least budget_ratio.",
        minimum=0.0,
        maximum=1.0,
    )
    prolog_probe: bool = option(
        False,
        "Whether the prolog has light rounds with up to eight other nodes of the job (probe.peer), "
        "for 10 s at most; a node that reaches none of several, or none with data, is drained "
        "within the budget.",
    )
    undrain: bool = option(False, "Whether a node that dshealthd has drained is undrained again.")
    clean_checks: int = option(
        10, "Consecutive checks without a finding before a node is undrained.", minimum=2
    )
    maintenance: bool = option(
        True,
        "Whether a node that somebody else has drained, or that is in a reservation of type "
        "MAINT, is in maintenance: its alerts page no one. Asked by the health check.",
    )
    node: str = option(
        "", "Name of this node in slurm.conf; where empty $SLURMD_NODENAME, else the host name."
    )
    conf_file: Path | None = option(
        None, "slurm.conf, where the commands of Slurm do not find it by themselves."
    )
    bin_directory: Path | None = option(
        None, "Directory of scontrol and sinfo, where it is neither in /usr nor /opt/slurm."
    )
    run_directory: Path = option(
        Path("/run/dshealthd-slurm"),
        "Directory for the counts of consecutive checks; made and owned by root.",
    )

    user: str = option(
        "", "User name for the agent, where `basic_auth_users` makes it ask for a password."
    )
    password_file: Path | None = option(None, "File with that user's password; root reads it.")
    cert_file: Path | None = option(
        None, "Client certificate for the agent, where `client_auth_type` makes it ask for one."
    )
    key_file: Path | None = option(None, "Private key of cert_file.")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of Slurm's hooks whose values cannot be used, and why."""
        if bool(self.user) != (self.password_file is not None):
            yield "user", "user and password_file go together"
        if (self.cert_file is None) != (self.key_file is None):
            yield "cert_file", "cert_file and key_file go together"
        if not self.run_directory.is_absolute():
            yield "run_directory", "must be an absolute path"
