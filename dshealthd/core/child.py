"""Child processes: how they start, what they inherit, and how they end.

A child may fail to start at any moment: the pids limit of the agent's cgroup is reached, the
process or the node is out of descriptors, memory is short, `/dev/null` is gone. That is an ordinary
outcome, `StartError`, which names the cause; it leaks nothing and never ends the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from dshealthd.core.text import printable
from dshealthd.core.timing import happens

PRIVATE = frozenset(
    {
        "CREDENTIALS_DIRECTORY",
        "NOTIFY_SOCKET",
        "WATCHDOG_USEC",
        "WATCHDOG_PID",
        "LISTEN_FDS",
        "LISTEN_FDNAMES",
        "LISTEN_PID",
    }
)
"""Variables that systemd sets for the agent itself."""
MEMORY = 512 << 20
"""Limit on a child's private memory (RLIMIT_DATA) in bytes; the largest worker uses about 40 MiB.

External input is bounded where it is read. This limit is the safety net: the child is refused
memory, or ends, before the kernel kills a training job.
"""
START_DEADLINE = 20.0
"""Seconds for an interpreter to start and import; a cold disk under load is slow."""
KILL_DEADLINE = 2.0
"""Seconds after SIGKILL until a process counts as unkillable: on a busy node one took over 0.5 s,
and a CUDA context takes long.
"""
_LINE = 4096
"""Most bytes per line of a child's standard error; longer lines are split."""
_CHUNK = 1 << 16
"""Bytes read at a time, so that a child that never stops writing does not block the loop."""
_unreaped: list[subprocess.Popen[bytes]] = []
"""Children that may not have been reaped.

The loop may close, or a start fail, before a killed child has ended; the next start reaps it.
"""


class StartError(OSError):
    """A child could not be started; the message names the cause."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(error.errno, error.strerror)
        self.detail = f"{what} cannot be started: {cause(error)}"

    def __str__(self) -> str:
        return self.detail


def cause(error: OSError) -> str:
    """Return for an operator why a child's fork, exec, pipe or open failed."""
    match error.errno:
        case errno.EAGAIN:
            return (
                "no more processes or threads are allowed"
                " (pids.max of the cgroup, RLIMIT_NPROC or kernel.pid_max)"
            )
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return f"the agent is out of file descriptors (RLIMIT_NOFILE is {limit})"
        case errno.ENFILE:
            return "the node is out of file descriptors (fs.file-max)"
        case errno.ENOMEM:
            return "out of memory"
    return str(error)


def environment() -> dict[str, str]:
    """Return the environment for children, without variables meant only for the agent."""
    return {key: value for key, value in os.environ.items() if key not in PRIVATE}


def python(module: str) -> tuple[str, ...]:
    """Return the command that runs one of our modules in a child process.

    The child is isolated from the environment if this process is (`-I`). With `-P` at least nothing
    is imported from the current directory, which others may be able to write.
    """
    options = ["-I" if sys.flags.isolated else "-P"]
    if sys.flags.dont_write_bytecode:
        options.append("-B")
    return (sys.executable, *options, "-m", module)


def how_ended(code: int) -> str:
    """Return how a child process ended, from its return code as in `subprocess`."""
    if code >= 0:
        return f"exited with status {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except (ValueError, ArithmeticError):  # real-time signals have no name
        return f"was ended by signal {-code}"


class ErrorPipe:
    """The standard error of all the agent's children: a pipe that the loop reads.

    The agent's own standard error may be a pipe without a reader, in which a child would hang.
    Writes of up to 4096 bytes (PIPE_BUF) are not interleaved.
    """

    current: ErrorPipe | None = None
    """The pipe that children get; None if they inherit the agent's standard error."""

    def __init__(self, put: Callable[[str], None]) -> None:
        """Pass children's lines to `put`, which must not block. Raise OSError without a pipe."""
        self._put = put
        self._rest = b""
        self._read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # Programs expect a blocking standard error, and would lose what a full pipe refuses.
        os.set_blocking(self.write_end, True)
        asyncio.get_running_loop().add_reader(self._read_end, self._read)
        ErrorPipe.current = self

    def close(self) -> None:
        """Pass on the rest of children's errors, and close the pipe; who writes gets EPIPE."""
        asyncio.get_running_loop().remove_reader(self._read_end)
        self._read()
        if self._rest:
            self._put(printable(self._rest.decode(errors="replace")))
        os.close(self._read_end)
        os.close(self.write_end)
        ErrorPipe.current = None

    def _read(self) -> None:
        try:
            data = self._rest + os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return
        *lines, self._rest = data.split(b"\n")
        if len(self._rest) > _LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            for start in range(0, max(len(line), 1), _LINE):
                text = line[start : start + _LINE].decode(errors="replace")
                self._put(printable(text))


