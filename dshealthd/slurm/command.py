"""The command `dshealthd slurm`: what Slurm's hooks run as root on every node.

A drain costs nodes, so any failure here has the same result as no findings. If a prolog or epilog
fails in any way, Slurm drains the node, with a reason of its own and without a budget. So only one
exit status, `REFUSE`, which nothing else uses, means that a job must not start; the programs in
`deploy/slurm/` turn it, and nothing else, into a failure.
"""

from __future__ import annotations

import functools
import os
import socket
import syslog
import time
from typing import TYPE_CHECKING

from dshealthd.core.text import print_lines
from dshealthd.slurm import agent, maintenance
from dshealthd.slurm.check import Busy, CheckReport, NodeCheck, NodeCheckResult, locked_streaks
from dshealthd.slurm.controller import Controller, ControllerError
from dshealthd.slurm.options import SlurmOptions

if TYPE_CHECKING:
    from dshealthd.config.config import Config

REFUSE = 100
"""Exit status of a prolog on a drained node with a finding; neither Python nor a shell uses it."""
WAIT = 8.0
"""Seconds that a prolog or epilog waits for another check of the node to end: one that looks again
takes 6 s, and its queries some more."""
PRIORITIES = {
    NodeCheckResult.CLEAN: syslog.LOG_INFO,
    NodeCheckResult.UNKNOWN: syslog.LOG_WARNING,
    NodeCheckResult.BAD: syslog.LOG_WARNING,
    NodeCheckResult.DRAINED: syslog.LOG_ERR,
}


def slurm(loaded: Config, hook: str) -> int:
    """Run one of Slurm's hooks and return its exit status: 0, or `REFUSE` of a prolog."""
    options = loaded.section(SlurmOptions)
    controller = Controller(conf_file=options.conf_file, bin_directory=options.bin_directory)
    if hook == "health" and options.maintenance:
        _keep_maintenance(loaded, controller)
    said_before = ""
    try:
        node = node_name(loaded)
        with locked_streaks(options.run_directory, 0.0 if hook == "health" else WAIT) as streaks:
            ask = functools.partial(agent.query, loaded, options.drain_for)
            check = NodeCheck(options, node, ask, controller, streaks)
            outcome = check.insistently() if hook == "prolog" else check.once()
            # A drained node is checked every minute for as long as its repair takes.
            said_before, streaks.said = streaks.said, outcome.text
    except Busy as error:
        outcome = CheckReport(NodeCheckResult.UNKNOWN, f"nothing done: {error}")
    except OSError as error:
        text = f"nothing done: {options.run_directory}: {error.strerror or error}"
        outcome = CheckReport(NodeCheckResult.UNKNOWN, text)
    if outcome.text:
        new = hook != "health" or outcome.text != said_before
        _log(PRIORITIES[outcome.result] if new else syslog.LOG_DEBUG, f"{hook}: {outcome.text}")
    return REFUSE if hook == "prolog" and outcome.result is NodeCheckResult.DRAINED else 0


def _keep_maintenance(loaded: Config, controller: Controller) -> None:
    """Tell the agent whether Slurm has the node in maintenance; change nothing if that fails."""
    try:
        maintenance.keep(loaded.path.state, controller, node_name(loaded), time.time())
    except (ControllerError, OSError) as error:
        _log(syslog.LOG_WARNING, f"health: maintenance is not known: {error}")


def _log(priority: int, text: str) -> None:
    print_lines(f"dshealthd: {text}", error=True)
    syslog.openlog("dshealthd-slurm", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(priority, text)


def node_name(loaded: Config) -> str:
    """Return Slurm's name of this node."""
    return (
        loaded.section(SlurmOptions).node
        or os.environ.get("SLURMD_NODENAME", "")
        or socket.gethostname().partition(".")[0]
    )
