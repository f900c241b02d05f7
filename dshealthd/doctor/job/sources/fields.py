"""A document of users, whose fields may have any shape."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from dshealthd.jobs.environment import natural

_NUMBER = re.compile(r"(\d{1,15}(?:\.\d{1,15})?(?:e-?\d{1,2})?)(m|k|[MGTPE]|[KMGTPE]i)?")
MAX_SIZE = 1 << 20
"""Maximum fields and characters together; a text of YAML may repeat a part any number of times."""
MAX_DEPTH = 64
"""Levels: a JobSet's pods have their deepest field at some twenty; each is a call, of which Python
allows 1,000.
"""


def quantity(text: str) -> float | None:
    """Return the number in a text, perhaps with a unit of Kubernetes; None if it is none."""
    if (match := _NUMBER.fullmatch(text)) is None:
        return None
    unit = match[2] or ""
    scale = (
        1e-3
        if unit == "m"
        else (1024 if "i" in unit else 1000) ** " KMGTPE".find(unit[:1].upper() or " ")
    )
    return float(match[1]) * scale


class ManifestFields:
    """A mapping of a document: what is absent in it, or of another shape, is empty."""

    def __init__(self, value: object = None) -> None:
        """Take a value, which is empty unless it is a mapping."""
        self.value: Mapping[str, Any] = value if isinstance(value, dict) else {}

    def __bool__(self) -> bool:
        return bool(self.value)

    def __contains__(self, key: str) -> bool:
        return key in self.value

    def get(self, key: str) -> Any:
        """Return a field as it is; None where there is none."""
        return self.value.get(key)

    def at(self, *keys: str) -> ManifestFields:
        """Return the mapping below these keys."""
        return ManifestFields(self.get(keys[0])).at(*keys[1:]) if keys else self

    def stated(self, path: str) -> Any:
        """Return what stands at a dotted path; None where there is nothing."""
        *above, key = path.split(".")
        return self.at(*above).get(key)

    def text(self, key: str) -> str:
        """Return a field as text."""
        found = self.get(key)
        return "" if found is None else str(found)

    def number(self, key: str, default: int) -> int:
        """Return a field as a whole number."""
        found = natural(self.text(key))
        return default if found is None else found

    def size(self, key: str) -> int | None:
        """Return a field as whole bytes, or another unit; None where it is no quantity."""
        found = quantity(self.text(key))
        return None if found is None else int(found)

    def listed(self, key: str) -> list[Any]:
        """Return the items of a list."""
        found = self.get(key)
        return found if isinstance(found, list) else []

    def each(self, key: str) -> list[ManifestFields]:
        """Return the mappings in a list."""
        return [ManifestFields(one) for one in self.listed(key) if isinstance(one, dict)]

    def texts(self) -> dict[str, str]:
        """Return all fields as text."""
        return {key: str(value) for key, value in self.value.items() if value is not None}

    def below(self) -> Iterator[tuple[str, ManifestFields]]:
        """Yield the mappings among the fields, and those in their lists, each with its key."""
        for key in self.value:
            yield from ((key, one) for one in (self.each(key) or [self.at(key)]) if one)


def plain(value: object) -> Any:
    """Return a document as JSON has it; ValueError if it is too deep or too large for it."""
    left = MAX_SIZE

    def copied(value: object, depth: int) -> Any:
        nonlocal left
        left -= 1 + (len(value) if isinstance(value, str | bytes) else 0)
        if left < 0 or depth > MAX_DEPTH:
            raise ValueError("it is too deep or too large")
        if isinstance(value, dict):
            return {str(key): copied(one, depth + 1) for key, one in value.items()}
        if isinstance(value, list):
            return [copied(one, depth + 1) for one in value]
        if value is None or isinstance(value, str | int):
            return value
        return value if isinstance(value, float) and math.isfinite(value) else str(value)

    return copied(value, 0)