class Child:
    """A started process, in a session of its own, reaped as soon as it ends."""

    def __init__(self, popen: subprocess.Popen[bytes], pidfd: int) -> None:
        self.pid = popen.pid
        self.ended = asyncio.Event()
        self._popen = popen
        self._on_end: Callable[[], None] | None = None
        asyncio.get_running_loop().add_reader(pidfd, self._reap, pidfd)

    @property
    def code(self) -> int | None:
        """The child's return code; None while it runs."""
        return self._popen.returncode

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the child process has ended, before `ended` is set."""
        self._on_end = callback

    def kill(self) -> None:
        """Send SIGKILL to the child, if it still runs."""
        if self._popen.returncode is None:
            self._popen.send_signal(signal.SIGKILL)

    async def killed(self, deadline: float = KILL_DEADLINE) -> bool:
        """Kill the child; False if it still exists after `deadline` seconds, as in D state."""
        self.kill()
        try:
            return await self.ends(deadline)
        except asyncio.CancelledError:
            # The loop may be about to close, and then nothing would reap it. SIGKILL takes effect
            # in milliseconds, unless the process is in D state.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.2)
            raise

    async def ends(self, deadline: float) -> bool:
        """Wait until the child ends; False if it still runs after `deadline` seconds."""
        return await happens(self.ended, deadline)

    def _reap(self, pidfd: int) -> None:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)
        self._popen.wait()  # returns at once, as it has ended
        callback, self._on_end = self._on_end, None  # it refers to this child: breaks the cycle
        if callback is not None:
            callback()
        self.ended.set()


def spawn(
    what: str,
    command: Sequence[str],
    *,
    descriptors: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    output: int | None = None,
    cwd: str | None = None,
    memory: int = MEMORY,
) -> Child:
    """Start `command` as a child, called `what` in errors. Raise StartError if that fails.

    `descriptors` are inherited. `env` replaces the agent's scrubbed environment. `output` is a
    descriptor for standard output and error; without one, output is discarded and errors go to the
    `ErrorPipe`, or without one to the agent's. `memory` limits the bytes of the child and of each
    process that it starts. Starting our interpreter takes about a millisecond.
    """
    _reap()
    errors = output
    if output is None and ErrorPipe.current is not None:
        errors = ErrorPipe.current.write_end
    try:
        # Held until the child runs, so that a descriptor is left for watching it.
        place = os.dup(descriptors[0]) if descriptors else os.open("/dev/null", os.O_RDONLY)
    except OSError as error:
        raise StartError(what, error) from error
    try:
        popen = subprocess.Popen(  # noqa: S603 - our own or the administrator's programs
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if output is None else output,
            stderr=errors,
            pass_fds=descriptors,
            env=environment() if env is None else env,
            cwd=cwd,
            start_new_session=True,
        )
    except OSError as error:
        raise StartError(what, error) from error
    finally:
        os.close(place)
    _unreaped.append(popen)
    # From outside, by prlimit: a preexec_fn runs Python between fork and exec, which may deadlock
    # if there are threads, and keeps subprocess from using vfork.
    _bound(popen.pid, memory)
    try:
        return Child(popen, os.pidfd_open(popen.pid))
    except OSError as error:
        popen.kill()
        raise StartError(what, error) from error


def _bound(pid: int, memory: int) -> None:
    """Limit the private memory of a child that has just started."""
    with contextlib.suppress(ProcessLookupError):  # it has already ended
        hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
        limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


@contextlib.contextmanager
def channel(
    what: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield a socket pair, our end and the child's, for the start of `what`. Raise StartError.

    The child's end is closed afterwards; ours too, if the body fails.
    """
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    except OSError as error:
        raise StartError(what, error) from error
    with theirs:
        try:
            ours.setblocking(False)  # noqa: FBT003 - positional only
            yield ours, theirs
        except BaseException:
            ours.close()
            raise


def _reap() -> None:
    _unreaped[:] = [popen for popen in _unreaped if popen.poll() is None]
