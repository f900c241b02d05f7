"""Counts in texts."""

from __future__ import annotations

import math

import pytest

from dshealthd.core.text import plural


@pytest.mark.parametrize(
    ("number", "one", "several", "text"),
    [
        (0, "GPU", "", "0 GPUs"),
        (1, "GPU", "", "1 GPU"),
        (1.0, "GPU", "", "1 GPU"),
        (2.0, "GPU", "", "2 GPUs"),
        (1, "process hangs", "processes hang", "1 process hangs"),
        (3, "process hangs", "processes hang", "3 processes hang"),
        (1_048_576.0, "file", "", "1,048,576 files"),
        (math.inf, "file", "", "inf files"),
    ],
)
def test_plural(number: float, one: str, several: str, text: str) -> None:
    """One is in the singular; a large count is in full, with commas, and not as a power of ten."""
    assert plural(number, one, several) == text
