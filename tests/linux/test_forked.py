"""Functions in processes: answers, files, errors, deadlines, those that cannot be killed."""

from __future__ import annotations

import errno
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from dshealthd.linux import forked
from dshealthd.linux.forked import Emit, Ended, Missing, Pool
from tests import frozen
from tests.evidence.steps import DEADLINE, clock_ahead, take
from tests.processes import runs
from tests.stopwatch import Stopwatch
from tests.waiting import until


def run(deadline: float = 60.0, **functions: Callable[[Emit], object]) -> dict[str, Ended]:
    """Return how each function ended."""
    pool = Pool()
    for name, function in functions.items():
        pool.start(name, function, deadline)
    found = {ended.name: ended for ended in pool.ended()}
    pool.close()
    return found


def raise_missing(_emit: Emit) -> None:
    """Say why there is nothing."""
    raise Missing("no such thing")


def head(name: int, answer: int) -> bytes:
    """Return the lengths that are written before a name and an answer."""
    return name.to_bytes(4, "big") + answer.to_bytes(4, "big")


def framed(name: bytes, answer: bytes) -> bytes:
    """Return what a function's process writes, head first."""
    return head(len(name), len(answer)) + name + answer


@pytest.mark.parametrize(("written", "seconds", "problem"), [
    *((framed(name, answer), 60.0, "its output is malformed")
      for name in (b"", b"\xff") for answer in (b"no JSON", b"5", b"[1, 2, 3]")),
    (head(1000, 101), 60.0, "its output exceeds its limit"),
    (head(5 << 20, 0), 60.0, "its output exceeds its limit"),
    (head(100_000, 0), 2.0, "no answer within 2 s"),
])  # fmt: skip
def test_malformed_output_costs_its_own_function(
    written: bytes, seconds: float, problem: str
) -> None:
    """What a function's process writes in place of an answer does not end the others. What it
    announces is bounded before it comes: it takes no memory here.
    """

    def garbage(_emit: Emit) -> None:
        descriptor = max(int(one) for one in os.listdir("/proc/self/fd") if is_open(int(one)))
        os.write(descriptor, written)
        time.sleep(60)

    pool = Pool()
    pool.start("garbage", garbage, seconds, max_bytes=100)
    pool.start("well", lambda _emit: 1, 60.0)
    found = {ended.name: ended for ended in pool.ended()}
    pool.close()
    assert found["garbage"].problem.startswith(problem)
    assert found["well"].value == 1


def is_open(descriptor: int) -> bool:
    """Return whether a descriptor is open: the one that lists the directory no longer is."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_answers_and_errors_come_back() -> None:
    """What is returned arrives as JSON; an exception or an end without an answer is a reason."""
    found = run(
        answer=lambda _emit: {"a": [1, None], "b": "ü"},
        large=lambda _emit: "x" * 3_000_000,
        missing=raise_missing,
        denied=lambda _emit: os.stat("/proc/nowhere"),
        error=lambda _emit: int("x"),
        defect=lambda _emit: dict[str, int]()["oops"],
        no_json=lambda _emit: {1, 2},
        exit=lambda _emit: os._exit(7),
        crash=lambda _emit: os.kill(os.getpid(), signal.SIGKILL),
        huge=lambda _emit: "x" * 5_000_000,
    )
    assert found["answer"].value == {"a": [1, None], "b": "ü"}
    assert len(found["large"].value) == 3_000_000
    problems = {name: one.problem for name, one in found.items()}
    assert problems["answer"] == problems["large"] == ""
    assert problems["missing"] == "no such thing"
    assert problems["denied"] == "[Errno 2] No such file or directory: '/proc/nowhere'"
    assert problems["error"].startswith("invalid literal")
    assert problems["defect"].startswith("KeyError: 'oops' (test_forked.py:")
    assert "not JSON serializable" in problems["no_json"]
    assert problems["exit"] == "its process exited with status 7 without an answer"
    assert problems["crash"] == "its process was ended by SIGKILL without an answer"
    assert problems["huge"] == "its output exceeds its limit"
    assert not any(one.hung for one in found.values())


def test_files_are_kept_up_to_their_limit() -> None:
    """Bytes go into files as they come; what would go beyond the limit ends the function."""

    def function(emit: Emit) -> int:
        emit("a.txt", b"x" * 600)
        emit("b.txt", b"2")
        emit("a.txt", b"y" * 600)
        return 7

    ended, files = take(function)
    assert (ended.value, ended.problem) == (7, "")
    assert files == {"a.txt": b"x" * 600 + b"y" * 600, "b.txt": b"2"}
    ended, files = take(function, max_bytes=1000)
    assert ended.problem == "its output exceeds its limit"
    assert files == {"a.txt": b"x" * 600, "b.txt": b"2"}


def test_what_hangs_is_killed_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """At its deadline a process and its children are killed; what it emitted before is kept."""
    pass_deadline = clock_ahead(monkeypatch)
    kept: list[int] = []
    watches: list[Stopwatch] = []

    def hang(emit: Emit) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        process = subprocess.Popen(["sleep", "600"])
        emit("pid", str(process.pid).encode())
        time.sleep(600)

    def keep(_name: str, data: bytes) -> None:
        kept.append(int(data))
        watches.append(Stopwatch())
        pass_deadline()

    ended = forked.run("hang", hang, DEADLINE, 100, keep)
    assert watches[0].seconds() < 2.5
    assert ended.hung
    assert ended.problem.startswith("no answer within 60 s")
    until(lambda: not runs(kept[0]))  # nobody here may reap it


def test_what_has_answered_and_is_slow_to_end_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and its answer counts."""
    monkeypatch.setattr(os, "_exit", lambda _status: time.sleep(60))
    watch = Stopwatch()
    ended, _ = take(lambda _emit: 7)
    assert (ended.value, ended.problem) == (7, "")
    assert watch.seconds() < 30


