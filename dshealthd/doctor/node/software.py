"""Software of training environments: versions that fit together, and CUDA devices."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Result, ok, unknown, warning
from dshealthd.doctor.remedies import paste
from dshealthd.doctor.snapshot_check import SnapshotCheck, snapshot_check
from dshealthd.findings.settings import known_defects
from dshealthd.jobs.installation import Installations, Versions
from dshealthd.linux.privileges import NOBODY
from dshealthd.linux.process_root import Root

if TYPE_CHECKING:
    from dshealthd.doctor.node_context import NodeContext

ONCE = frozenset(("torch", "deepspeed", "nccl"))
COMPATIBILITY = "CUDA minor version compatibility (docs.nvidia.com/deploy/cuda-compatibility)"
DEADLINE = 8.0
"""Seconds: importing torch takes two from a local disk, and more from a shared one."""
_SCRIPT = "import torch.cuda as c; print(c.device_count() if c.is_available() else 0)"
"""torch counts the GPUs by NVML, whether or not CUDA can start; only the second call starts it."""
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The variable by which the second call does not start CUDA either."""


def prefix(python: str) -> str:
    """Return the prefix of a training environment's interpreter; a prefix is returned as it is."""
    head, tail = os.path.split(python.rstrip("/"))
    return os.path.dirname(head) if tail.startswith("python") else python.rstrip("/") or "/"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version up to the first part that is none."""
    parts = itertools.takewhile(str.isdecimal, version.split("."))
    return tuple(map(int, parts))


def judge(
    versions: Versions, driver_cuda: str | None, *, gpus: bool
) -> Iterator[tuple[str, str, str]]:
    """Yield each mismatch in a training environment's software, with a remedy and a source.

    `driver_cuda` is the newest CUDA that the driver supports; None without a driver.
    """
    found: dict[str, set[str]] = {}
    for name, version in versions:
        found.setdefault(name, set()).add(version)
    for name in sorted(ONCE & found.keys()):
        if len(found[name]) > 1:
            yield (
                f"{name} is installed {len(found[name])} times: {', '.join(sorted(found[name]))}",
                f"pip uninstall -y {name}; pip install {name}",
                COMPATIBILITY,
            )
    cuda = min(found.get("cuda", ()), default=None)
    if cuda is None and "torch" in found and gpus:
        version = ", ".join(sorted(found["torch"]))
        remedy = "pip install --force-reinstall torch"
        yield f"torch {version} is built without CUDA", remedy, COMPATIBILITY
    if cuda is not None and driver_cuda is not None:
        wanted, served = _numbers(cuda)[:1], _numbers(driver_cuda)[:1]
        if wanted and served and wanted > served:
            yield (
                f"torch is built for CUDA {cuda}, but the driver supports only {driver_cuda}",
                f"install a torch for CUDA {served[0]} (pytorch.org) or a newer driver",
                COMPATIBILITY,
            )
    for nccl in sorted(found.get("nccl", ())):
        for text in known_defects(nccl, found.get("torch", set())):
            yield f"NCCL {nccl} {text}", "pip install --upgrade torch", COMPATIBILITY


def _problems(context: NodeContext) -> Iterator[Result]:
    installations = Installations()
    labels = next((point.labels for point in context.series("gpu_driver_info")), None)
    driver_cuda = None if labels is None else labels["cuda"]
    environments = list(dict.fromkeys(prefix(python) for python in context.python))
    if not environments:
        yield ok("no environment is given: set --python or collectors.software.environments")
    for environment in environments:
        try:
            with Root.of_owner(context.host.rootfs, environment) as root:
                versions = installations.environment(root, environment)
        except OSError as error:
            yield unknown(f"{environment}: {error.strerror or error}", component=environment)
            continue
        pip = f"{paste(f'{environment}/bin/python')} -m pip "
        for text, given, source in judge(versions, driver_cuda, gpus=context.has_gpus):
            remedy = given.replace("pip ", pip)
            yield warning(f"{environment}: {text}", remedy, source=source, component=environment)


VERSIONS = snapshot_check(
    "nccl-all-reduce-failed",
    "software",
    "Driver, CUDA, NCCL and torch are compatible",
    "gpu",
    alerts=(),
    problems=_problems,
)


def _count_devices(python: str) -> tuple[int, str, str]:
    owner = os.stat(python).st_uid
    user = (owner or NOBODY.uid) if os.geteuid() == 0 else None
    done = subprocess.run(  # noqa: S603 - named by whoever runs the command or configures it
        [python, "-I", "-c", _SCRIPT],
        env={name: value for name, value in os.environ.items() if name != _BY_NVML},
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


def _cuda_problems(context: NodeContext) -> Iterator[Result]:
    expected = context.series.value("gpus_visible")
    if not expected:
        return
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        yield ok("not checked: CUDA_VISIBLE_DEVICES is set here and limits what torch sees")
        return
    # a bare prefix is only read
    found = [one for one in context.python if os.path.basename(one).startswith("python")]
    if not found:
        yield ok("no interpreter is given: set --python or probe.python")
    for python in found:
        code, output, errors = _count_devices(python)
        if code or not output.isdecimal():
            last = errors.splitlines()[-1:] or [f"exit status {code}"]
            yield unknown(f"{python}: {last[0][:300]}", component=python)
        elif int(output) < expected:
            _, failed, why = errors.partition("CUDA initialization: ")
            yield warning(
                f"torch of {python} sees {plural(int(output), 'GPU')}, but NVML sees {expected:g}"
                + (f": {why.splitlines()[0][:300]}" if failed and why else ""),
                remedy=paste(python, "-c", "import torch; torch.cuda.init()")
                + "; ls -l /dev/nvidia*",
                value=output,
                limit=f"{expected:g}",
                source="dshealthd_gpus_visible",
                component=python,
            )


CUDA_DEVICES: SnapshotCheck = dataclasses.replace(
    snapshot_check(
        "nvml-broken",
        "cuda-devices",
        "torch sees the GPUs",
        "gpu",
        alerts=(),
        problems=_cuda_problems,
    ),
    deadline=DEADLINE,
)
