"""The options of Slurm's hooks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dshealthd.core.options import Section, option

DRAIN_FOR = (
    "DshealthdGpuLost",
    "DshealthdGpuResetNeeded",
    "DshealthdNvmlBroken",
)
"""Alerts about this node's own GPUs that no job on it survives. People must judge a full disk, a
hung job, or a link, whose other end may be the culprit.
"""


@dataclass(frozen=True, kw_only=True)
class SlurmOptions(Section):
    """Slurm's hooks: `dshealthd slurm health`, `prolog` and `epilog`."""

    drain_for: tuple[str, ...] = option(
        list(DRAIN_FOR),
        "Alerts that drain the node while their finding is critical (docs/runbooks.md).",
    )
    bad_checks: int = option(
        2, "Consecutive checks with the same finding before the node is drained.", minimum=1
    )
    budget_ratio: float = option(
        0.02,
        "Share of the cluster's nodes with GPUs (GRES; without any, of all nodes) that all agents "
        "together may drain in an hour; at least one node.",
        minimum=0.0,
        maximum=1.0,
    )
    daily_budget_ratio: float = option(
        0.1,
        "Share of these nodes that dshealthd may drain in 24 hours, counting nodes still drained; "
        "at least two nodes, and at least budget_ratio.",
        minimum=0.0,
        maximum=1.0,
    )
    maintenance: bool = option(
        True,
        "Whether a node drained by an operator, or in a reservation with the flag MAINT, is in "
        "maintenance, so that its alerts page no one. The health check queries Slurm.",
    )
    node: str = option(
        "", "Name of this node in slurm.conf; empty: $SLURMD_NODENAME, else the host name."
    )
    conf_file: Path | None = option(
        None, "Path of slurm.conf, if Slurm's commands do not find it by themselves."
    )
    bin_directory: Path | None = option(
        None, "Directory of scontrol and sinfo, if not below /usr or /opt/slurm."
    )
    run_directory: Path = option(
        Path("/run/dshealthd-slurm"),
        "Directory for the counts of consecutive checks; created and owned by root.",
    )

    user: str = option(
        "", "User name for the agent, if its `basic_auth_users` requires a password."
    )
    password_file: Path | None = option(None, "File with that user's password; root reads it.")
    cert_file: Path | None = option(
        None, "Client certificate for the agent, if its `client_auth_type` requires one."
    )
    key_file: Path | None = option(None, "Private key of cert_file.")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of Slurm's hooks whose values cannot be used, and why."""
        if bool(self.user) != (self.password_file is not None):
            yield "user", "user and password_file must be set together"
        if (self.cert_file is None) != (self.key_file is None):
            yield "cert_file", "cert_file and key_file must be set together"
        if not self.run_directory.is_absolute():
            yield "run_directory", "must be an absolute path"
