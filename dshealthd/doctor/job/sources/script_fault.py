"""Something that a script states in vain."""

from __future__ import annotations

from typing import NamedTuple


class ScriptFault(NamedTuple):
    """Something that a script states in vain."""

    text: str
    """What people read behind the name of the script."""
    component: str
    at: str = ""
    """What the line has in which it stands."""
    is_critical: bool = True
