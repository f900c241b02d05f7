"""Stacks of real processes, by py-spy and by the kernel, whatever state they are in."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core.host import Host
from dshealthd.evidence import process as process_evidence
from dshealthd.evidence import stacks
from dshealthd.linux.forked import Ended
from dshealthd.linux.privileges import CAP_SYS_PTRACE
from tests.command_line import shell_script
from tests.evidence.set_user_id import MIXED_RIGHTS, set_user_id_program
from tests.evidence.steps import take
from tests.processes import state
from tests.waiting import until

SCRIPT = """
import threading, time
def load_batch(secret):
    print("ready", flush=True)
    time.sleep(600)
def main():
    threading.Thread(target=time.sleep, args=(600,), name="loader", daemon=True).start()
    load_batch("hunter2")
main()
"""
RANK_USER = 4321


@contextlib.contextmanager
def rank(tmp_path: Path, *, user: int | None = None) -> Iterator[int]:
    """Run a process that waits in a function of its own, and give its pid."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, str(script), "--password=swordfish"]
    if user is not None:
        command = ["/usr/bin/python3", "-I", "-S", "-c", SCRIPT, "--password=swordfish"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, cwd="/", user=user, group=user, env={"TOKEN": "opensesame"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until(lambda: state(process.pid) == "S")
        try:
            yield process.pid
        finally:
            process.kill()


def spied(pid: int, program: str | None = None) -> tuple[Ended, dict[str, bytes]]:
    """Have py-spy look."""
    program = program or stacks.find_py_spy()
    assert program is not None, "py-spy is among the packages of the tests"
    return take(functools.partial(stacks.collect, host=Host(), pid=pid, rank=3, program=program))


def viewed(pid: int) -> tuple[Ended, dict[str, bytes]]:
    """Take the kernel's view."""
    return take(functools.partial(process_evidence.collect, host=Host(), pid=pid, rank=3))


def test_py_spy_tells_where_the_training_waits(tmp_path: Path) -> None:
    """The training's own line and every thread are written, neither arguments nor variables."""
    with rank(tmp_path) as pid:
        step, files = spied(pid)
    assert step.problem == ""
    assert re.search(r"train\.py:[45] load_batch$", step.value["at"])
    text = files[f"rank-3-{pid}.stacks.txt"].decode()
    assert "load_batch" in text
    assert "(loader)" in text or "'loader'" in text
    assert not any(secret in text for secret in ("hunter2", "swordfish", "opensesame"))


def test_place_is_the_training_s_own_line() -> None:
    """The innermost frame that is neither torch's nor ours; of libraries alone the innermost."""
    own = ("main", "/home/user/train.py", 12)
    libraries = [
        ("encode", "/home/user/dshealthd/dshealthd/training/message.py", 174),
        ("step", "/home/user/DeepSpeed/deepspeed/runtime/engine.py", 7),
        ("send", "/opt/venv/lib/python3.11/socket.py", 3),
    ]
    assert stacks.place([*libraries, own]) == "/home/user/train.py:12 main"
    assert stacks.place(libraries[1:]) == "/home/user/DeepSpeed/deepspeed/runtime/engine.py:7 step"


def test_a_stopped_process_has_stacks_and_stays_stopped(tmp_path: Path) -> None:
    """To look at a process neither needs it to run nor makes it."""
    with rank(tmp_path) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        step, _ = spied(pid)
        view, files = viewed(pid)
    assert re.search(r"train\.py:[45] load_batch$", step.value["at"])
    assert view.value["state"] == "stopped"
    assert view.value["cpu"] == 0
    assert not any(
        secret in files[f"rank-3-{pid}.kernel.txt"]
        for secret in (b"hunter2", b"swordfish", b"opensesame")
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a process of another user")
def test_another_user_s_process_is_looked_at_as_that_user(tmp_path: Path) -> None:
    """Py-spy gets the rank's user and no more, wherever it is installed."""
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    spy = hidden / "py-spy"
    found = stacks.find_py_spy()
    assert found is not None
    shutil.copy(found, spy)
    spy.chmod(0o755)
    with rank(tmp_path, user=RANK_USER) as pid:
        step, _ = spied(pid, str(spy))
    assert step.problem == ""
    assert step.value["at"].endswith("load_batch")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes a process of another user")
def test_the_one_who_looks_has_the_rank_s_rights(tmp_path: Path) -> None:
    """What runs in py-spy's place is the rank's user, with one capability and no way to more."""
    spy = tmp_path / "py-spy"
    for name, value in (
        ("Uid", "\t".join(["4321"] * 4)),
        ("CapEff", f"{1 << CAP_SYS_PTRACE:016x}"),
        ("NoNewPrivs", "1"),
    ):
        shell_script(spy, f"grep ^{name}: /proc/self/status >&2\nexit 1")
        with rank(tmp_path, user=RANK_USER) as pid:
            step, _ = spied(pid, str(spy))
        assert step.problem == f"py-spy: {name}:\t{value}"


@pytest.mark.skipif(os.geteuid() != 0, reason="runs a set-user-id program")
def test_a_process_with_root_s_rights_is_not_looked_at(public_path: Path) -> None:
    """A rank that executes a set-user-id program is refused before py-spy runs."""
    ran = public_path / "ran"
    spy = shell_script(public_path / "py-spy", f"id -u >>{ran}\nexit 1")
    with set_user_id_program(public_path, RANK_USER) as pid:
        step, files = spied(pid, str(spy))
    assert step.problem == f"[Errno 1] {MIXED_RIGHTS}"
    assert (step.value, files, ran.exists()) == (None, {}, False)


def test_without_py_spy_the_kernel_s_view_is_left(tmp_path: Path) -> None:
    """That py-spy is not installed is said; states and waiting places of the threads are there."""
    with rank(tmp_path) as pid:
        step, _ = take(
            functools.partial(stacks.collect, host=Host(), pid=pid, rank=3, program=None)
        )
        view, files = viewed(pid)
    assert step.problem == "py-spy is not installed"
    assert view.value["state"] == "sleeping"
    text = files[f"rank-3-{pid}.kernel.txt"].decode()
    assert f"thread {pid} " in text
    assert text.count("\nthread ") == 2
    assert "CPU time since the first look: 0.00 of a core" in text


def test_a_process_that_is_gone_is_said_to_be() -> None:
    """Between its naming and the look a rank may end."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    step, files = viewed(process.pid)
    assert (step.problem, files) == (f"process {process.pid} is gone", {})
    assert "No such file" in spied(process.pid)[0].problem


def test_what_is_no_python_is_said_to_be_none() -> None:
    """Py-spy's own words come with the reason."""
    with subprocess.Popen(["sleep", "60"]) as process:
        step, files = spied(process.pid)
        process.kill()
    assert step.problem.startswith("py-spy: ")
    assert files == {}


@pytest.mark.parametrize("output", [
    b"",
    b"[]",
    b"{}",
    b"[1]",
    b'[{"frames": 1}]',
    b"[" * 100_000,
    json.dumps([{"frames": [{}]}]).encode(),
])  # fmt: skip
def test_what_py_spy_never_prints_is_an_error(output: bytes) -> None:
    """Another version's output, or garbage, is one kind of error."""
    with pytest.raises(ValueError):  # noqa: PT011 - of json itself, or ours
        stacks.parse(output)


@pytest.mark.parametrize(("failures", "problem"), [(2, ""), (3, "py-spy: half a frame")])
def test_py_spy_is_tried_again(tmp_path: Path, failures: int, problem: str) -> None:
    """A process that is read in the middle of a change is read another two times."""
    tried = tmp_path / "tried"
    frames = '[{"os_thread_id": 1, "frames": [{"name": "f", "filename": "train.py"}]}]'
    program = shell_script(
        tmp_path / "py-spy",
        f"echo >>{tried}\n[ $(wc -l <{tried}) -gt {failures} ] && exec echo '{frames}'\n"
        "echo half a frame >&2\nexit 1",
    )
    with rank(tmp_path) as pid:
        step, _ = spied(pid, str(program))
    assert (step.problem, step.value is None) == (problem, bool(problem))


@pytest.mark.parametrize(
    "numbers", [(None, None), (7, 1)], ids=["before Python 3.11", "in a pid namespace"]
)
def test_the_main_thread_is_the_one_told_of(
    tmp_path: Path, numbers: tuple[int | None, int | None]
) -> None:
    """Its id on the node is not always known to py-spy; it lists the newest thread first."""
    threads = [
        {"os_thread_id": number, "thread_name": name, "frames": [{"name": name, "filename": "f"}]}
        for number, name in zip(numbers, ("loader", "MainThread"), strict=True)
    ]
    program = shell_script(tmp_path / "py-spy", f"echo '{json.dumps(threads)}'")
    with rank(tmp_path) as pid:
        step, _ = spied(pid, str(program))
    assert step.value["at"] == "f:0 MainThread"


@pytest.mark.parametrize(("others", "shown"), [(127, 128), (128, 128)])
def test_so_many_threads_are_shown(tmp_path: Path, others: int, shown: int) -> None:
    """Of a process with more threads the main one is among those that are."""
    for thread in (200, *range(1, 1 + others)):
        (tmp_path / f"200/task/{thread}").mkdir(parents=True)
    threads = process_evidence._threads(Host(procfs=tmp_path), 200)
    assert (threads[0], len({*threads}), len(threads)) == ("200", shown, shown)


@pytest.mark.parametrize(
    ("size", "problem"), [(8 << 20, ""), ((8 << 20) + 1, "py-spy printed more than 8 MiB")]
)
def test_what_py_spy_prints_is_bounded(tmp_path: Path, size: int, problem: str) -> None:
    """Eight MiB hold the stacks of thousands of threads."""
    program = shell_script(tmp_path / "py-spy", f"head -c {size} /dev/zero")
    descriptor = os.open(program, os.O_RDONLY)
    output, said = stacks._run(descriptor, 1)
    os.close(descriptor)
    assert (len(output), said) == (0 if problem else size, problem)
