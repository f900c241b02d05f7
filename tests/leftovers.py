"""What is left in memory without the search for cycles."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

from dshealthd.training.model import instances


@contextlib.contextmanager
def without_search(*kinds: type) -> Iterator[Callable[[], bool]]:
    """Search for no cycles inside; yield what tells whether all new objects of `kinds` are gone."""

    def left() -> int:
        return sum(len(instances(kind)) for kind in kinds)

    gc.collect()
    before = left()
    gc.disable()
    try:
        yield lambda: left() <= before
    finally:
        gc.enable()
