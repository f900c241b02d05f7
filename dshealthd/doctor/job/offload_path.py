"""The directories to which the configuration offloads exist and are writable."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.job_sources.remedies import paste
from dshealthd.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job_context import JobContext

_BLOCKS = ("offload_optimizer", "offload_param")


def applies(context: JobContext) -> bool:
    """Whether the configuration offloads to directories on NVMe."""
    return bool(_paths(context))


def run(context: JobContext) -> Iterator[Result]:
    """Yield offload directories that are missing or that this user cannot write."""
    paths = _paths(context)
    if not paths:
        yield Result(Outcome.UNKNOWN, "the configuration names no offload directory")
    for key, path in paths.items():
        problem = _problem(path)
        shown = printable(path[:255])
        if problem:
            yield Result(
                Outcome.CRITICAL,
                f"{key}: {shown} {problem}",
                remedy=paste("mkdir", "-p", "--", path),
                source="deepspeed/runtime/zero/stage3.py",
                component=f"zero_optimization.{key}.nvme_path",
            )
        else:
            yield Result(Outcome.OK, f"{key}: {shown} is a writable directory")


def _paths(context: JobContext) -> dict[str, str]:
    zero = (context.document or {}).get("zero_optimization")
    found = {}
    for key in _BLOCKS:
        block = zero.get(key) if isinstance(zero, dict) else None
        if isinstance(block, dict) and block.get("device") == "nvme":
            path = block.get("nvme_path")
            if isinstance(path, str) and path and "\0" not in path:
                found[key] = path
    return found


def _problem(path: str) -> str:
    """Return why DeepSpeed cannot use the offload directory, in which it creates a folder."""
    try:
        status = os.stat(path)
    except OSError as error:
        return f"cannot be used: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a directory"
    return "" if os.access(path, os.W_OK | os.X_OK) else "is not writable by this user"


CHECK: Check[JobContext] = Check(
    "nvme-offload", "offload-path", "Offload directories can be used", run
)
