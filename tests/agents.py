"""A real agent as a process of its own, and what its /metrics says."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


class Scrape:
    """One answer of /metrics."""

    def __init__(self, text: str, seconds: float) -> None:
        """`seconds` is how long the answer took."""
        self.text = text
        self.seconds = seconds
        self.series: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
        for line in text.splitlines():
            if not line.startswith("#") and (match := SERIES.fullmatch(line)):
                name, labels, value = match.groups()
                self.series.setdefault(name, {})[frozenset(LABEL.findall(labels or ""))] = float(value)

    def value(self, name: str, **labels: str) -> float | None:
        """Return the one value of the series that has these labels among its own; None when there is none."""
        found = self.all(name, **labels)
        assert len(found) <= 1, f"{len(found)} series match {name}{labels}"
        return found[0] if found else None

    def all(self, name: str, **labels: str) -> list[float]:
        """Return the values of all series that have these labels among their own."""
        wanted = set(labels.items())
        return [value for key, value in self.series.get(name, {}).items() if wanted <= key]


class RunningAgent:
    """A running `dshealthd run` and its port."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        """The agent serves on `port` of 127.0.0.1 and logs to `log`."""
        self.process = process
        self.port = port
        self.log = log

    def get(self, path: str) -> str:
        """Return the body of an answer."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    def scrape(self) -> Scrape:
        """Ask for /metrics."""
        started = time.monotonic()
        return Scrape(self.get("/metrics"), time.monotonic() - started)

    def wait(self, condition: Callable[[Scrape], object], seconds: float = 20.0) -> Scrape:
        """Return the first scrape for which the condition holds. Every scrape on the way must take less than a second."""
        end = time.monotonic() + seconds
        while True:
            scrape = self.scrape()
            assert scrape.seconds < 1.0, f"/metrics took {scrape.seconds:.2f} s"
            if condition(scrape):
                return scrape
            assert time.monotonic() < end, f"not within {seconds:g} s:\n{scrape.text}\n{self.log.read_text()}"
            time.sleep(0.05)

    def workers(self) -> list[int]:
        """Return the pids of the agent's children."""
        with open(f"/proc/{self.process.pid}/task/{self.process.pid}/children", encoding="ascii") as children:
            return [int(pid) for pid in children.read().split()]


def first_line(process: subprocess.Popen[str], seconds: float) -> str:
    """Return what the process prints first; an empty string when it ends or stays silent."""
    lines: queue.Queue[str] = queue.Queue()
    assert process.stdout is not None
    threading.Thread(target=lambda: lines.put(process.stdout.readline()), daemon=True).start()  # type: ignore[union-attr] # checked above
    with contextlib.suppress(queue.Empty):
        return lines.get(timeout=seconds)
    return ""


@contextlib.contextmanager
def running(
    directory: Path, config: str = "", *, environment: Mapping[str, str] | None = None, port: int = 0, flags: tuple[str, ...] = ()
) -> Iterator[RunningAgent]:
    """Run an agent on a configuration's text, and end it."""
    file, log = directory / "dshealthd.toml", directory / "agent.log"
    file.write_text(config, encoding="utf-8")
    command = [sys.executable, "-m", "dshealthd", "run", "--config.file", str(file)]
    command += ["--web.listen-address", f"127.0.0.1:{port}", "--path.state", str(directory / "state"), *flags]
    with log.open("a", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **(environment or {})}
        )
    try:
        line = first_line(process, 20)
        match = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert match, f"the agent did not announce itself: {line!r}\n{log.read_text(encoding='utf-8')}"
        yield RunningAgent(process, int(match[1]), log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)
        assert process.stdout is not None
        process.stdout.close()
