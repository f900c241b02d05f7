"""Which code on a rank's stack is a library's, and not the training's own."""

from __future__ import annotations

_PARTS = (
    "/torch/",
    "/deepspeed/",
    "/accelerate/",
    "/lightning/",
    "/transformers/",
    "/dshealthd/training/",
    "/site-packages/",
    "/dist-packages/",
    "/lib/python",
)
"""The frameworks may be run from a checkout, and then no directory says that they are installed."""


def is_library(filename: str) -> bool:
    """Return whether a frame's file belongs to a library, by its path."""
    return any(part in filename for part in _PARTS)
