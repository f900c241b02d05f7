"""A real Prometheus, and what it answers to the dashboards' queries."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.processes import free_port
from tests.grafana.documents import Query
from tests.lab.servers import running_server
from tests.lab.station import Loopback

QUERY_SECONDS = 300.0
"""For one query: the heaviest takes seconds on an idle machine, and a minute beside other work."""


class Answer(NamedTuple):
    """What a query returned: its series, by their labels, and how long it took in seconds."""

    series: list[dict[str, str]]
    values: list[list[float]]
    seconds: float


class Prometheus:
    """A running server."""

    def __init__(self, port: int) -> None:
        """It listens on a port of 127.0.0.1."""
        self._url = f"http://127.0.0.1:{port}/api/v1/"
        self.last: float | None = None
        """The Unix time of the last samples, where no more come; queries soon find none after
        it."""

    def ask(
        self, query: Query, expr: str, end: float, *, span: float = 600.0, steps: int = 40
    ) -> Answer:
        """Run a panel's query as Grafana does, over `span` seconds or, if it is instant, at their
        end; RuntimeError if it is refused.
        """
        return (
            self.instant(expr, end)
            if query.instant
            else self.range(expr, end - span, end, span / steps)
        )

    def instant(self, expr: str, when: float) -> Answer:
        """Run an instant query."""
        return self._answer("query", query=expr, time=f"{when:.3f}")

    def range(self, expr: str, start: float, end: float, step: float) -> Answer:
        """Run a query over time."""
        return self._answer(
            "query_range", query=expr, start=f"{start:.3f}", end=f"{end:.3f}", step=f"{step:g}"
        )

    def _answer(self, path: str, **parameters: str) -> Answer:
        started = time.monotonic()
        data = urllib.parse.urlencode(parameters).encode()
        try:
            with urllib.request.urlopen(
                self._url + path, data=data, timeout=QUERY_SECONDS
            ) as answer:
                result: Any = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as error:
            message = f"{parameters['query']}: {error.read().decode()}"
            raise RuntimeError(message) from error
        seconds = time.monotonic() - started
        if not isinstance(result, list) or (result and not isinstance(result[0], dict)):
            return Answer([{}], [[float(result[1])]], seconds)
        pairs = [entry.get("values") or [entry["value"]] for entry in result]
        return Answer(
            [entry["metric"] for entry in result],
            [[float(value) for _, value in found] for found in pairs],
            seconds,
        )


def write_blocks(lines: Iterable[str], directory: Path) -> None:
    """Make the data folder of a server from lines in the format of OpenMetrics."""
    text = directory / "series.txt"
    with text.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.write("# EOF\n")
    command = ("promtool", "tsdb", "create-blocks-from", "openmetrics", text, directory / "data")
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=700, check=True)
    text.unlink()


@contextlib.contextmanager
def prometheus(
    directory: Path, config: Path, *flags: str, port: int | None = None
) -> Iterator[Prometheus]:
    """Run a server on a configuration, with its data in `directory`/data, until it answers. And end
    it.
    """
    options = [
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--query.timeout={QUERY_SECONDS:g}s",
        *flags,
    ]
    station = Loopback("prometheus", "127.0.0.1", directory)
    with running_server("prometheus", options, station, directory, port or free_port()) as server:
        yield Prometheus(server.port)
