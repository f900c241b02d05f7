"""Status documents as agents send them, with changes."""

from __future__ import annotations

import json
import math
from typing import Any


def _refusal() -> str:
    try:
        json.dumps(math.inf, allow_nan=False)
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError


NOT_JSON = _refusal()
"""Why a part with an infinite figure is left out, in this Python's words."""


def finding(**other: Any) -> dict[str, Any]:
    """Return the finding of a lost GPU."""
    return {
        "slug": "gpu-lost",
        "alert": "DshealthdGpuLost",
        "severity": "critical",
        "component": "gpu",
        "part": "GPU 3",
        "summary": "A GPU fell off the bus",
        "detail": "GPU 3 of n1 is lost to the driver.",
        "first_step": "drain n1 and reboot it",
        "runbook": "/runbooks/gpu-lost",
        "reason": "gpu_lost",
        "value": None,
        "limit": None,
        "source": "dshealthd_gpu_fault",
        "limit_source": "",
        "since": 990.0,
        "hold_seconds": 0.0,
        "training_job": "",
        "trend": "",
        **other,
    }


def rank(**other: Any) -> dict[str, Any]:
    """Return a rank that trains."""
    return {
        "rank": 0,
        "step": 7,
        "step_seconds": 1.0,
        "phase": "training",
        "stage": "forward",
        "process": "running",
        "heartbeat": None,
        **dict.fromkeys(("overdue_seconds", "bound_seconds", "work_seconds", "wait_seconds")),
        **dict.fromkeys(("work_ratio", "wait_source")),
        "loss_finite": True,
        "gpu": "0",
        **other,
    }


def job(**other: Any) -> dict[str, Any]:
    """Return a job of one rank that trains."""
    return {
        "job": "run-1",
        "launcher": "torchrun",
        "world_size": 1,
        "ranks_here": 1,
        "step": 7,
        "step_highest": 7,
        "steps_per_minute": 60.0,
        "loss": "finite",
        "state": "training",
        "hang": None,
        "stall": None,
        "followed": {},
        "own_work": [],
        "attempts": None,
        "failures": [],
        "evidence": None,
        "ranks": [rank()],
        **other,
    }


def document(**other: Any) -> dict[str, Any]:
    """Return the document of a healthy node without probes."""
    return {
        "node": "n1",
        "version": "0.1.0",
        "time": 1000.0,
        "started": 1.0,
        "uptime_seconds": 999.0,
        "ready": True,
        "collectors": [],
        "workers": [],
        "schema": 1,
        "verdict": "ok",
        "findings": [],
        "watched": [],
        "jobs": [],
        "probe": {"state": "off"},
        "evidence": {"state": "ok", "directory": "/var/lib/dshealthd/evidence", "bundles": []},
        "metrics": {},
        **other,
    }
