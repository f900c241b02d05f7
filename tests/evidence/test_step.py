"""Steps in processes of their own.

What they find, what they leave when they hang, and what they cannot do to others.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dshealthd.evidence.step import Missing, RunningStep, run
from tests.evidence.steps import take
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    import pytest

    from dshealthd.evidence.step import Emit


def test_a_step_gives_files_and_an_answer() -> None:
    """Bytes go into files as they come, and the answer is a JSON document."""

    def function(emit: Emit) -> Any:
        emit("a.txt", b"1")
        emit("b.txt", b"2")
        emit("a.txt", b"3")
        return {"user": os.getuid(), "names": ["ü"]}

    step, files = take(function)
    assert (step.answer, step.problem) == ({"user": os.getuid(), "names": ["ü"]}, "")
    assert files == {"a.txt": b"13", "b.txt": b"2"}


def test_what_a_step_that_hangs_gave_before_is_kept() -> None:
    """A step is ended at its deadline, and what it emitted until then stays."""

    def function(emit: Emit) -> None:
        emit("a.txt", b"before")
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
        time.sleep(60)

    watch = Stopwatch()
    step, files = take(function, seconds=3.0)
    assert watch.seconds() < 5.5
    assert (step.answer, step.problem) == (None, "not finished within 3 s")
    assert files == {"a.txt": b"before"}


def test_a_step_that_has_answered_and_is_slow_to_end_has_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed, and its answer is not said to come from a process that cannot be killed."""

    def linger(_status: int) -> None:
        os.closerange(3, 1 << 30)
        time.sleep(60)

    monkeypatch.setattr(os, "_exit", linger)
    step, _ = take(lambda _emit: 7, seconds=60.0)
    assert (step.answer, step.problem) == (7, "")


def test_what_a_step_started_ends_with_it() -> None:
    """A program that a step runs, such as py-spy, is not left behind."""

    def function(emit: Emit) -> None:
        process = subprocess.Popen(["sleep", "60"])
        emit("pid", str(process.pid).encode())
        process.wait()

    _, files = take(function, seconds=4.0)
    stat = Path(f"/proc/{int(files['pid'])}/stat")
    end = time.monotonic() + 60
    while (
        stat.exists() and stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    ):  # nobody here may reap it
        assert time.monotonic() < end
        time.sleep(0.02)


def test_why_something_is_missing_is_told() -> None:
    """What cannot be had, an error of the system and a crash each end one step with a reason."""

    def missing(_emit: Emit) -> None:
        message = "no such thing"
        raise Missing(message)

    def denied(_emit: Emit) -> None:
        os.stat("/proc/nowhere")

    def crash(_emit: Emit) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    assert take(missing)[0].problem == "no such thing"
    assert take(denied)[0].problem == "[Errno 2] No such file or directory: '/proc/nowhere'"
    assert take(crash)[0].problem == "ended by SIGKILL"


def test_a_defect_in_a_step_is_told_and_ends_only_it(capfd: Any) -> None:
    """An error that nobody expected is printed with its traceback, and the step has no answer."""

    def defect(_emit: Emit) -> None:
        raise KeyError("oops")  # noqa: EM101 - what a defect looks like

    assert take(defect)[0].problem == "ended with status 1"
    assert "KeyError: 'oops'" in capfd.readouterr().err


def test_more_than_is_allowed_is_not_kept() -> None:
    """What would go beyond the room of a step ends it; what came before stays."""

    def function(emit: Emit) -> None:
        emit("a.txt", b"x" * 600)
        emit("a.txt", b"y" * 600)

    step, files = take(function, max_bytes=1000)
    assert step.problem == "its output exceeds its limit"
    assert files == {"a.txt": b"x" * 600}


def test_steps_run_side_by_side_and_in_turn() -> None:
    """As many as asked for run at a time; all come back, in the order in which they were begun."""

    def function(_emit: Emit) -> tuple[float, float]:
        begun = time.monotonic()
        time.sleep(0.5)
        return begun, time.monotonic()

    begun = [functools.partial(RunningStep, str(number), function, 20.0) for number in range(6)]
    steps = run(begun, 3)
    assert [step.name for step in steps] == [str(number) for number in range(6)]
    spans = [step.answer for step in steps]
    assert max(sum(begun <= at < ended for begun, ended in spans) for at, _ in spans) in {2, 3}
