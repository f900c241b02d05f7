"""Software of training environments: versions that fit together, CUDA devices, libaio."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import re
import subprocess
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Result, ok, unknown, warning
from dshealthd.doctor.remedies import paste
from dshealthd.doctor.snapshot_check import SnapshotCheck, snapshot_check
from dshealthd.findings.settings import known_defects
from dshealthd.jobs.installation import Installations, operators
from dshealthd.linux.privileges import NOBODY
from dshealthd.linux.process_root import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext
    from dshealthd.jobs.installation import Versions

ONCE = frozenset(("torch", "deepspeed", "nccl"))
BUILDS = ((11, 8), (12, 6), (12, 8), (13, 0))
"""CUDA versions for which torch has a wheel index (pytorch.org/get-started)."""
BLACKWELL = re.compile(r"\bG?B[23]00\b|\bBlackwell\b|\bRTX 50[5-9]0\b")
"""Names of GPUs of compute capability 10 and 12."""
FIRST_FOR_BLACKWELL = {
    "cuda": ((12, 8), "CUDA 12.8 release notes (docs.nvidia.com): compute capability 10 and 12"),
    "nccl": ((2, 25, 1), "NCCL 2.25.1 release notes (docs.nvidia.com): Blackwell"),
}
COMPATIBILITY = "CUDA minor version compatibility (docs.nvidia.com/deploy/cuda-compatibility)"
DEADLINE = 8.0
"""Seconds: importing torch takes two from a local disk, and more from a shared one."""
_SCRIPT = "import torch; print(torch.cuda.device_count())"
NAMES = ("libaio.so.1", "libaio.so.1t64")
"""The second is Debian's and Ubuntu's name since 2024."""
HEADER = "/usr/include/libaio.h"
OPERATOR = "async_io"
INSTALL = "sudo apt install libaio-dev || sudo dnf install libaio-devel"


def prefix(python: str) -> str:
    """Return the prefix of a training environment's interpreter; a prefix is returned as it is."""
    head, tail = os.path.split(python.rstrip("/"))
    return os.path.dirname(head) if tail.startswith("python") else python.rstrip("/") or "/"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version up to the first part that is none."""
    parts = itertools.takewhile(str.isdecimal, version.split("."))
    return tuple(map(int, parts))


def _for_driver(driver_cuda: str) -> str:
    """Return the command that installs a torch that the driver's CUDA `driver_cuda` supports."""
    served = _numbers(driver_cuda)
    same = [build for build in BUILDS if build[:1] == served[:1]]
    if not same:
        return "cat /proc/driver/nvidia/version  # no torch is built for it: install a newer driver"
    fits = [build for build in same if build <= served]
    build = "".join(map(str, fits[-1] if fits else same[0]))
    index = f"https://download.pytorch.org/whl/cu{build}"
    return f"pip install --force-reinstall torch --index-url {index}  # or install a newer driver"


def judge(
    versions: Versions, driver_cuda: str | None, *, gpus: bool, blackwell: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield each mismatch in a training environment's software, with a remedy and a source.

    `driver_cuda` is the newest CUDA that the driver supports; None without a driver. `blackwell`
    says that the GPUs are of that generation, for which old software has no kernels.
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
                _for_driver(driver_cuda),
                COMPATIBILITY,
            )
    for nccl in sorted(found.get("nccl", ())):
        for text in known_defects(nccl, found.get("torch", set())):
            yield f"NCCL {nccl} {text}", "pip install --upgrade torch", COMPATIBILITY
    if not blackwell or driver_cuda is None:
        return
    for name, (first, source) in FIRST_FOR_BLACKWELL.items():
        for version in sorted(found.get(name, ())):
            numbers = _numbers(version)
            if numbers and numbers < first:
                least = ".".join(map(str, first))
                yield (
                    f"{name.upper()} {version} has no kernels for Blackwell, which needs {least}",
                    _for_driver(driver_cuda) if name == "cuda" else "pip install --upgrade torch",
                    source,
                )


def _environments(context: NodeContext) -> list[str]:
    return list(dict.fromkeys(prefix(python) for python in context.python))


def _problems(context: NodeContext) -> Iterator[Result]:
    installations = Installations()
    labels = next((point.labels for point in context.series("gpu_driver_info")), None)
    driver_cuda = None if labels is None else labels["cuda"]
    is_blackwell = any(
        BLACKWELL.search(point.labels["name"]) for point in context.series("gpu_info")
    )
    for environment in _environments(context):
        try:
            with Root.of_owner(context.host.rootfs, environment) as root:
                versions = installations.environment(root, environment)
        except OSError as error:
            yield unknown(f"{environment}: {error.strerror or error}", component=environment)
            continue
        pip = f"{paste(f'{environment}/bin/python')} -m pip "
        for text, given, source in judge(
            versions, driver_cuda, gpus=context.has_gpus, blackwell=is_blackwell
        ):
            remedy = given.replace("pip ", pip)
            yield warning(f"{environment}: {text}", remedy, source=source, component=environment)


