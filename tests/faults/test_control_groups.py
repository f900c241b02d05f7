"""The agent at the limits of its control group: of processes and of memory."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests import cgroups
from tests.agents import Scrape, running

CONFIG = """
[collectors.memory]
interval = "200ms"
[collectors.network]
interval = "200ms"
[collectors.infiniband]
enabled = false
"""
LIMIT = 256 << 20
"""Bytes for the agent, its workers and what presses on them."""
HOG = f"kept = []\nwhile True: kept.append(b'x' * {1 << 20})"


def test_26_pids_max_is_reached(tmp_path: Path) -> None:
    """Workers that run go on; one that ends is `cannot_start` until there is room again."""
    with cgroups.group("pids") as group, running(tmp_path, CONFIG) as agent:
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="network") == 1)
        for pid in (agent.pid, *agent.workers()):
            group.add(pid)
        group.limit_processes(1)  # fewer than there are: nothing more is started
        name = "dshealthd_collector_last_success_timestamp_seconds"
        before = agent.scrape().value(name, collector="network") or 0.0
        agent.wait(lambda s: (s.value(name, collector="network") or 0.0) > before)
        for worker in agent.workers():
            os.kill(worker, signal.SIGKILL)
        why = {"collector": "network", "reason": "cannot_start"}
        scrape = agent.wait(lambda s: s.value("dshealthd_collector_failing", **why) == 1)
        assert scrape.value("dshealthd_collector_up", collector="memory") == 1
        group.limit_processes(10_000)
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="network") == 1, 70.0)


def sampled_since(moment: float, scrape: Scrape) -> bool:
    """Tell whether the host's memory has been read since a moment, in Unix time."""
    name = "dshealthd_collector_last_success_timestamp_seconds"
    return (scrape.value(name, collector="memory") or 0.0) > moment


def test_28_memory_is_short(tmp_path: Path) -> None:
    """While others fill its group's memory again and again, the agent answers and stays fresh."""
    with cgroups.group("memory") as group, running(tmp_path, CONFIG) as agent:
        agent.wait(lambda s: s.value("dshealthd_collector_up", collector="network") == 1)
        for pid in (agent.pid, *agent.workers()):
            group.add(pid)
        group.limit_memory(LIMIT)
        for _ in range(3):
            hog = subprocess.Popen([sys.executable, "-c", f"input()\n{HOG}"], stdin=subprocess.PIPE)
            try:
                group.add(hog.pid)
                hog.communicate(b"\n", timeout=60)
            finally:
                hog.kill()
            assert hog.returncode == -signal.SIGKILL
            agent.wait(functools.partial(sampled_since, time.time()))
        assert agent.process.poll() is None
