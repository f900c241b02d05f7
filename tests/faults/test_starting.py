"""A worker that cannot be started is a reason, never the end of the agent."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dshealthd.training.message import Message, encode
from tests.agents import RunningAgent, running
from tests.jobs.heartbeats.senders import STRANGER as SENDER
from tests.jobs.heartbeats.senders import sending
from tests.jobs.machines import TORCH
from tests.waiting import until

STRANGER = 61_234
"""A user that runs nothing else here."""
_RIGHTS = "+dac_override,+dac_read_search"
BECOME_STRANGER = (
    *("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"),
    *(f"--inh-caps={_RIGHTS}", f"--ambient-caps={_RIGHTS}"),
)
CONFIG = """
[collectors.network]
interval = "200ms"
[collectors.filesystem]
interval = "200ms"
[collectors.memory]
interval = "200ms"
"""


def under(*prefix: str) -> Callable[..., subprocess.Popen[str]]:
    """Return what starts an agent by a program that runs the rest of its arguments."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*prefix, *command], **options)

    return popen


def leave_descriptors(agent: RunningAgent, spare: int) -> None:
    """Lower the agent's limit so that `spare` descriptors are left."""
    used = {int(name) for name in os.listdir(f"/proc/{agent.pid}/fd")}
    free = (number for number in itertools.count() if number not in used)
    limit = next(itertools.islice(free, spare, None))
    hard = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, (limit, hard))


def test_workers_that_cannot_start_are_a_reason_until_they_can(tmp_path: Path) -> None:
    """Without descriptors for a new worker, its collectors say why and others go on; with none at
    all a new connection is still answered, again and again; then the worker starts.
    """
    with running(tmp_path, CONFIG) as agent:
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", collector="network"))
        before = resource.prlimit(agent.pid, resource.RLIMIT_NOFILE)
        leave_descriptors(agent, 2)
        for worker in agent.workers():
            os.kill(worker, signal.SIGKILL)
        reason = {"collector": "network", "reason": "cannot_start"}
        agent.wait(lambda scrape: scrape.all("dshealthd_collector_failing", **reason) == [1.0])
        assert "file descriptors (RLIMIT_NOFILE is" in agent.get("/api/v1/status")
        leave_descriptors(agent, 0)
        for _ in range(10):
            scrape = agent.scrape()
            assert scrape.seconds < 1.0
            assert scrape.value("dshealthd_collector_up", collector="memory") == 1.0
        resource.prlimit(agent.pid, resource.RLIMIT_NOFILE, before)
        agent.wait(
            lambda scrape: scrape.value("dshealthd_collector_up", collector="network") == 1.0, 70.0
        )
        assert agent.process.poll() is None


def test_each_lack_of_descriptors_is_a_start_error(tmp_path: Path) -> None:
    """However few are left, a worker starts, or says what was short and keeps none of them."""
    code = f"""
import asyncio, itertools, os, resource, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from dshealthd.collection import worker_process
from dshealthd.core.child import StartError

async def main():
    command = [sys.executable, "-S", "-c", "input()"]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    used = set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(100) if number not in used]
    for spare in range(20):
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
        try:
            started = await worker_process.start("a worker", command)
        except StartError as error:
            assert "RLIMIT_NOFILE" in str(error), error
        else:
            print("enough:", spare)
            await started[0].killed(60.0)
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert set(map(int, os.listdir("/proc/self/fd"))) == used, spare

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("enough: ")) > 3


def test_a_hundred_connections_at_64_descriptors(tmp_path: Path) -> None:
    """The soft limit is raised to the hard one; silent connections give way."""
    with (
        running(tmp_path, CONFIG, popen=under("prlimit", "--nofile=48:64")) as agent,
        contextlib.ExitStack() as held,
    ):
        assert resource.prlimit(agent.pid, resource.RLIMIT_NOFILE) == (64, 64)
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", collector="memory"))
        for number in range(100):
            connection = held.enter_context(socket.socket())
            connection.bind((f"127.0.1.{1 + number % 10}", 0))
            connection.settimeout(60)
            with contextlib.suppress(OSError):
                connection.connect((agent.address, agent.port))
        # Silent connections have 5 s for their headers.
        assert until(agent.scrape, errors=(ConnectionError,)).seconds < 1.0
        assert agent.process.poll() is None


def test_heartbeats_of_many_users_at_512_descriptors(public_path: Path) -> None:
    """Four users have a hundred pages each, and fall silent: workers that end start again."""
    if os.geteuid():
        pytest.skip("processes of other users take root")
    code = f"""
