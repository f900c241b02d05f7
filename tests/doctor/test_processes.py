"""Functions in processes of their own: answers, errors, deadlines, and processes that cannot be
killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dshealthd.doctor.check import Check, Result
from dshealthd.doctor.examination import examine
from dshealthd.doctor.processes import Ended, Pool
from dshealthd.findings.finding import State
from tests import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def run(deadline: float = 60.0, **functions: Callable[[], object]) -> dict[str, Ended]:
    """Return how each function ended."""
    pool = Pool()
    for name, function in functions.items():
        pool.start(name, function, deadline)
    found = {ended.name: ended for ended in pool.ended()}
    pool.close()
    return found


def test_answers_and_errors_come_back() -> None:
    """What is returned arrives as JSON; an exception or an end without an answer is a reason."""
    found = run(
        answer=lambda: {"a": [1, None]},
        large=lambda: "x" * 3_000_000,
        error=lambda: int("x"),
        exit=lambda: os._exit(7),
        crash=lambda: os.kill(os.getpid(), signal.SIGKILL),
        no_json=lambda: {1, 2},
    )
    assert found["answer"].value == {"a": [1, None]}
    assert len(found["large"].value) == 3_000_000
    assert "ValueError: invalid literal" in found["error"].problem
    for name in ("exit", "crash", "no_json"):
        assert "ended without an answer" in found[name].problem
        assert not found[name].hung


def test_what_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    """At its deadline a function's process and its children are killed; others are not delayed."""
    children = tmp_path / "child"

    def hang() -> None:
        with subprocess.Popen(["sleep", "300"]) as child:
            children.write_text(str(child.pid))

    started = time.monotonic()
    found = run(3.0, hang=hang, quick=lambda: 1)
    assert time.monotonic() - started < 60
    assert found["quick"].value == 1
    assert found["hang"].hung
    assert "no answer within 3 s" in found["hang"].problem
    end = time.monotonic() + 60
    while Path(f"/proc/{children.read_text()}/exe").exists():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_more_than_run_at_once_wait_their_turn() -> None:
    """A deadline counts from a function's own start."""
    pool = Pool(most=2)
    for number in range(6):
        pool.start(str(number), lambda: time.sleep(0.2), 60.0)
    ended = list(pool.ended())
    pool.close()
    assert not any(one.problem for one in ended)
    assert len(ended) == 6


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[frozen.Mount]:
    """Mount a file system that can be frozen."""
    with frozen.mounted(tmp_path) as found:
        yield found


def test_a_process_that_cannot_be_killed_is_left_and_named(mount: frozen.Mount) -> None:
    """A write to a frozen file system ignores SIGKILL: the pool goes on and says so."""

    def write() -> None:
        descriptor = os.open(mount.directory / "file", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"x")
        os.fsync(descriptor)

    mount.freeze()
    try:
        found = run(3.0, stuck=write, quick=lambda: 1)
    finally:
        mount.thaw()
    assert found["quick"].value == 1
    assert "cannot be killed" in found["stuck"].problem
    os.waitpid(-1, 0)  # thawed, it takes the signal


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
    results = {one.name: one.results[0] for one in found}
    assert [one.name for one in found] == ["silent", "hang", "broken", "well"]
    assert results["silent"].outcome is State.UNKNOWN
    assert "check hang hung: no answer within 0.5 s" in results["hang"].text
    assert "other half cannot be read" in results["broken"].text
    assert results["hang"].remedy == "sudo dshealthd doctor --only hang"
    assert all(one.remedy for one in results.values() if one.outcome is not State.OK)
    assert results["well"].outcome is State.OK
    assert sys.stdout is not None  # the children's changes are their own
    assert seen
