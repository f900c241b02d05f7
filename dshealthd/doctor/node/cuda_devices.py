"""torch of a training environment sees the GPUs; it is queried in a separate process.

`torch.cuda.device_count()` creates no CUDA context. Any user may own the interpreter: root runs it
with its owner's rights, and runs one owned by root as nobody.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import SnapshotCheck, snapshot_check

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

NOBODY = 65534
DEADLINE = 8.0
"""Seconds: importing torch takes two from a local disk, and more from a shared one."""
_SCRIPT = "import torch; print(torch.cuda.device_count())"


def _interpreters(context: NodeContext) -> list[str]:
    """Return the environments' interpreters to run; a bare prefix is only read."""
    return [one for one in context.python if os.path.basename(one).startswith("python")]


def _ask(python: str) -> tuple[int, str, str]:
    owner = os.stat(python).st_uid
    user = (owner or NOBODY) if os.geteuid() == 0 else None
    done = subprocess.run(  # noqa: S603 - named by whoever runs the command or configures it
        [python, "-I", "-c", _SCRIPT],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        user=user,
        group=user,
        extra_groups=[] if user is not None else None,
        cwd="/",
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _problems(context: NodeContext) -> Iterator[Result]:
    expected = context.series.value("gpus_visible")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not expected or hidden is not None:
        return
    for python in _interpreters(context):
        code, output, errors = _ask(python)
        if code or not output.isdecimal():
            last = errors.splitlines()[-1:] or [f"exit status {code}"]
            yield Result(Outcome.UNKNOWN, f"{python}: {last[0][:300]}", component=python)
        elif int(output) < expected:
            yield Result(
                Outcome.WARNING,
                f"torch of {python} sees {plural(int(output), 'GPU')}, but NVML sees {expected:g}",
                remedy=f"{python} -c 'import torch; torch.cuda.init()'; ls -l /dev/nvidia*",
                value=output,
                limit=f"{expected:g}",
                source="dshealthd_gpus_visible",
                component=python,
            )


def _summary(context: NodeContext) -> str:
    found = _interpreters(context)
    if not found:
        return "no interpreter is given: set --python or doctor.python"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return "not checked: CUDA_VISIBLE_DEVICES is set here and limits what torch sees"
    return f"torch of {', '.join(found)} sees all GPUs"


CHECK: SnapshotCheck = dataclasses.replace(
    snapshot_check(
        "nvml-broken",
        "cuda-devices",
        "torch sees the GPUs",
        ("gpu",),
        _summary,
        _problems,
        alerts="none of the alerts",
        reads_host=True,
    ),
    deadline=DEADLINE,
)
