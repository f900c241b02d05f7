"""Signs of hard faults that the collector `gpu` reads at each of its frequent sweeps.

What they stand for is read in full, and exported, by collectors of longer intervals, which are told
when a sign changes. Imports no pynvml.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dshealthd.core.collector import News
from dshealthd.nvml.values import Fields

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.nvml.device import Device

LINK_COUNT = "NVML_FI_DEV_NVLINK_LINK_COUNT"
LINK_STATE = "NVML_FI_DEV_NVLINK_GET_STATE"
LINK_UP = (1, 2)
"""States of an NVLink: active, asleep; not 0 inactive, nor 3 active with traffic disabled."""
_COUNT = Fields(LINK_COUNT)
_MEMORY = ("NVML_FI_DEV_ECC_DBE_VOL_TOTAL", "NVML_FI_DEV_REMAPPED_FAILURE")


@functools.cache
def _asked(links: int) -> Fields:
    """Return the fields to ask for the signs of a GPU with so many NVLinks."""
    return Fields(*_MEMORY, *((LINK_STATE, link) for link in range(links)))


class Signs:
    """The signs of each GPU as they were last seen, by UUID."""

    def __init__(self, tell: Callable[[News], None]) -> None:
        """Have seen nothing; the first look at a GPU is no news."""
        self._tell = tell
        self._seen: dict[str, dict[News, list[float | None]]] = {}

    def look(self, uuid: str, device: Device) -> None:
        """Read one GPU's signs in one call, and tell of those that differ from before.

        What cannot be read is no change, and no fault here: whoever exports it says so.
        """
        noted = len(device.notes)
        links = device.keep((LINK_COUNT,), lambda: device.fields(_COUNT)[0])
        values = device.fields(_asked(int(links or 0)))
        del device.notes[noted:]
        split = len(_MEMORY)
        now: dict[News, list[float | None]] = {
            News.GPU_MEMORY: values[:split],
            News.NVLINK: [None if state is None else state in LINK_UP for state in values[split:]],
        }
        before = self._seen.get(uuid)
        self._seen[uuid] = now
        if before is None:
            return
        for news, signs in now.items():
            if any(
                None not in (was, value) and was != value
                for was, value in zip(before[news], signs, strict=False)
            ):
                self._tell(news)
