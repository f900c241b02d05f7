"""The directories on NVMe to which the configuration offloads can be used."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Result, check_of, critical, unknown
from dshealthd.doctor.job.sources.deepspeed_config import Settings
from dshealthd.doctor.remedies import paste

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.job.context import JobContext


def _offload(context: JobContext, paths: dict[str, str]) -> Iterator[Result]:
    for key, path in paths.items():
        problem = _problem(path)
        if problem and (context.gpus is None or context.gpus.value is None):
            text = f"{path[:255]} {problem} here, but without GPUs this is no node of it"
            yield unknown(f"{key}: {text}")
        elif problem:
            yield critical(
                f"{key}: {path[:255]} {problem}",
                paste("mkdir", "-p", "--", path),
                source="deepspeed/runtime/zero/stage3.py",
                component=f"zero_optimization.{key}.nvme_path",
            )


def _paths(context: JobContext) -> dict[str, str]:
    """Return the directories on NVMe to which the configuration offloads, by its block."""
    of, found = Settings(context.document or {}), {}
    for key in ("offload_optimizer", "offload_param"):
        path = of(f"zero_optimization.{key}.nvme_path")
        if of.device(key) == "nvme" and isinstance(path, str) and path and "\0" not in path:
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


CHECK = check_of(
    _paths,
    "the configuration names no offload directory",
    "nvme-offload",
    "offload-path",
    "Offload directories can be used",
    _offload,
)
