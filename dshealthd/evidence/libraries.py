"""Distinguishes library code on a rank's stack from the job's own code."""

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
"""Frameworks are listed by name because they may run from a checkout, outside site-packages."""


def is_library(filename: str) -> bool:
    """Return whether a frame's file belongs to a library, by its path."""
    return any(part in filename for part in _PARTS)
