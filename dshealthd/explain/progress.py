"""Lines by which a training shows that it goes on."""

from __future__ import annotations

import re

_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|global[_ ]step|batch)\b['\"]?[\s=:#\[]{0,4}(?P<step>\d{1,9})\b"
    r"|\b\d+/\d+ \[\d+:\d\d|\b(?:it/s|s/it)\b|\bloss\W{1,6}-?\d",
    re.IGNORECASE,
)
FINITE_LOSS = re.compile(r"\bloss['\"]?\s*[:=|]?\s*\[?(?:tensor\()?-?\d", re.IGNORECASE)


def is_progress(text: str) -> bool:
    """Tell whether a line is one of progress; a few words spare most lines the expression."""
    low = text.lower()
    return (
        "step" in low
        or "iter" in low
        or "loss" in low
        or "batch" in low
        or "it/s" in low
        or "s/it" in low
        or ("[" in low and "/" in low)
    ) and _PROGRESS.search(text) is not None
