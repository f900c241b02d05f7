"""What the service manager hears of an agent: start, reload, state, a live event loop, end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dshealthd.agent.systemd import ServiceManager, status_line
from dshealthd.core.collector import Reason, Sample
from dshealthd.core.result import CollectionResult, failed, not_available
from tests.agents import launch, running
from tests.processes import state
from tests.snapshots import snapshot
from tests.stopwatch import Stopwatch
from tests.waiting import until

FAST = "[collectors.memory]\ninterval = '100ms'\n"


class Listener:
    """The service manager's end: every message that has come, as a dict of its assignments."""

    def __init__(self, address: str) -> None:
        """Listen on a path, or on an abstract name that begins with @."""
        self.address = address
        self.messages: list[dict[str, str]] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address[1:]}" if address.startswith("@") else address)

    def wait(
        self, condition: Callable[[dict[str, str]], object], seconds: float = 60.0, looked: int = 0
    ) -> int:
        """Return the position of the first message for which the condition holds. The first
        `looked` ones do not count.
        """
        end = time.monotonic() + seconds
        while True:
            for position, message in enumerate(self.messages[looked:], looked):
                if condition(message):
                    return position
            looked = len(self.messages)
            self._socket.settimeout(max(0.01, end - time.monotonic()))
            try:
                data = self._socket.recv(4096).decode()
            except TimeoutError:
                pytest.fail(f"not within {seconds:g} s: {self.messages}")
            self.messages.append(dict(line.split("=", 1) for line in data.splitlines()))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


@pytest.fixture
def listener() -> Iterator[Listener]:
    """A service manager at an abstract address; those of the other tests have a path."""
    name = f"@dshealthd-test-{os.getpid()}-{time.monotonic_ns()}"
    with contextlib.closing(Listener(name)) as listening:
        yield listening


