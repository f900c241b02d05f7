"""Documents with another value at one place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each value within a document."""
    if path:
        yield path
    lists = range(len(value)) if isinstance(value, list) else ()
    for key in value if isinstance(value, Mapping) else lists:
        yield from places(value[key], (*path, key))


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """Return a document with another value at one place, or with none if that is ABSENT."""
    whole = inner = copy.deepcopy(value)
    for key in path[:-1]:
        inner = inner[key]
    if to is ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = to
    return whole
