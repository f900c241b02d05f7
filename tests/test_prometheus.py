"""A real Prometheus scrapes the agent that the README's command starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from bench.processes import free_port
from tests.agents import first_line

ROOT = Path(__file__).parent.parent
QUERIES = (
    "up",
    "dshealthd_memory_total_bytes",
    'dshealthd_tcp_sockets{state="listen"}',
    "dshealthd_open_files_limit",
)


def query(port: int, expression: str) -> dict[str, float]:
    """Return the values of an instant query by their instance. Empty while Prometheus is not
    ready.
    """
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            result = json.load(answer)["data"]["result"]
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {series["metric"]["instance"]: float(series["value"][1]) for series in result}


@pytest.mark.timeout(400)
def test_prometheus_has_this_machines_values(tmp_path: Path) -> None:
    """`./dev run` starts an agent; Prometheus scrapes it, finds it up, and a query returns this
    machine's memory and limits.
    """
    prometheus = shutil.which("prometheus")
    assert prometheus, "./dev test installs Debian's prometheus"
    port, agent_port = free_port(), free_port()
    target = f"127.0.0.1:{agent_port}"
    scrape = {
        "job_name": "dshealthd",
        "scrape_interval": "3s",  # and as long for an answer
        "static_configs": [{"targets": [target]}],
    }
    (tmp_path / "prometheus.yml").write_text(
        json.dumps({"scrape_configs": [scrape]}), encoding="utf-8"
    )
    commands = [
        [str(ROOT / "dev"), "run", "--web.listen-address", target],
        [
            prometheus,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
    ]
    log = (tmp_path / "log").open("wb")
    agent = subprocess.Popen(
        commands[0], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    server = subprocess.Popen(commands[1], stdout=log, stderr=log)
    try:
        assert f"page http://{target}/" in first_line(agent, 120)
        end = time.monotonic() + 60
        while query(port, "up").get(target) != 1 or not all(
            target in query(port, expression) for expression in QUERIES
        ):
            assert time.monotonic() < end, (tmp_path / "log").read_text()
            time.sleep(0.3)
        total = int(Path("/proc/meminfo").read_text(encoding="ascii").split()[1]) * 1024
        assert query(port, "dshealthd_memory_total_bytes")[target] == total
        limit = int(Path("/proc/sys/fs/file-max").read_text(encoding="ascii"))
        assert query(port, 'dshealthd_open_files_limit{scope="system"}')[target] == pytest.approx(
            limit
        )
    finally:
        server.terminate()
        os.killpg(agent.pid, signal.SIGTERM)
        assert agent.wait(60) in {0, -signal.SIGTERM}
        server.wait(60)
        assert agent.stdout is not None
        agent.stdout.close()
        log.close()