def test_the_life_of_an_agent(listener: Listener, tmp_path: Path) -> None:
    """READY once it serves, watchdog messages, RELOADING then READY at SIGHUP, STOPPING at the end.
    No worker has the variables in its environment.
    """
    environment = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "600000"}
    with running(tmp_path, FAST, environment=environment) as agent:
        ready = listener.wait(lambda message: message.get("READY") == "1")
        assert agent.get("/-/healthy")
        assert f":{agent.port}/" in listener.messages[ready]["STATUS"]
        listener.wait(lambda message: message.get("WATCHDOG") == "1")
        agent.wait(lambda scrape: scrape.value("dshealthd_memory_total_bytes"))
        workers = agent.workers()
        assert workers
        for pid in workers:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"NOTIFY_SOCKET" not in environ
            assert b"WATCHDOG" not in environ

        agent.process.send_signal(signal.SIGHUP)
        reloading = listener.wait(lambda message: "RELOADING" in message)
        assert int(listener.messages[reloading]["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
        listener.wait(lambda message: "READY" in message, looked=reloading)
        agent.process.terminate()
        listener.wait(lambda message: message.get("STOPPING") == "1")


def test_a_stopped_agent_feeds_no_watchdog(tmp_path: Path) -> None:
    """While the event loop does not run, nothing is sent; when it goes on, the watchdog is fed."""
    with contextlib.closing(Listener(str(tmp_path / "notify"))) as listener:
        environment = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "300000"}
        with running(tmp_path, FAST, environment=environment) as agent:
            listener.wait(lambda message: "WATCHDOG" in message)
            agent.process.send_signal(signal.SIGSTOP)
            task = f"/proc/{agent.pid}/task"
            until(lambda: {state(int(thread)) for thread in os.listdir(task)} <= {"T", ""})
            with contextlib.suppress(pytest.fail.Exception):  # what was sent before
                listener.wait(lambda _: False, 0.0)
            before = len(listener.messages)
            with pytest.raises(pytest.fail.Exception):
                listener.wait(lambda _: False, 1.0)
            assert len(listener.messages) == before
            agent.process.send_signal(signal.SIGCONT)
            listener.wait(lambda _: len(listener.messages) > before)


@pytest.mark.parametrize(("config", "flags", "status"), [
    ("[web]\nprot = 1\nhost = 2\n", (), "(and 1 more)"),
    ("[web]\nconfig_file = '/nowhere/web.yml'\n", (), "/nowhere/web.yml: cannot be read"),
    ("", ("--web.listen-address", "192.0.2.1:10061"), "cannot serve on 192.0.2.1:10061"),
])  # fmt: skip
def test_why_it_does_not_start(
    config: str, flags: tuple[str, ...], status: str, tmp_path: Path
) -> None:
    """An agent that cannot start tells the service manager why in one line, and never READY."""
    with contextlib.closing(Listener(str(tmp_path / "notify"))) as listener:
        process = launch(
            tmp_path, config, environment={"NOTIFY_SOCKET": listener.address}, flags=flags
        )
        position = listener.wait(lambda message: status in message.get("STATUS", ""))
        assert process.wait(60) in {1, 2}
        assert process.stdout is not None
        process.stdout.close()
        assert "\n" not in listener.messages[position]["STATUS"]
        assert not any("READY" in message for message in listener.messages)


def test_a_bad_reload_and_a_missing_state_directory_are_told(tmp_path: Path) -> None:
    """The status line names what is wrong with the configuration and with path.state."""
    (tmp_path / "file").write_text("")
    with contextlib.closing(Listener(str(tmp_path / "notify"))) as listener:
        environment = {"NOTIFY_SOCKET": listener.address, "WATCHDOG_USEC": "300000"}
        flags = ("--path.state", str(tmp_path / "file/state"))
        with running(tmp_path, FAST, environment=environment, flags=flags) as agent:
            listener.wait(lambda message: "path.state: no state" in message.get("STATUS", ""))
            (tmp_path / "dshealthd.toml").write_text("[web]\nprot = 1\n", encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)
            listener.wait(
                lambda message: (
                    "READY" in message
                    and "configuration not reloaded" in message["STATUS"]
                    and "web.prot: unknown key" in message["STATUS"]
                )
            )
            (tmp_path / "dshealthd.toml").write_text(FAST, encoding="utf-8")
            agent.process.send_signal(signal.SIGHUP)
            listener.wait(
                lambda message: "READY" in message and "configuration" not in message["STATUS"],
                looked=len(listener.messages),
            )


def test_variables_are_taken_out_and_a_foreign_watchdog_is_none() -> None:
    """`from_environment` leaves nothing for children; a watchdog of another process is not fed."""
    environment = {
        "NOTIFY_SOCKET": "",
        "WATCHDOG_USEC": "2000000",
        "WATCHDOG_PID": "1",
        "HOME": "/",
    }
    manager = ServiceManager.from_environment(environment)
    assert environment == {"HOME": "/"}
    assert manager.watchdog is None
    ours = {"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    assert ServiceManager.from_environment(ours).watchdog == 2.0


def test_a_full_socket_is_not_waited_for(tmp_path: Path) -> None:
    """A manager that reads nothing never blocks the loop. What waits is sent once it reads
    again.
    """
    with contextlib.closing(Listener(str(tmp_path / "notify"))) as listener:
        manager = ServiceManager(listener.address)
        watch = Stopwatch()
        for number in range(2000):  # more than a datagram socket queues
            manager.set_status(f"line {number}")
        manager.ready("up")
        assert watch.seconds() < 5
        for number in range(20):  # the manager reads again
            with contextlib.suppress(pytest.fail.Exception):
                listener.wait(lambda _: False, 0.05)
            manager.set_status(f"more {number}")
        listener.wait(lambda message: message.get("READY") == "1")
        assert len(listener.messages) < 200, "old lines are dropped, not queued without bound"
        manager.close()


@pytest.mark.parametrize(("watchdog", "period"), [(None, 5.0), (30.0, 5.0), (3.0, 1.0)])
def test_how_often_the_manager_is_told(watchdog: float | None, period: float) -> None:
    """Every five seconds, and so often that two of the watchdog's beats may be late."""
    assert ServiceManager("", watchdog)._period == period


def test_what_waits_for_the_manager_is_bounded(tmp_path: Path) -> None:
    """Sixteen messages, the last ones, each with at most 800 characters of a status."""
    with contextlib.closing(Listener(str(tmp_path / "notify"))) as listener:
        manager = ServiceManager(listener.address)
        while not manager._waiting:
            manager.set_status(f"line {len(manager._status)} {time.monotonic()}")
        for number in range(17):
            manager.set_status(f"{number} " + "x" * 800)
        manager.close()
    assert len(manager._waiting) == 16
    assert manager._waiting[0] == b"STATUS=1 " + b"x" * 798


def test_a_manager_that_is_gone_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An address at which nothing listens is a warning, not an exception."""
    manager = ServiceManager(str(tmp_path / "nobody"))
    manager.ready("up")
    manager.close()
    assert "cannot notify the service manager" in caplog.text


def test_status_line_before_the_first_results() -> None:
    """Until the collectors are set up there are none to count, and the line does not say 0."""
    none = snapshot({}, 100.0)
    assert status_line(none, [], "http://node/", 100.0) == "starting; http://node/"
    assert status_line(none, ["bad"], "http://node/", 100.0) == "bad; starting; http://node/"


def test_status_line() -> None:
    """Problems come first, three at most, then the counts, why there are no GPUs, and the page."""
    results: dict[str, CollectionResult | tuple[Sample, ...] | None] = {
        "memory": (),
        "gpu": not_available("libnvidia-ml.so.1 is not there"),
        "tcp": failed(Reason.PERMISSION_DENIED, "/proc/net/tcp"),
        "clock": failed(Reason.TIMEOUT, "no answer"),
    }
    problems = ["a problem", "another"]
    line = status_line(snapshot(results, 100.0), problems, "http://node:10061/", 100.0)
    assert line == (
        "a problem; another; clock timeout: no answer; 1 more; 1 collector ok, 1 not available; no "
        "GPUs: libnvidia-ml.so.1 is not there; http://node:10061/"
    )
    starting = snapshot({**results, "disk": None, "network": None}, 100.0)
    assert status_line(starting, [], "http://node:10061/", 100.0) == (
        "clock timeout: no answer; tcp permission_denied: /proc/net/tcp; starting: 4 of 6 "
        "collectors have a result; no GPUs: libnvidia-ml.so.1 is not there; http://node:10061/"
    )


@pytest.mark.parametrize("count", [3, 4])
def test_problems_of_a_status_line_are_bounded(count: int) -> None:
    """Three of them, of two hundred characters each."""
    line = status_line(snapshot({}, 100.0), ["x" * 201] * count, "http://node/", 100.0)
    more = "; 1 more" if count > 3 else ""
    assert line == "; ".join(["x" * 200] * 3) + f"{more}; starting; http://node/"
