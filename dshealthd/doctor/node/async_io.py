"""libaio and DeepSpeed's operator on top of it are installed where NVMe offload is used.

DeepSpeed compiles `async_io` on first use, which needs libaio's header, unless it was built with
DeepSpeed. A file of the environment says which; nothing from the environment is run.
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.check import Check, Outcome, Result
from dshealthd.doctor.node.software import prefix
from dshealthd.jobs.deepspeed_operators import operators
from dshealthd.linux.process_files import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

NAMES = ("libaio.so.1", "libaio.so.1t64")
"""The second is Debian's and Ubuntu's name since 2024."""
HEADER = "/usr/include/libaio.h"
OPERATOR = "async_io"
INSTALL = "sudo apt install libaio-dev || sudo dnf install libaio-devel"


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
        return Result(Outcome.OK, text, component="libaio")
    if not offload:
        text = "libaio is not installed; only NVMe offload needs it"
        return Result(Outcome.OK, text, component="libaio")
    text = f"libaio is not installed, and DeepSpeed needs it to offload to {offload}"
    return Result(Outcome.WARNING, text, remedy=INSTALL, component="libaio")


def _operator(context: NodeContext, place: str, offload: str) -> Result | None:
    """Return the result for an environment's async_io; None if it has no DeepSpeed."""
    try:
        with Root.of_owner(context.host.rootfs, place) as root:
            built = operators(root, place)
            header = root.look(HEADER) is not None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        return Result(Outcome.UNKNOWN, f"{place}: {why}", component=place)
    if built is None:
        return None
    count = f"{sum(built.values())} of {plural(len(built), 'DeepSpeed operator')} built"
    if built.get(OPERATOR):
        return Result(Outcome.OK, f"{place}: {count}, including {OPERATOR}", component=place)
    if header or not offload:
        text = f"{place}: {count}; {OPERATOR} is compiled on first use"
        return Result(Outcome.OK, text, component=place)
    return Result(
        Outcome.WARNING,
        f"{place}: {OPERATOR} is not built and cannot be built because {HEADER} is missing; "
        f"DeepSpeed needs it to offload to {offload}",
        remedy=INSTALL,
        source="deepspeed/ops/op_builder/async_io.py",
        component=place,
    )


def _run(context: NodeContext) -> Iterator[Result]:
    offload = _offload(context)
    yield _library(offload)
    for place in dict.fromkeys(prefix(python) for python in context.python):
        if (found := _operator(context, os.path.abspath(place), offload)) is not None:
            yield found


CHECK: Check[NodeContext] = Check(
    "nvme-offload", "async-io", "libaio and DeepSpeed's operators for NVMe offload", _run
)
