"""Which processes of a site that follows its trainings are reported: each rank that trains.

`deploy/training/site` asks as an optimizer makes its first step, in every process that a launcher
has started and whatever it has started in turn. Nothing is changed before that.
"""

from __future__ import annotations

import builtins
import sys
from typing import TYPE_CHECKING

from dshealthd.training.report import launched

if TYPE_CHECKING:
    from dshealthd.training.optimizer import AnyOptimizer


def hook() -> AnyOptimizer | None:
    """Return the hook that reports the steps of this process's optimizers; None if it is no rank
    that trains by itself, or has had a heartbeat: another one would remove its hooks, through which
    torch goes just now.
    """
    if is_interactive() or _is_debugged() or launched() != _joined():
        return None
    from dshealthd.training.heartbeat import Heartbeat, reports
    from dshealthd.training.optimizer import AnyOptimizer

    return None if reports() else AnyOptimizer(Heartbeat())


def _joined() -> tuple[str, str]:
    """Return the rank that this process has among those that it trains with, and how many they are.

    The two differ where ranks are no processes of the launcher (`multiprocessing.spawn` in a single
    task), and where tasks train on their own (a sweep): a name would be wrong, or a comparison.
    """
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or c10d.GroupMember.WORLD is None:
        return "0", "1"
    return str(c10d.get_rank()), str(c10d.get_world_size())


def is_interactive() -> bool:
    """Return whether a person types: between two lines of theirs, a training only seems to hang."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "__IPYTHON__")


def _is_debugged() -> bool:
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )
