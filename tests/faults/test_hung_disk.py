"""A disk that hangs below `path.state` stops neither the scrapes nor the end of the agent."""

from __future__ import annotations

import contextlib
import signal
import socket

import pytest

from dshealthd.core.state_writer import HUNG, LatestWriter
from tests import frozen
from tests.agents import RunningAgent, Scrape, running
from tests.kernel_log import KernelLog
from tests.stopwatch import Stopwatch
from tests.waiting import until

CONFIG = """
[path]
dev = "{dev}"

[collectors.kernel_log]
interval = "100ms"
"""


def wait_for_port(agent: RunningAgent) -> None:
    """Wait until the agent's port is free.

    A connection of another test may have it for a moment; a child that hangs would have it for
    good.
    """
    place = (agent.address, agent.port)
    until(lambda: socket.create_server(place), lambda: place, errors=(OSError,)).close()


def test_a_failed_write_is_known_until_one_succeeds() -> None:
    """The error of the last write is there to be reported."""
    results: list[OSError | None] = [OSError(28, "No space left on device"), None]

    def write(_content: bytes) -> None:
        if (error := results.pop(0)) is not None:
            raise error

    writer = LatestWriter(write, "test")
    writer.put(b"1")
    until(lambda: not writer.busy)
    assert "No space left" in str(writer.error)
    writer.put(b"2")
    until(lambda: not writer.busy)
    assert str(writer.error) == "None"
    assert writer.written == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_agent_with_a_frozen_state_serves_and_ends(
    mount: frozen.Mount, number: signal.Signals
) -> None:
    """While a write to a frozen disk hangs, scrapes answer, signals end the agent."""
    mount.directory.joinpath("state").mkdir()
    flags = ("--path.state", str(mount.directory / "state"))
    dev = mount.directory.parent / "dev"
    with (
        contextlib.closing(KernelLog(dev / "kmsg")) as kernel,
        running(mount.directory.parent, CONFIG.format(dev=dev), flags=flags) as agent,
    ):

        def hung_after_a_line(scrape: Scrape) -> bool:
            """Have the kernel log one more Xid; is the write of the counts hung?"""
            kernel.say("NVRM: Xid (PCI:0000:66:00): 79, pid=1, name=x, test")
            return (scrape.value(HUNG.name, file="kernel_log") or 0.0) > 2.0

        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", collector="kernel_log"))
        mount.freeze()
        agent.wait(hung_after_a_line)
        agent.process.send_signal(signal.SIGHUP)  # a reload reads and writes the state, too
        assert agent.wait(hung_after_a_line).seconds < 1.0
        bound = 8.0 if number is signal.SIGTERM else 1.0
        watch = Stopwatch(agent.pid)
        agent.process.send_signal(number)
        assert agent.process.wait(60) == (0 if number is signal.SIGTERM else -number)
        assert watch.seconds() < bound
        wait_for_port(agent)


def test_an_agent_that_starts_on_a_frozen_disk_serves_and_ends(mount: frozen.Mount) -> None:
    """`path.state` cannot be made: the agent says so, serves, and SIGKILL ends it at once."""
    flags = ("--path.state", str(mount.directory / "state"))
    mount.freeze()
    with running(mount.directory.parent, "", flags=flags) as agent:
        agent.wait(lambda scrape: scrape.value("dshealthd_collector_up", collector="memory"))
        agent.wait_log("the disk does not answer")
        watch = Stopwatch(agent.pid)
        agent.process.kill()
        assert agent.process.wait(60) == -signal.SIGKILL
        assert watch.seconds() < 1.0
        wait_for_port(agent)
