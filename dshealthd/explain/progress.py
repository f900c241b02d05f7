"""Lines by which a training shows that it goes on."""

from __future__ import annotations

import re

_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|global[_ ]step|batch)\b['\"]?[\s=:#\[]{0,4}(?P<step>\d{1,9})\b"
    r"|\b\d+/\d+ \[\d+:\d\d|\b(?:it/s|s/it)\b|\bloss\W{1,6}-?\d",
    re.IGNORECASE,
)
FINITE_LOSS = re.compile(r"\bloss['\"]?\s*[:=|]?\s*\[?(?:tensor\()?-?\d", re.IGNORECASE)


def find(text: str) -> re.Match[str] | None:
    """Return what shows in a line that the training goes on; `step` is its step, if it has one.

    A few words spare most lines the expression.
    """
    low = text.lower()
    is_likely = (
        "step" in low
        or "iter" in low
        or "loss" in low
        or "batch" in low
        or "it/s" in low
        or "s/it" in low
        or ("[" in low and "/" in low)
    )
    return _PROGRESS.search(text) if is_likely else None
