"""The GPUs of its node that `CUDA_VISIBLE_DEVICES` leaves a process."""

from __future__ import annotations

import re
from typing import NamedTuple

_INDEX = re.compile(r"\s*[+-]?\d+")
_UUIDS = ("GPU-", "MIG-")


class Visible(NamedTuple):
    """The GPUs that a process sees, and the problems of the list."""

    devices: tuple[str, ...]
    """As they are listed; CUDA numbers them from 0 in this order."""
    repeated: bool = False
    """A GPU is listed twice: CUDA then shows none."""
    missing: bool = False
    """A listed GPU does not exist on the node: CUDA shows only those before it."""


def visible(text: str, gpus: int | None) -> Visible:
    """Return the GPUs that a `CUDA_VISIBLE_DEVICES` list makes visible.

    `gpus` is the number of GPUs of the node, None if unknown. UUIDs are not looked up.

    The rules are CUDA's, as in torch 2.13.0 (`torch.cuda._parse_visible_devices`): a list ends at
    the first entry that is not a GPU, and is empty if an entry occurs twice. An empty list, or one
    that starts with -1, hides GPUs on purpose.
    """
    prefix = next((prefix for prefix in _UUIDS if text.startswith(prefix)), None)
    found: list[str] = []
    for entry in text.split(","):
        if prefix is not None:
            if entry in found:
                return Visible((), repeated=True)
            if not entry.startswith(prefix):
                break
            found.append(entry)
            continue
        match = _INDEX.match(entry)
        index = int(match[0]) if match else -1
        if str(index) in found:
            return Visible((), repeated=True)
        if index < 0:
            break
        if gpus is not None and index >= gpus:
            return Visible(tuple(found), missing=True)
        found.append(str(index))
    return Visible(tuple(found))
