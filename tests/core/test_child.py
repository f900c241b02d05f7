"""A child starts with what is its own, and what keeps it from starting is named and leaks
nothing.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dshealthd.core import child
from dshealthd.core.child import StartError

NOBODY = 65534
SLEEP = (sys.executable, "-S", "-c", "import time; time.sleep(100)")


def open_descriptors() -> set[str]:
    """Return the numbers of this process's descriptors."""
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Leave this process room for three more descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.open("/dev/null", os.O_RDONLY)
    held = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, open_descriptors())) + 4, hard))
    try:
        while True:
            try:
                held.append(os.dup(highest))
            except OSError:
                break
        for _ in range(3):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in (*held, highest):
            os.close(descriptor)


@pytest.mark.parametrize(("seconds", "gone"), [(0.6, True), (4.0, False)])
async def test_when_a_child_counts_as_unkillable(
    monkeypatch: pytest.MonkeyPatch, seconds: float, *, gone: bool
) -> None:
    """One that SIGKILL ends after half a second does not; after two it is left behind."""
    started, kill = child.spawn("a sleeper", SLEEP), child.Child.kill
    ending = asyncio.get_running_loop().call_later
    monkeypatch.setattr(child.Child, "kill", lambda self: ending(seconds, kill, self))
    assert await started.killed() is gone
    kill(started)
    assert await started.ends(60.0)


async def test_a_child_starts_is_killed_and_tells_how() -> None:
    """A child that is killed has a text for its end; nothing of it stays open."""
    before = open_descriptors()
    started = child.spawn("a sleeper", SLEEP)
    assert started.code is None
    assert await started.killed(60.0)
    assert child.how_ended(started.code or 0) == "was ended by SIGKILL"
    assert open_descriptors() == before


async def test_a_child_gets_nothing_that_is_for_the_agent_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Credentials, notify socket, watchdog and inherited sockets of systemd are left out."""
    for name in child.PRIVATE:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "1")
    read_end, write_end = os.pipe()
    started = child.spawn(
        "a printer", [sys.executable, "-S", "-c", "import os; print(*os.environ)"], output=write_end
    )
    os.close(write_end)
    assert await started.ends(60.0)
    with open(read_end, encoding="utf-8") as stream:
        names = stream.read().split()
    assert "KEPT" in names
    assert not child.PRIVATE & set(names)


async def test_a_child_has_half_a_gibibyte() -> None:
    """Of private memory, ten times what the largest worker uses; a lower limit stays."""
    started = child.spawn("a sleeper", SLEEP)
    assert resource.prlimit(started.pid, resource.RLIMIT_DATA) == (1 << 29, 1 << 29)
    for memory in (1 << 28, 1 << 29):
        child._bound(started.pid, memory)
        assert resource.prlimit(started.pid, resource.RLIMIT_DATA) == (1 << 28, 1 << 28)
    assert await started.killed(60.0)


@pytest.mark.usefixtures("few_descriptors")
async def test_no_descriptors_for_a_child_is_named() -> None:
    """A process out of descriptors says so, and has as many left as before."""
    before = os.stat("/proc/self/fd").st_size
    with pytest.raises(StartError, match=r"a sleeper cannot be started: .*RLIMIT_NOFILE is \d+"):
        child.spawn("a sleeper", SLEEP)
    assert os.stat("/proc/self/fd").st_size == before


async def test_an_interpreter_of_another_user_is_named(tmp_path: Path) -> None:
    """A user who may not enter the interpreter's directory gets its path and why."""
    locked = tmp_path / "locked"
    locked.mkdir()
    interpreter = locked / "python"
    interpreter.symlink_to(sys.executable)
    locked.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(StartError) as raised:
            child.spawn("worker storage", [str(interpreter), "-c", ""])
    finally:
        os.seteuid(user)
        locked.chmod(0o700)
    assert str(raised.value).startswith("worker storage cannot be started: ")
    assert str(raised.value).endswith(f"Permission denied: '{interpreter}'")


async def test_a_channel_is_closed_where_its_child_does_not_start() -> None:
    """Both ends of the channel are gone after a failed start."""
    before = open_descriptors()
    with (
        pytest.raises(StartError, match="No such file or directory: '/nonexistent'"),
        child.channel("a child") as (_ours, theirs),
    ):
        child.spawn("a child", ["/nonexistent"], descriptors=[theirs.fileno()])
    assert open_descriptors() == before


async def test_a_child_that_cannot_be_watched_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that started and got no pidfd is killed, and reaped at a later start."""
    pids = []

    def full(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pidfd_open", full)
        with pytest.raises(StartError, match=r"the node is out of file descriptors"):
            child.spawn("a sleeper", SLEEP)
    async with asyncio.timeout(60.0):
        while os.path.exists(f"/proc/{pids[0]}"):
            with pytest.raises(StartError):
                child.spawn("a child", ["/nonexistent"])
            await asyncio.sleep(0.01)


async def test_a_long_line_of_a_child_is_cut() -> None:
    """At the length up to which writes to a pipe are not interleaved (PIPE_BUF)."""
    lines: list[str] = []
    pipe = child.ErrorPipe(lines.append)
    for piece in (b"x" * 4096, b"\n" + b"y" * 4097, b"z\nrest"):
        os.write(pipe.write_end, piece)
        pipe._read()
    pipe.close()
    assert lines == ["x" * 4096, "y" * 4096, "y", "z", "rest"]


@pytest.mark.parametrize(("number", "text"), [
    (errno.EAGAIN, "pids.max"),
    (errno.EMFILE, "RLIMIT_NOFILE"),
    (errno.ENFILE, "fs.file-max"),
    (errno.ENOMEM, "out of memory"),
    (errno.ENOEXEC, "Exec format error"),
])  # fmt: skip
def test_causes_are_in_an_operators_words(number: int, text: str) -> None:
    """The text names the limit to look at."""
    assert text in child.cause(OSError(number, os.strerror(number)))


def test_a_child_outlives_its_loop() -> None:
    """One that ends after its loop has closed is reaped at the next start, and not forgotten."""

    async def start() -> int:
        return child.spawn("sleeper", SLEEP).pid

    async def start_another() -> None:
        assert await child.spawn("sleeper", SLEEP).killed(60)

    pid = asyncio.run(start())
    gc.collect()  # whoever is dropped without being reaped warns, which fails the test
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    asyncio.run(start_another())
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


@pytest.mark.parametrize("options", [("-P",), ("-I",), ("-I", "-B")])
def test_a_module_in_a_child_is_as_isolated_as_its_parent(options: tuple[str, ...]) -> None:
    """Options by which a launcher keeps others' modules away reach the workers."""
    program = "from dshealthd.core import child; print(*child.python('m')[1:])"
    environment = {**os.environ}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, *options, "-c", program]
    printed = subprocess.check_output(command, env=environment, text=True)
    assert printed.split() == [*options, "-m", "m"]
