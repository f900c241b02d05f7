"""Symptoms: what can go wrong with a training cluster, one file each, with alerts and runbook.

Every file `<slug>.md` in this folder is a symptom; symptoms are registered nowhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources

from dshealthd.symptoms.entry import Symptom, parse

SUFFIX = ".md"


@functools.cache
def all_symptoms() -> Mapping[str, Symptom]:
    """Return every symptom by slug, sorted by slug.

    Raise EntryError for the first bad file.
    """
    files = (file for file in resources.files(__name__).iterdir() if file.name.endswith(SUFFIX))
    entries = (
        parse(file.name.removesuffix(SUFFIX), file.read_text(encoding="utf-8")) for file in files
    )
    return {symptom.slug: symptom for symptom in sorted(entries, key=lambda symptom: symptom.slug)}
