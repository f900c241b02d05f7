"""Serves a snapshot of N series through the agent's own web server.

`python -m bench.series_server PORT N cached|changing`.
"""

from __future__ import annotations

import asyncio
import sys
import time

from dshealthd.config.config import Web
from dshealthd.core.collector import gauge
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.self_metrics import SelfMetrics
from dshealthd.core.snapshot import Snapshot
from dshealthd.web.server import Server

SERIES_PER_METRIC = 20
CHANGES_EVERY = 0.2


def samples(count: int, offset: float) -> CollectionResult:
    """Return a result of `count` series with values that `offset` moves."""
    metrics = [
        gauge(f"dshealthd_bench_{n}", "A metric of the benchmark.", "gpu", "uuid")
        for n in range(count // SERIES_PER_METRIC)
    ]
    made = [
        metric(n + offset, str(n), f"GPU-{n:032x}")
        for metric in metrics
        for n in range(SERIES_PER_METRIC)
    ]
    return CollectionResult(CollectionOutcome.OK, tuple(made))


async def serve(port: int, count: int, *, changing: bool) -> None:
    """Serve until killed; with `changing`, all values change faster than they are scraped."""
    snapshot = Snapshot(time.monotonic, time.time)
    snapshot.expect("bench", 1e9)
    results = [samples(count, 0.25 * n) for n in range(4)]
    snapshot.put("bench", results[0])
    telemetry = SelfMetrics(time.time())
    await Server(
        Web(listen_address=f"127.0.0.1:{port}"),
        snapshot,
        telemetry.samples,
        lambda: ("bench", ""),
        telemetry,
        str,
    ).start()
    turn = 0
    while True:
        await asyncio.sleep(CHANGES_EVERY)
        if changing:
            turn += 1
            snapshot.put("bench", results[turn % len(results)])


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), changing=sys.argv[3] == "changing"))