def _summary(context: NodeContext) -> str:
    environments = _environments(context)
    if not environments:
        return "no training environment is given: set --python or doctor.python"
    return f"driver and packages are compatible in {', '.join(environments)}"


VERSIONS = snapshot_check(
    "nccl-all-reduce-failed",
    "software",
    "Driver, CUDA, NCCL and torch are compatible",
    ("gpu",),
    _summary,
    _problems,
    alerts="none of the alerts",
)


def _nccl_summary(context: NodeContext) -> str:
    found = {point.labels["version"] for point in context.series("software_info", component="nccl")}
    return f"no known defect in NCCL {', '.join(sorted(found))}" if found else "no NCCL in use"


NCCL_RELEASES = snapshot_check(
    "nccl-known-bad",
    "nccl-releases",
    "No NCCL release with a known defect is in use",
    ("software",),
    _nccl_summary,
)


def _interpreters(context: NodeContext) -> list[str]:
    """Return the environments' interpreters to run; a bare prefix is only read."""
    return [one for one in context.python if os.path.basename(one).startswith("python")]


def _ask(python: str) -> tuple[int, str, str]:
    owner = os.stat(python).st_uid
    user = (owner or NOBODY.uid) if os.geteuid() == 0 else None
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


def _cuda_problems(context: NodeContext) -> Iterator[Result]:
    expected = context.series.value("gpus_visible")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not expected or hidden is not None:
        return
    for python in _interpreters(context):
        code, output, errors = _ask(python)
        if code or not output.isdecimal():
            last = errors.splitlines()[-1:] or [f"exit status {code}"]
            yield unknown(f"{python}: {last[0][:300]}", component=python)
        elif int(output) < expected:
            yield warning(
                f"torch of {python} sees {plural(int(output), 'GPU')}, but NVML sees {expected:g}",
                remedy=f"{python} -c 'import torch; torch.cuda.init()'; ls -l /dev/nvidia*",
                value=output,
                limit=f"{expected:g}",
                source="dshealthd_gpus_visible",
                component=python,
            )


def _cuda_summary(context: NodeContext) -> str:
    found = _interpreters(context)
    if not found:
        return "no interpreter is given: set --python or doctor.python"
    if os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        return "not checked: CUDA_VISIBLE_DEVICES is set here and limits what torch sees"
    return f"torch of {', '.join(found)} sees all GPUs"


CUDA_DEVICES: SnapshotCheck = dataclasses.replace(
    snapshot_check(
        "nvml-broken",
        "cuda-devices",
        "torch sees the GPUs",
        ("gpu",),
        _cuda_summary,
        _cuda_problems,
        alerts="none of the alerts",
    ),
    deadline=DEADLINE,
)


def _offload(context: NodeContext) -> str:
    """Return a configured path used for NVMe offload, which needs libaio; "" without one."""
    paths = getattr(context.config.collectors["filesystem"], "write_test", ())
    return next((str(path) for path in paths if "nvme" in str(path)), "")


def _library(offload: str) -> Result:
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        text = f"{name} loads, as DeepSpeed's async_io requires"
        return ok(text, component="libaio")
    if not offload:
        text = "libaio is not installed; only NVMe offload needs it"
        return ok(text, component="libaio")
    text = f"libaio is not installed, and DeepSpeed needs it to offload to {offload}"
    return warning(text, remedy=INSTALL, component="libaio")


def _operator(context: NodeContext, environment: str, offload: str) -> Result | None:
    """Return the result for an environment's async_io; None if it has no DeepSpeed."""
    try:
        with Root.of_owner(context.host.rootfs, environment) as root:
            built = operators(root, environment)
            header = root.look(HEADER) is not None
    except (OSError, ValueError, ArithmeticError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return unknown(f"{environment}: {why}", component=environment)
    if built is None:
        return None
    count = f"{sum(built.values())} of {plural(len(built), 'DeepSpeed operator')} built"
    if built.get(OPERATOR):
        return ok(f"{environment}: {count}, including {OPERATOR}", component=environment)
    if header or not offload:
        text = f"{environment}: {count}; {OPERATOR} is compiled on first use"
        return ok(text, component=environment)
    return warning(
        f"{environment}: {OPERATOR} is not built and cannot be built because {HEADER} is missing; "
        f"DeepSpeed needs it to offload to {offload}",
        remedy=INSTALL,
        source="deepspeed/ops/op_builder/async_io.py",
        component=environment,
    )


def _run(context: NodeContext) -> Iterator[Result]:
    offload = _offload(context)
    yield _library(offload)
    for environment in _environments(context):
        if (found := _operator(context, environment, offload)) is not None:
            yield found


ASYNC_IO: Check[NodeContext] = Check(
    "nvme-offload", "async-io", "libaio and DeepSpeed's operators for NVMe offload", _run
)
