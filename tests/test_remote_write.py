"""One Prometheus scrapes everything and passes on to another what its rules read."""

from __future__ import annotations

import json
import time
from pathlib import Path

import yaml

from bench.processes import free_port
from deploy import tier
from tests.grafana.server import prometheus
from tests.http.impostors import serving
from tests.waiting import until

SECONDS = 120.0
ANSWER = b"""\
HTTP/1.1 200 OK\r
Content-Type: text/plain; version=0.0.4\r
\r
dshealthd_finding{finding="GpuLost",symptom="gpu-lost",component="gpu",part="GPU 3",\
severity="critical",training_job="run"} 1
dshealthd_node_gpus_up 7
dshealthd_gpu_memory_used_bytes{gpu="0",uuid="GPU-0"} 5e8
dshealthd_collector_up{collector="gpu"} 1
"""
PASSED_ON = {"up", "dshealthd_finding", "dshealthd_node_gpus_up"}
LABELS = {"node": "n1", "leaf": "l1"}
OF_NODE = '{node="n1"}'


def test_the_tier_reaches_the_receiver(tmp_path: Path) -> None:
    """With the shipped list the receiver has what rules read, with the labels of the target, and
    nothing else; what is not in the tier stays with the sender.
    """
    with serving(lambda connection, _: connection.sendall(ANSWER)) as agent:
        names, found = passed_on(tmp_path, agent)
    assert "dshealthd_gpu_memory_used_bytes" in names
    assert {series["__name__"] for series in found} == PASSED_ON
    assert {series["leaf"] for series in found} == {"l1"}
    (finding,) = (series for series in found if series["__name__"] == "dshealthd_finding")
    assert (finding["part"], finding["training_job"]) == ("GPU 3", "run")


def passed_on(directory: Path, agent: int) -> tuple[set[str], list[dict[str, str]]]:
    """Return the names that a sender scrapes from the agent on a port, and the series that the
    receiver gets.
    """
    port = free_port()
    config = yaml.safe_load(tier.REMOTE_WRITE.read_text(encoding="utf-8"))
    config["remote_write"][0]["url"] = f"http://127.0.0.1:{port}/api/v1/write"
    config["scrape_configs"] = [
        {
            "job_name": "dshealthd",
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{agent}"], "labels": LABELS}],
        }
    ]
    receiver, sender = directory / "receiver", directory / "sender"
    for folder, text in ((receiver, "{}"), (sender, json.dumps(config))):
        folder.mkdir()
        (folder / "prometheus.yml").write_text(text, encoding="utf-8")
    accept = "--web.enable-remote-write-receiver"
    with (
        prometheus(receiver, receiver / "prometheus.yml", accept, port=port) as received,
        prometheus(sender, sender / "prometheus.yml") as scraped,
    ):

        def come() -> list[dict[str, str]]:
            return received.instant(OF_NODE, time.time()).series

        until(lambda: len(come()) >= len(PASSED_ON), come, SECONDS)
        found = come()
        names = {series["__name__"] for series in scraped.instant(OF_NODE, time.time()).series}
    return names, found