def test_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is called back five times a second, however far the deadline is."""
    waits = list[float]()

    class Watched(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            waits.append(math.inf if timeout is None else timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Watched)
    pool, ticks, began = Pool(), list[float](), time.monotonic()
    pool.start("sleeps", lambda _emit: time.sleep(1.0), 60.0)
    assert len([*pool.ended(lambda: ticks.append(time.monotonic()))]) == 1
    pool.close()
    assert max(waits) <= 0.2
    assert 1 <= len(ticks) <= (time.monotonic() - began) * 5 + 3


def test_out_of_processes_they_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup that holds no more processes lets fewer run; without any it is an error."""
    pool, fork, most = Pool(), os.fork, 2

    def limited() -> int:
        if len(pool.names) >= most:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", limited)
    for number in range(5):
        pool.start(str(number), lambda _emit: 1, 60.0)
    assert [ended.value for ended in pool.ended()] == [1] * 5
    most = 0
    with pytest.raises(BlockingIOError):
        pool.start("one too many", lambda _emit: 1, 60.0)
    pool.close()


def test_more_than_run_at_once_wait_their_turn() -> None:
    """A deadline counts from a function's own start, and no more run at a time than asked for."""

    def function(_emit: Emit) -> tuple[float, float]:
        begun = time.monotonic()
        time.sleep(0.5)
        return begun, time.monotonic()

    pool = Pool(most=2)
    for number in range(6):
        pool.start(str(number), function, 60.0)
    ended = list(pool.ended())
    pool.close()
    spans = [one.value for one in ended]
    assert len(spans) == 6
    assert max(sum(begun <= at < end for begun, end in spans) for at, _ in spans) <= 2
    pool = Pool()
    for number in range(65):
        pool.start(str(number), lambda _emit: time.sleep(60), 60.0)
    assert len(pool.names) == 64
    pool.close()


def test_processes_that_cannot_be_killed_are_left_and_named(
    mount: frozen.Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes to a frozen file system ignore SIGKILL: the pool says so, all in one wait."""
    pass_deadline = clock_ahead(monkeypatch)

    def write(_emit: Emit) -> None:
        descriptor = os.open(mount.directory / "file", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"x")
        os.fsync(descriptor)

    stuck = [f"stuck {number}" for number in range(4)]
    pool = Pool()
    mount.freeze()
    try:
        for name in stuck:
            pool.start(name, write, DEADLINE)
        for one in pool._running:
            frozen.wait_until_it_hangs(one.pid)
        pool.start("quick", lambda _emit: 1, DEADLINE)
        found = {"quick": next(pool.ended())}
        pass_deadline()
        watch = Stopwatch()
        found |= {ended.name: ended for ended in pool.ended()}
        pool.close()
    finally:
        mount.thaw()
    assert watch.seconds() < 5.5
    assert (found["quick"].value, found["quick"].left) == (1, 0)
    for name in stuck:
        assert "cannot be killed" in found[name].problem
        assert found[name].left
        os.waitpid(found[name].left, 0)  # thawed, it takes the signal
    assert not any(forked.remains(found[name].left) for name in stuck)
