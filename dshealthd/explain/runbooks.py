"""Title and first step of a slug, from its runbook or from its pattern file."""

from __future__ import annotations

import functools
import re
from importlib import resources

from dshealthd.explain import patterns
from dshealthd.symptoms import entry

_FIRST_ITEM = re.compile(r"^(?:1\.|-) (.+?)(?=^(?:\d+\.|-) |\Z)", re.DOTALL | re.MULTILINE)
_SPACE = re.compile(r"\s+")
MAX_STEP = 400


@functools.cache
def remedy(slug: str) -> tuple[str, str, str]:
    """Return title, first step and runbook path of a slug; the path is empty without a runbook."""
    file = resources.files("dshealthd.symptoms").joinpath(f"{slug}.md")
    if not file.is_file():
        title, step = patterns.load().titles.get(slug, (slug, ""))
        return title, step, ""
    symptom = entry.parse(slug, file.read_text(encoding="utf-8"))
    match = _FIRST_ITEM.search(symptom.sections["Remedy"])
    step = _SPACE.sub(" ", match[1]).strip() if match else ""
    if len(step) > MAX_STEP:
        step = step[:MAX_STEP].rsplit(" ", 1)[0] + " …"
    return symptom.title, step, f"/runbooks/{slug}"
