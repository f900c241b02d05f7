"""Signs of hard faults that the collector `gpu` reads at each of its frequent sweeps.

When a sign changes, it wakes the collectors with longer intervals that read and export the details.
Imports no pynvml.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from dshealthd.core.collector import News
from dshealthd.nvml.values import MAX_LINKS, Fields

if TYPE_CHECKING:
    from dshealthd.nvml.device import Device

LINK_COUNT = "NVML_FI_DEV_NVLINK_LINK_COUNT"
LINK_STATE = "NVML_FI_DEV_NVLINK_GET_STATE"
LINK_UP = (1, 2)
"""States of an NVLink: active, asleep; not 0 inactive, nor 3 active with traffic disabled."""
_COUNT = Fields(LINK_COUNT)
_MEMORY = ("NVML_FI_DEV_ECC_DBE_VOL_TOTAL", "NVML_FI_DEV_REMAPPED_FAILURE")


@functools.cache
def _fields_of(links: int) -> Fields:
    """Return the fields that hold the signs of a GPU with this number of NVLinks."""
    return Fields(*_MEMORY, *((LINK_STATE, link) for link in range(links)))


class Signs:
    """The last seen signs of each GPU, by UUID."""

    def __init__(self, tell: Callable[[News], None]) -> None:
        """Start with nothing seen; the first look at a GPU is not news."""
        self._tell = tell
        self._seen: dict[str, list[float | None]] = {}

    def update(self, uuid: str, device: Device) -> None:
        """Read a GPU's signs, and report changes; whoever exports a value reports failures."""
        noted = len(device.notes)
        links = device.keep(
            (LINK_COUNT,), lambda: device.count(LINK_COUNT, device.fields(_COUNT)[0], MAX_LINKS)
        )
        values = device.fields(_fields_of(links or 0))
        del device.notes[noted:]
        before = self._seen.get(uuid)
        self._seen[uuid] = values
        if before is None or before == values:  # as nearly always
            return
        now = _by_news(values)
        for news, signs in _by_news(before).items():
            if any(
                None not in (was, value) and was != value
                for was, value in zip(signs, now[news], strict=False)
            ):
                self._tell(news)


def _by_news(values: list[float | None]) -> dict[News, list[float | None]]:
    """Return the signs in the values of a GPU's fields, by what their change is news of."""
    split = len(_MEMORY)
    return {
        News.GPU_MEMORY: values[:split],
        News.NVLINK: [None if state is None else state in LINK_UP for state in values[split:]],
    }
