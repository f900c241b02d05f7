"""The options of findings."""

from __future__ import annotations

from dataclasses import dataclass, field

from dshealthd.core.options import Section
from dshealthd.findings.limits import Limits


@dataclass(frozen=True, kw_only=True)
class FindingsOptions(Section):
    """What counts as a finding."""

    limits: Limits = field(default_factory=Limits)
