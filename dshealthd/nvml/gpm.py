"""GPM, GPU Performance Monitoring: utilization of a GPU's units between two samples; Hopper on.

https://docs.nvidia.com/deploy/nvml-api/group__nvmlGpmFunctions.html
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dshealthd.nvml.device import Device


class Samples:
    """The two samples of one GPU, which outlive its handle.

    Never freed: there are only two per GPU that the process has seen.
    """

    def __init__(self) -> None:
        self._older: Any = None
        self._newer: Any = None
        self._begun = False
        """Whether the newer sample was taken, so that the next one can be compared with it."""

    def between(self, device: Device, metrics: Sequence[str]) -> list[float | None] | None:
        """Take a GPM sample, and return averages since the last one; None if there is none.

        `metrics` are names of pynvml constants; percentages are in percent.
        """
        supported = device.keep(
            ("gpm",), lambda: device.perform("nvmlGpmQueryDeviceSupport", lambda: _support(device))
        )
        if not supported:
            return None
        begun, self._begun = self._begun, False
        self._older, self._newer = self._newer, self._older
        if device.perform("nvmlGpmSampleGet", lambda: self._take(device)) is None:
            return None
        self._begun = True
        if not begun:
            return None
        return device.perform("nvmlGpmMetricsGet", lambda: self._averages(metrics))

    def _take(self, device: Device) -> bool:
        if self._newer is None:
            self._newer = pynvml.nvmlGpmSampleAlloc()
        pynvml.nvmlGpmSampleGet(device.handle, self._newer)
        return True

    def _averages(self, metrics: Sequence[str]) -> list[float | None]:
        asked = pynvml.c_nvmlGpmMetricsGet_t()
        asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        asked.numMetrics = len(metrics)
        asked.sample1, asked.sample2 = self._older, self._newer
        for place, name in enumerate(metrics):
            asked.metrics[place].metricId = getattr(pynvml, name)
        pynvml.nvmlGpmMetricsGet(asked)
        answers = asked.metrics[: len(metrics)]
        return [
            one.value
            if one.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(one.value)
            else None
            for one in answers
        ]


def _support(device: Device) -> bool:
    return bool(pynvml.nvmlGpmQueryDeviceSupport(device.handle).isSupportedDevice)
