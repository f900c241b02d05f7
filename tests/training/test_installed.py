"""What stands in a class of the program for one of its objects, and what is left of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dshealthd.training.installed import Installed, _Place


class Engine:
    """An object of the program."""

    def step(self) -> int:
        """Return one."""
        return 1


def times(factor: int) -> Callable[[Callable[[Any], int]], Callable[[Any], int]]:
    """Have a method return so many times as much."""
    return lambda call: lambda engine: factor * call(engine)


def test_objects_of_one_class() -> None:
    """Each finds its own method changed. What stands there for one that is gone goes with the next
    that is followed, and the rest as it came.
    """
    own, installed = vars(Engine)["step"], Installed()
    one, other, none = Engine(), Engine(), Engine()
    installed.follow(one, "step", times(2))
    installed.follow(other, "step", times(3))
    assert (one.step(), other.step(), none.step()) == (2, 3, 1)
    del other
    last = Engine()
    installed.follow(last, "step", times(5))
    assert (one.step(), last.step(), none.step()) == (2, 5, 1)
    place = vars(Engine)["step"]
    assert isinstance(place, _Place)
    assert isinstance(place.own, _Place)
    assert place.own.own is own
    installed.undo()
    assert vars(Engine)["step"] is own
