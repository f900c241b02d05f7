"""The agent as a process: starting, serving, reloading, stopping."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.processes import free_port
from dshealthd.agent.agent import Agent, _beside_ended
from dshealthd.collectors.job_activity import FILES
from dshealthd.config import config
from dshealthd.core import background
from dshealthd.core.result import CollectionOutcome, CollectionResult
from tests.agents import RunningAgent, running, seconds_to_end
from tests.findings.test_judge import Node, loaded
from tests.processes import runs
from tests.waiting import eventually, until

FAST = "[collectors.memory]\ninterval = '100ms'\n"
TOTAL = "dshealthd_memory_total_bytes"


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """Run one agent for all tests that leave it as it was."""
    with running(tmp_path_factory.mktemp("agent"), FAST) as agent:
        agent.wait(lambda s: s.value(TOTAL))
        yield agent


def reload(agent: RunningAgent, text: str) -> None:
    """Give an agent another configuration."""
    agent.log.with_name("dshealthd.toml").write_text(text, encoding="utf-8")
    agent.process.send_signal(signal.SIGHUP)


def test_serves_this_machine_until_it_is_stopped(tmp_path: Path) -> None:
    """A started agent says where it serves, and its /metrics has this machine's memory as
    /proc/meminfo has it. SIGTERM ends it with status 0 in less than three seconds.
    """
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        total = int(meminfo.readline().split()[1]) * 1024
    with running(tmp_path, FAST) as agent:
        scrape = agent.wait(lambda s: s.value("dshealthd_memory_total_bytes"))
        assert scrape.value("dshealthd_memory_total_bytes") == total
        assert scrape.value("dshealthd_collector_up", collector="memory") == 1
        assert agent.get("/-/healthy")
        assert seconds_to_end(agent.process) < 3
        assert agent.process.wait() == 0


async def test_probes_have_collectors_look(tmp_path: Path) -> None:
    """Before a round, whatever their intervals, as a job may just have started."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(f"[path]\nstate = '{tmp_path}'\n[collectors.gpu_bus]\ninterval = '1h'\n")
    agent = Agent(config.load(file), file, {})
    await agent._scheduler.apply(agent._config)
    try:
        await eventually(lambda: agent._snapshot["gpu_bus"].sampled)
        first = agent._snapshot["gpu_bus"].sampled
        agent._probes._collect(["gpu_bus"])
        await eventually(lambda: agent._snapshot["gpu_bus"].sampled != first)
    finally:
        await agent._scheduler.close()


def test_agent_that_has_read_nothing_knows_nothing(tmp_path: Path) -> None:
    """Before its collectors run it is not ready, its node's state and fitness are unknown, and so
    says each of its answers.
    """
    file = tmp_path / "dshealthd.toml"
    file.write_text(f"[path]\nstate = '{tmp_path}'\n", encoding="utf-8")
    agent = Agent(config.load(file), file, {})
    request: Any = None  # the answers do not depend on it
    assert agent._server._ready(request).status == 503
    fit = agent._server._fit(request)
    assert (fit.status, fit.text) == (503, "unknown: no collector runs\n")
    document = json.loads(agent._server.status())
    assert (document["ready"], document["verdict"]) == (False, "unknown")


async def test_what_runs_beside_may_end(caplog: pytest.LogCaptureFixture) -> None:
    """The agent goes on without it; only an end by a defect is logged."""

    async def ending(seconds: float) -> None:
        await asyncio.sleep(1 / seconds)

    tasks = [
        asyncio.create_task(ending(seconds), name=f"task {seconds}") for seconds in (0, 1e9, 1e-9)
    ]
    for task in tasks:
        task.add_done_callback(_beside_ended)
    await asyncio.wait(tasks[:2])
    tasks[2].cancel()
    await asyncio.wait(tasks)
    assert caplog.messages == ["task 0: ended by a defect: ZeroDivisionError('division by zero')"]


