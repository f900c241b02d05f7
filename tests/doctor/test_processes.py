"""Checks in processes of their own: nothing is ok that was not looked at."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from dshealthd.doctor.check import Check, Result
from dshealthd.doctor.examination import examine
from dshealthd.findings.finding import State


def check(name: str, run: Callable[[Any], Any], deadline: float = 60.0) -> Check[None]:
    """Return a check."""
    return Check("a-slug", name, "a title", run, deadline)


def test_nothing_is_ok_that_was_not_looked_at() -> None:
    """A check that raises, says nothing or hangs is unknown and named; others go on."""

    def silent(_context: None) -> Iterator[Result]:
        yield from ()

    def hang(_context: None) -> Iterator[Result]:
        time.sleep(300)
        yield Result(State.OK, "never")

    def broken(_context: None) -> Iterator[Result]:
        yield Result(State.OK, "half of it is well")
        message = "the other half cannot be read"
        raise OSError(message)

    checks = [
        check("silent", silent),
        check("hang", hang, 0.5),
        check("broken", broken),
        check("well", lambda _context: [Result(State.OK, "well")]),
    ]
    seen = []
    found, _ = examine(
        [(one, None) for one in checks], (), dict, dict, lambda *now: seen.append(now)
    )
    results = {one.check: one.results[0] for one in found}
    assert [one.check for one in found] == ["silent", "hang", "broken", "well"]
    assert results["silent"].outcome is State.UNKNOWN
    assert "check hang hung: no answer within 0.5 s" in results["hang"].text
    assert "other half cannot be read" in results["broken"].text
    assert results["hang"].remedy == "sudo dshealthd doctor --only hang"
    assert all(one.remedy for one in results.values() if one.outcome is not State.OK)
    assert results["well"].outcome is State.OK
    assert sys.stdout is not None  # the children's changes are their own
    assert seen
