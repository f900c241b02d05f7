"""libaio is there where NVMe offload is used."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from dshealthd.doctor.check import Check, Outcome, Result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext

NAMES = ("libaio.so.1", "libaio.so.1t64")
"""The second is Debian's and Ubuntu's name since 2024."""


def _run(context: NodeContext) -> Iterator[Result]:
    for name in NAMES:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        yield Result(Outcome.OK, f"{name} can be loaded, as DeepSpeed's async_io needs it")
        return
    paths = getattr(context.config.collectors["filesystem"], "write_test", ())
    offload = [path for path in paths if "nvme" in path]
    yield Result(
        Outcome.WARNING if offload else Outcome.OK,
        "libaio is not installed"
        + (
            f", and DeepSpeed needs it to offload to {offload[0]}"
            if offload
            else "; only NVMe offload needs it"
        ),
        remedy="sudo apt install libaio-dev || sudo dnf install libaio-devel" if offload else "",
        component="libaio",
    )


CHECK: Check[NodeContext] = Check("nvme-offload", "async-io", "libaio for NVMe offload", _run)
