"""What `CUDA_VISIBLE_DEVICES` leaves a process of its node's GPUs."""

from __future__ import annotations

import re
from typing import NamedTuple

_INDEX = re.compile(r"\s*[+-]?\d+")
_UUIDS = ("GPU-", "MIG-")


class Visible(NamedTuple):
    """The GPUs that a process sees, and what is wrong with the list."""

    devices: tuple[str, ...]
    """As they are listed; CUDA numbers them from 0 in this order."""
    repeated: bool = False
    """One is listed twice: CUDA then shows none."""
    missing: bool = False
    """One is listed that the node does not have: CUDA shows those before it."""


def visible(text: str, gpus: int | None) -> Visible:
    """Return which GPUs a list of `CUDA_VISIBLE_DEVICES` leaves.

    `gpus` is how many the node has, where that is known; those that are listed by UUID are not
    looked up.

    The rules are CUDA's, as torch 2.13.0 (`torch.cuda._parse_visible_devices`) repeats them: a list
    ends at the first entry that is no GPU, and is empty if one is there twice. An empty list, or
    one that starts with -1, is how GPUs are hidden on purpose.
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