async def test_a_disk_that_hangs_does_not_keep_the_agent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It says so in its status line, and goes on without state and with its configuration."""

    async def call(*_call: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(background, "call", call)
    agent = Agent(config.load(None), tmp_path, {})
    await agent._make_state_directory()
    await agent._reload()
    assert [*agent._problems.values()] == [
        "path.state: no state will survive a restart: the disk does not answer within 2 s",
        "configuration not reloaded: the disk does not answer within 10 s",
    ]


def test_first_answer_has_what_an_earlier_agent_found(tmp_path: Path) -> None:
    """A restart hides no finding, not even from what asks as soon as the port is open."""
    (tmp_path / "state").mkdir()
    earlier = Node(tmp_path / "state")

    async def find() -> None:
        await earlier.judge.apply(loaded("", tmp_path))
        earlier.over(0.95)
        await earlier.judge.close()

    asyncio.run(find())
    with running(tmp_path, f"[path]\nstate = '{tmp_path}/state'\n") as agent:
        document = json.loads(agent.get("/api/v1/status"))
        assert "DshealthdHostLimitNear" in {found["alert"] for found in document["findings"]}


def test_reload(lasting: RunningAgent) -> None:
    """SIGHUP applies a good file and keeps the old configuration in force after a bad one, which a
    metric and the log say.
    """
    successful = "dshealthd_config_last_reload_successful"
    reload(lasting, "[collectors.memory]\nintervall = '1s'\n")
    scrape = lasting.wait(lambda s: s.value(successful) == 0)
    assert scrape.value(TOTAL)
    lasting.wait_log("collectors.memory.intervall: unknown key; did you mean interval?")

    reload(lasting, "[collectors.memory]\nenabled = false\n")
    scrape = lasting.wait(lambda s: s.value(successful) == 1)
    assert not scrape.all(TOTAL)
    assert not scrape.all("dshealthd_collector_up", collector="memory")
    reload(lasting, FAST)
    lasting.wait(lambda s: s.value(TOTAL))


async def test_one_configuration_at_a_time(tmp_path: Path) -> None:
    """A reload that comes while the agent starts waits: applied at the same time, both would start
    every service.
    """

    class Slow:
        name = "slow"
        now, most, calls = 0, 0, 0

        async def apply(self, _config: object) -> None:
            self.now, self.calls = self.now + 1, self.calls + 1
            self.most = max(self.most, self.now)
            if self.calls == 1:
                os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.2)
            self.now -= 1

        def samples(self) -> Iterator[Any]:
            yield from ()

        def status(self) -> dict[str, str]:
            return {"state": "ok"}

        async def close(self) -> None:
            pass

    file = tmp_path / "dshealthd.toml"
    file.write_text(
        f"[path]\nstate = '{tmp_path}/state'\n[web]\nlisten_address = '127.0.0.1:0'\n",
        encoding="utf-8",
    )
    agent, slow = Agent(config.load(file), file, {}), Slow()
    agent._services = (slow,)
    running = asyncio.create_task(agent.run(lambda _url: None))
    await eventually(lambda: slow.calls == 2 and not slow.now)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert (slow.calls, slow.most) == (2, 1)


def test_a_change_taken_back_needs_no_restart(lasting: RunningAgent) -> None:
    """What takes effect at a restart is compared with what runs, not with the file before."""

    def reloads() -> int:
        return lasting.log.read_text().count("configuration reloaded")

    for text in ("[web]\nmax_connections = 9\n", "", FAST):
        before = reloads()
        reload(lasting, text)
        lasting.wait(lambda _: reloads() > before)  # noqa: B023 - called in this turn only
    said = lasting.log.read_text().count("web.max_connections has changed and takes effect")
    assert said == 1


def test_a_job_is_at_work_by_the_limits_of_the_configuration(tmp_path: Path) -> None:
    """What the configured limits call work keeps a silent job from being a hang."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(
        f"[path]\nstate = '{tmp_path}'\n[findings.limits]\nhang_moved_bytes_per_second = 1000\n",
        encoding="utf-8",
    )
    loaded = config.load(file)

    async def seen() -> str:
        agent = Agent(loaded, file, {})
        await agent._judge.apply(loaded)
        agent._snapshot.expect("training", 3600)
        agent._snapshot.put(
            "training", CollectionResult(CollectionOutcome.OK, (FILES(2000, "run-1"),))
        )
        await agent._judge.close()
        return agent._jobs._work("run-1").says

    assert asyncio.run(seen()) == "it reads or writes files"


def test_port_in_use_is_a_clear_error(lasting: RunningAgent) -> None:
    """A second agent on the same port ends with status 1 and one line that names the address."""
    address = f"127.0.0.1:{lasting.port}"
    command = [sys.executable, "-m", "dshealthd", "run", "--web.listen-address", address]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    message = (
        f"dshealthd: cannot serve on {address}: Address already in use; find "
        "the listener with `ss -ltnp`, or set another port with --web.listen-address"
    )
    assert message in second.stderr.splitlines()
    assert second.stderr.count(str(lasting.port)) == 1
    assert "Traceback" not in second.stderr


def test_goes_on_after_sigstop(lasting: RunningAgent) -> None:
    """After 3 s of SIGSTOP the agent goes on by itself. Samples are there again within two
    seconds.
    """
    lasting.wait(lambda s: s.value(TOTAL))
    lasting.process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    lasting.process.send_signal(signal.SIGCONT)
    scrape = lasting.wait(lambda s: s.value("dshealthd_collector_up", collector="memory") == 1, 2.0)
    assert scrape.value(TOTAL)


def test_killed_and_stopped(tmp_path: Path) -> None:
    """An agent that was killed leaves its port free and no worker, and its successor serves on it
    at once. The next agent takes an end as a crash unless the one before it was told to stop.
    """
    file = tmp_path / "state" / "findings.json"
    port = free_port()  # one that no other process is given meanwhile
    for end, stopped in ((signal.SIGKILL, False), (signal.SIGTERM, True)):
        with running(tmp_path, FAST, port=port) as agent:
            assert agent.port == port
            agent.wait(lambda s: s.value("dshealthd_findings_judged_timestamp_seconds"))
            agent.wait(lambda _: file.exists() and not json.loads(file.read_bytes())["stopped"])
            workers = agent.workers()
            assert workers
            agent.process.send_signal(end)
            agent.process.wait(60)
            until(lambda: not any(map(runs, workers)))  # noqa: B023
        assert json.loads(file.read_bytes())["stopped"] is stopped
