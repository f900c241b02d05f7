"""Latency and CPU of one scrape at 600, 5,000 and 50,000 series.

Cached, freshly rendered, and node_exporter's textfile collector.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import prometheus_client
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bench.processes import Server, free_port, node_exporter, serving, table
from bench.series_server import CHANGES_EVERY, SERIES_PER_METRIC, samples
from dshealthd.core.exposition import render


def scrapes(server: Server, count: int, pause: float) -> tuple[float, float]:
    """Return the medians of latency and of CPU time of one scrape, in milliseconds.

    What the server spends while idle is taken off.
    """
    server.scrape()
    before = server.cpu()
    time.sleep(2.0)
    idle = (server.cpu() - before) / 2.0
    latencies, spent = [], []
    for _ in range(count):
        time.sleep(pause)
        before, started = server.cpu(), time.perf_counter()
        server.scrape()
        took = time.perf_counter() - started
        time.sleep(0.02)
        latencies.append(1000 * took)
        spent.append(1000 * (server.cpu() - before - idle * (took + 0.02)))
    return median(latencies), median(spent)


class Families(Collector):
    """The same series as a collector of prometheus_client."""

    def __init__(self, count: int) -> None:
        """Keep the families, so that only their encoding is measured."""
        self.families: dict[str, GaugeMetricFamily] = {}
        for metric, labels, value in samples(count, 0.25).samples:
            family = self.families.setdefault(
                metric.name, GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
            )
            family.add_metric(labels, value)

    def collect(self) -> list[GaugeMetricFamily]:
        """Return the families."""
        return list(self.families.values())


def encoders(count: int, repetitions: int) -> tuple[float, float]:
    """Return the medians of the time to encode so many series, ours and prometheus_client's, in
    milliseconds, measured in turn.
    """
    registry = prometheus_client.CollectorRegistry()
    registry.register(Families(count))
    made = samples(count, 0.25).samples
    ours, theirs = [], []
    for _ in range(repetitions):
        started = time.perf_counter()
        render(made).encode()
        between = time.perf_counter()
        prometheus_client.generate_latest(registry)
        ours.append(1000 * (between - started))
        theirs.append(1000 * (time.perf_counter() - between))
    return median(ours), median(theirs)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scrapes", type=int, default=40)
    count = parser.parse_args().scrapes
    rows: list[list[object]] = []
    codes: list[list[object]] = []
    for series in (600, 5_000, 50_000):
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (directory / "bench.prom").write_text(
                render(samples(series, 0.25).samples), encoding="utf-8"
            )
            flags = [
                "--collector.disable-defaults",
                "--collector.textfile",
                f"--collector.textfile.directory={directory}",
            ]
            theirs = stack.enter_context(node_exporter(*flags))
            ours = {}
            for kind in ("cached", "changing"):
                port = free_port()
                command = [
                    sys.executable,
                    "-m",
                    "bench.series_server",
                    str(port),
                    str(series),
                    kind,
                ]
                ours[kind] = stack.enter_context(serving(kind, command, port))
            cached = scrapes(ours["cached"], count, 0.05)
            fresh = scrapes(ours["changing"], count, CHANGES_EVERY)
            other = scrapes(theirs, count, 0.05)
        rows.append([series, *cached, *fresh, *other, cached[1] / other[1], fresh[1] / other[1]])
        mine, reference = encoders(series, max(5, 20_000 // series))
        codes.append([series, mine, reference, mine / reference])
    print(f"One scrape, ms, medians of {count}; {SERIES_PER_METRIC} series a metric, two labels\n")
    head = [
        "series",
        "cached latency",
        "CPU",
        "rendered latency",
        "CPU",
        "node_exporter latency",
        "CPU",
        "ratio CPU cached",
        "ratio CPU rendered",
    ]
    print(table(head, rows))
    print("Encoding alone, ms\n")
    print(table(["series", "dshealthd", "prometheus_client", "ratio"], codes))


if __name__ == "__main__":
    main()
