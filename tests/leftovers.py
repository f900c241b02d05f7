"""What is left in memory without the search for cycles."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def without_search(*kinds: type) -> Iterator[Callable[[], bool]]:
    """Search for no cycles inside; yield what tells whether all new objects of `kinds` are gone."""

    def left() -> int:
        # By type: asking an object of torch for its class may warn.
        return sum(issubclass(type(one), kinds) for one in gc.get_objects())

    gc.collect()
    before = left()
    gc.disable()
    try:
        yield lambda: left() <= before
    finally:
        gc.enable()
