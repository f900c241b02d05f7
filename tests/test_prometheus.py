"""A real Prometheus scrapes the agent that the README's command starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from bench.processes import free_port
from tests.agents import first_line
from tests.grafana.server import prometheus
from tests.waiting import until

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(400)
def test_prometheus_has_this_machines_values(tmp_path: Path) -> None:
    """`./dev run` starts an agent; Prometheus scrapes it, finds it up, and queries return this
    machine's memory and limits, and its sockets.
    """
    target = f"127.0.0.1:{free_port()}"
    scrape = {
        "job_name": "dshealthd",
        "scrape_interval": "3s",  # and as long for an answer
        "static_configs": [{"targets": [target]}],
    }
    config = tmp_path / "prometheus.yml"
    config.write_text(json.dumps({"scrape_configs": [scrape]}), encoding="utf-8")
    with (tmp_path / "agent.log").open("w") as log:
        agent = subprocess.Popen(
            [str(ROOT / "dev"), "run", "--web.listen-address", target],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        with prometheus(tmp_path, config) as server:
            assert f"page http://{target}/" in first_line(agent, 120)

            def values() -> list[float]:
                return [
                    value
                    for name in (
                        "up",
                        'dshealthd_tcp_sockets{state="listen"} > bool 0',
                        "dshealthd_memory_total_bytes",
                        'dshealthd_open_files_limit{scope="system"}',
                    )
                    for (value,) in server.instant(name, time.time()).values
                ]

            until(lambda: len(found := values()) == 4 and found[0], values, 60)
            total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
            limit = int(Path("/proc/sys/fs/file-max").read_text(encoding="ascii"))
            assert values() == [1, 1, total, pytest.approx(limit)]
    finally:
        os.killpg(agent.pid, signal.SIGTERM)
        assert agent.wait(60) in {0, -signal.SIGTERM}
        assert agent.stdout is not None
        agent.stdout.close()