children = next((number for number in range(99) if os.fork() == 0), None)
file = page({encode(Message(step=1, sent=time.monotonic()))!r})
time.sleep(600)
"""
    up = {"collector": "network"}
    name = "dshealthd_collector_last_success_timestamp_seconds"
    with contextlib.ExitStack() as stack:
        agent = stack.enter_context(
            running(public_path, CONFIG, popen=under("prlimit", "--nofile=512:512"))
        )
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", **up) == 1.0)
        for user in range(SENDER + 1, SENDER + 5):
            stack.enter_context(sending(TORCH, code, user=user))
        seated = 512 // 4
        agent.wait(lambda scrape: (scrape.value("process_open_fds") or 0.0) > 2 * seated)
        for worker in agent.workers():
            os.kill(worker, signal.SIGKILL)
        killed = time.time()
        scrape = agent.wait(lambda scrape: (scrape.value(name, **up) or 0.0) > killed + 1.0)
        assert (scrape.value("process_open_fds") or 0.0) > 2 * seated
        assert (scrape.value("dshealthd_worker_starts_total", worker="storage") or 0.0) >= 2.0
        assert agent.process.poll() is None


def test_an_agent_at_its_limit_of_threads_and_processes_serves_on() -> None:
    """No thread and no process more for its uid: scrapes and reloads go on, and recover."""
    # The agent is a user of its own, as RLIMIT_NPROC does not bind root; it keeps the right to read
    # the interpreter.
    if os.geteuid():
        pytest.skip("becoming another user takes root")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        base = Path(name)
        os.chown(base, STRANGER, STRANGER)
        web = base / "web.yml"
        web.write_text("{}")
        flags = ("--web.config-file", str(web))
        popen = under(*BECOME_STRANGER)
        agent = stack.enter_context(running(base, CONFIG, flags=flags, popen=popen))
        up = {"collector": "network"}
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", **up) == 1.0)
        _limit_processes(agent.pid, "1:")
        for worker in agent.workers():
            os.kill(worker, signal.SIGKILL)
        agent.process.send_signal(signal.SIGHUP)
        web.write_text("# another\n{}")
        agent.wait(
            lambda scrape: (
                scrape.all("dshealthd_collector_failing", **up, reason="cannot_start") == [1.0]
                and "the thread for" in agent.log.read_text()
            ),
            60.0,
        )
        assert agent.process.poll() is None
        _limit_processes(agent.pid, "4096:")
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", **up) == 1.0, 70.0)
        agent.process.send_signal(signal.SIGTERM)
        assert agent.process.wait(60) == 0


def test_an_interpreter_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    """An agent whose interpreter may not be run names worker and file, and serves."""
    interpreter = tmp_path / "python"
    interpreter.write_text("")
    interpreter.chmod(0o600)
    code = "import sys; sys.executable = sys.argv.pop(1); from dshealthd.cli import main as cli; "
    code += "sys.exit(cli.main(sys.argv[1:]))"

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        python, _, _, *words = command  # PYTHON -m dshealthd ...
        return subprocess.Popen([python, "-c", code, str(interpreter), *words], **options)

    with running(tmp_path, CONFIG, popen=popen) as agent:
        agent.wait_log("worker storage cannot be started: ")
        assert f"Permission denied: '{interpreter}'" in agent.log.read_text()
        assert "cannot serve on" not in agent.log.read_text()
        up = {"collector": "network", "reason": "cannot_start"}
        agent.wait(lambda scrape: scrape.all("dshealthd_collector_failing", **up) == [1.0])
        assert agent.process.poll() is None


def _limit_processes(pid: int, limit: str) -> None:
    """Set the soft RLIMIT_NPROC of a process of the stranger's, as the stranger."""
    command = [*BECOME_STRANGER, "prlimit", f"--pid={pid}", f"--nproc={limit}"]
    subprocess.run(command, check=True, timeout=60)
