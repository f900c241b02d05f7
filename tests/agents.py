"""A real agent as a process of its own, and what its /metrics says."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.processes import children, command
from tests.stopwatch import Stopwatch
from tests.waiting import until

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Series(Mapping[str, dict[frozenset[tuple[str, str]], float]]):
    """The series of an answer by metric, without those of other trainings than `job`.

    Read when asked for: a test that waits asks for two of two hundred metrics, again and again.
    """

    def __init__(self, text: str, job: str | None) -> None:
        self._job = job
        self._lines: dict[str, list[str]] = {}
        self._read: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for line in text.splitlines():
            if match := NAME.match(line):
                self._lines.setdefault(match[0], []).append(line)

    def __getitem__(self, name: str) -> dict[frozenset[tuple[str, str]], float]:
        if name not in self._read:
            self._read[name] = found = {}
            for line in self._lines[name]:
                if (match := SERIES.fullmatch(line)) is None:
                    continue
                labels = LABEL.findall(match[2] or "")
                if self._job in {None, dict(labels).get("training_job", self._job)}:
                    found[frozenset(labels)] = float(match[3])
        if not self._read[name]:
            raise KeyError(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._lines if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str, seconds: float, job: str | None = None) -> None:
        """`seconds` is how long the answer took, less what other work on this machine took. Series
        of other trainings than `job`, if one is given, are left out of `series`.
        """
        self.text = text
        self.seconds = seconds
        self.series = Series(text, job)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the one value of the series that has these labels among its own. None when there
        is none.
        """
        found = self.all(name, **labels)
        assert len(found) <= 1, f"{len(found)} series match {name}{labels}"
        return found[0] if found else None

    def all(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series that have these labels among their own."""
        wanted = set(labels.items())
        return [value for key, value in self.series.get(name, {}).items() if wanted <= key]


class RunningAgent:
    """A running `dshealthd run` and its port."""

    def __init__(
        self,
        process: subprocess.Popen[str],
        port: int,
        log: Path,
        address: str = "127.0.0.1",
        connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection,
    ) -> None:
        """The agent serves on `port` of `address`, which `connect` reaches, and logs to `log`."""
        self.process = process
        self.port = port
        self.log = log
        self.address = address
        self._connect = connect
        self.job: str | None = None
        """The training that scrapes are about; other tests have some on this machine too."""

    @property
    def pid(self) -> int:
        """Return the agent's pid."""
        return self.process.pid

    def get(self, path: str, timeout: float = 60.0) -> str:
        """Return the body of an answer; HTTPError if it is no good one."""
        connection = http.client.HTTPConnection(self.address, self.port, timeout=timeout)
        connection.sock = self._connect((self.address, self.port), timeout)
        with contextlib.closing(connection):
            connection.request("GET", path, headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read().decode()
        if answer.status >= http.client.BAD_REQUEST:
            url = f"http://{self.address}:{self.port}{path}"
            raise urllib.error.HTTPError(url, answer.status, body, answer.headers, None)
        return body

    def scrape(self, timeout: float = 60.0) -> Scrape:
        """Ask for /metrics."""
        watch = Stopwatch(self.pid)
        return Scrape(self.get("/metrics", timeout), watch.seconds(), self.job)

    def status(self) -> Any:
        """Ask for /api/v1/status."""
        return json.loads(self.get("/api/v1/status"))

    def wait(self, condition: Callable[[Scrape], object], seconds: float = 60.0) -> Scrape:
        """Return the first scrape for which the condition holds, at most `seconds` from now. Less
        what other work takes of them, and of the second that a scrape on the way may take.
        """
        watch = Stopwatch(self.pid, *children(self.pid))
        pause = 0.05  # grows: to ask and to read the answer take CPU time, which others wait for
        while True:
            scrape = self.scrape()
            assert scrape.seconds < 1.0, f"/metrics took {scrape.seconds:.2f} s"
            if condition(scrape):
                return scrape
            assert watch.seconds() < seconds, (
                f"not within {seconds:g} s:\n{scrape.text}\n{self.log.read_text()}"
            )
            time.sleep(pause)
            pause = min(1.5 * pause, 0.4)

    def wait_log(self, text: str, seconds: float = 60.0) -> None:
        """Wait until the log has this text, which a thread of the agent writes when it can."""
        until(
            lambda: text in self.log.read_text(),
            lambda: f"{text!r} in\n{self.log.read_text()}",
            seconds,
        )

    def workers(self) -> list[int]:
        """Return the pids of the agent's collection workers.

        Other children end at any moment, as those that write state do; one that has not called exec
        yet has descriptors, environment and command of the agent itself.
        """
        return [pid for pid in children(self.pid) if "dshealthd.collection.worker" in command(pid)]


def first_line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return what the process prints first; an empty string when it ends or stays silent."""
    lines: queue.Queue[str] = queue.Queue()
    output = process.stdout
    assert output is not None
    threading.Thread(target=lambda: lines.put(output.readline()), daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return lines.get(timeout=seconds)
    return ""


def launch(
    directory: Path,
    config: str,
    *,
    environment: Mapping[str, str] | None = None,
    address: str = "127.0.0.1",
    port: int = 0,
    flags: tuple[str, ...] = (),
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
    module: str = "dshealthd",
) -> subprocess.Popen[str]:
    """Start an agent on a configuration's text, without waiting for it. It logs to `agent.log` in
    the directory. `module` takes the command line of `dshealthd`.
    """
    file = directory / "dshealthd.toml"
    file.write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", module, "run", "--config.file", str(file)]
    command += [
        "--web.listen-address",
        f"{address}:{port}",
        "--path.state",
        str(directory / "state"),
        *flags,
    ]
    with (directory / "agent.log").open("a", encoding="utf-8") as stderr:
        return popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, **(environment or {})},
        )


def announced_port(process: subprocess.Popen[str], log: Path, seconds: float = 120.0) -> int:
    """Wait until the agent says that it serves, and return its port."""
    line = first_line(process, seconds)
    match = re.search(r"http://[^/]*:(\d+)/", line)
    assert match, f"the agent did not announce itself: {line!r}\n{log.read_text(encoding='utf-8')}"
    return int(match[1])


def seconds_to_end(process: subprocess.Popen[str], limit: float = 60.0) -> float:
    """Have the agent stop, and return how long that took, less what other work took. Whoever
    started it reaps it: what it waited for is known until then.
    """
    watch = Stopwatch(process.pid)
    process.send_signal(signal.SIGTERM)
    unreaped = os.WEXITED | os.WNOWAIT | os.WNOHANG
    until(lambda: os.waitid(os.P_PID, process.pid, unreaped), seconds=limit)
    return watch.seconds()


def end(process: subprocess.Popen[str], seconds: float = 20.0) -> None:
    """Have the agent stop, and kill it if it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


@contextlib.contextmanager
def running(
    directory: Path,
    config: str = "",
    *,
    environment: Mapping[str, str] | None = None,
    port: int = 0,
    flags: tuple[str, ...] = (),
    popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
) -> Iterator[RunningAgent]:
    """Run an agent on a configuration's text, and end it."""
    process = launch(
        directory, config, environment=environment, port=port, flags=flags, popen=popen
    )
    log = directory / "agent.log"
    try:
        yield RunningAgent(process, announced_port(process, log), log)
    finally:
        end(process)
