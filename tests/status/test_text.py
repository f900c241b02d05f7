"""What `dshealthd status` prints of a node, from the document of its agent."""

from __future__ import annotations

import json
import time
from typing import Any

from dshealthd.http.document import parse
from dshealthd.status.paint import Paint
from dshealthd.status.query import AgentAnswer
from dshealthd.status.text import _gpus, node
from tests.status_documents import document, finding

GPU = {"gpu": "0", "uuid": "GPU-a"}


def family(*samples: tuple[dict[str, str], float]) -> dict[str, Any]:
    """Return a metric with its samples."""
    return {"samples": [{"labels": labels, "value": value} for labels, value in samples]}


NVLINK: dict[str, Any] = {
    "name": "nvlink", "state": "ok", "detail": "", "reason": None, "faults": []
}  # fmt: skip
PORTS = ({"device": "mlx5_0", "port": "1"}, {"device": "mlx5_1", "port": "1"})
METRICS = {
    "gpu_up": family((GPU, 1), (GPU | {"gpu": "10"}, 1), (GPU | {"gpu": "9"}, 0)),
    "gpu_temperature_celsius": family((GPU | {"sensor": "core"}, 54.4)),
    "gpu_utilization_ratio": family((GPU, 0.985)),
    "gpu_memory_used_bytes": family((GPU, 71 << 30)),
    "gpu_memory_total_bytes": family((GPU, 80 << 30)),
    "gpu_power_watts": family((GPU, 698.7)),
    "nvlink_up": family((GPU | {"link": "0"}, 1), (GPU | {"link": "1"}, 0)),
    "infiniband_port_up": family((PORTS[0], 1), (PORTS[1], 0)),
    "infiniband_port_rate_bytes_per_second": family((PORTS[0], 5e10), (PORTS[1], 5e10)),
}
ROUND = {"members": ["n1", "n2"], "kind": "pair", "outcome": "ok"}
PROBE = {
    "state": "running",
    "detail": "the key is old\na leaf is unknown",
    "name": "n1",
    "members": 2,
    "period_seconds": 300.0,
    "rounds": [ROUND | {"time": 60.0 * minute, "outcome": f"{minute}"} for minute in range(4)],
    "suspects": [{"kind": "link", "component": "n1--n2", "reason": "slow"}],
}


def lines(**other: Any) -> list[str]:
    """Return what is printed of a document."""
    answer = AgentAnswer("n1", "http://n1:1", parse(json.dumps(document(**other)).encode()))
    return [*node(answer, Paint(color=False))]


def test_gpus_links_and_probes() -> None:
    """In columns, in the order of the GPUs' numbers; what is not known is said; the last three
    rounds, with whom.
    """
    metrics = {f"dshealthd_{name}": one for name, one in METRICS.items()}
    form = "%Y-%m-%d %H:%M:%S"
    at = [time.strftime(form, time.localtime(60.0 * minute)) for minute in (3, 2, 1)]
    assert lines(metrics=metrics, probe=PROBE, collectors=[NVLINK]) == [
        "n1  OK  healthy, 1 collector OK",
        "",
        "GPUs",
        "   GPU 0    54 °C   98 % busy    71 of 80 GiB    699 W  1/2 NVLinks",
        "  GPU 9  not readable",
        "  GPU 10  unknown  unknown busy  unknown of unknown  unknown  no NVLink",
        "",
        "Links",
        "  mlx5_0/1  up, 400 Gb/s",
        "  mlx5_1/1  down",
        "",
        "Probes",
        "  the key is old",
        "  a leaf is unknown",
        "  2 members, every 5 min",
        *(f"  {when}  pair  {minute}  with n2" for when, minute in zip(at, "321", strict=True)),
        "  suspect link n1--n2: slow",
    ]
    assert lines(probe=PROBE | {"suspects": []})[-1] == "  no suspects"
    assert lines(probe={"state": "starting", "members": 2})[-1] == "  no suspects"


def test_findings_come_first() -> None:
    """With their trend and what to do; then what cannot be read, and what is watched."""
    unread = finding(severity="unknown", since=None, part="", summary="A source")
    sign = finding(severity="warning", since=998.0, hold_seconds=30.0, part="mlx5_1/1")
    signs = [sign, sign | {"part": ""}]
    read: dict[str, Any] = {"state": "ok", "detail": "", "reason": None, "faults": []}
    collectors = [read | {"name": name} for name in "ab"]
    told: dict[str, Any] = {"collectors": collectors, "watched": signs}
    assert lines(**told) == [
        "n1  OK  healthy so far, 2 collectors OK",
        "  watched   mlx5_1/1: A GPU fell off the bus (for 2 s; a finding after 30 s)",
        "  watched   this node: A GPU fell off the bus (for 2 s; a finding after 30 s)",
    ]
    found = [finding(trend="3 within 7 days"), unread]
    assert lines(**told, verdict="critical", findings=found)[:9] == [
        "n1  CRITICAL  1 problem found, 1 source not readable",
        "  CRITICAL  GPU 3: A GPU fell off the bus (for 10 s, 3 within 7 days)",
        "            GPU 3 of n1 is lost to the driver.",
        "            First step: drain n1 and reboot it",
        "            Runbook: http://n1:1/runbooks/gpu-lost",
        "  UNKNOWN   this node: A source",
        "            GPU 3 of n1 is lost to the driver.",
        "            First step: drain n1 and reboot it",
        "            Runbook: http://n1:1/runbooks/gpu-lost",
    ]


def test_an_agent_that_starts_has_no_broken_source() -> None:
    """What it has not read yet is not called unreadable."""
    starting = finding(severity="unknown", alert="", part="", since=None, summary="Not all read")
    head = lines(verdict="unknown", findings=[starting])[0]
    assert head == "n1  UNKNOWN  not all sources read yet"
    head = lines(verdict="unknown", findings=[starting, finding(severity="unknown")])[0]
    assert head == "n1  UNKNOWN  1 source not readable, not all sources read yet"


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    """Whatever an agent calls them."""
    labels = [{"gpu": gpu} for gpu in ("10", "9", "9" * 5000, "x", "2")]
    samples = [{"labels": of_gpu, "value": 0} for of_gpu in labels]
    shown = [*_gpus({"metrics": {"dshealthd_gpu_up": {"samples": samples}}})]
    assert [line.split()[1][:3] for line in shown] == ["2", "9", "x", "10", "999"]


def test_nvlinks_that_were_not_read_are_not_absent() -> None:
    """Whether the collector has not run, has failed, or could not read this GPU."""
    fault = {"part": "GPU 0", "reason": "timeout", "detail": ""}
    metrics = {"dshealthd_gpu_up": family((GPU, 1))}
    for collectors, said in (
        ([NVLINK], "no NVLink"),
        ([], "unknown NVLink"),
        ([NVLINK | {"state": "pending"}], "unknown NVLink"),
        ([NVLINK | {"faults": [fault]}], "unknown NVLink"),
        ([NVLINK | {"faults": [fault | {"part": "GPU 1"}]}], "no NVLink"),
    ):
        assert said in lines(metrics=metrics, collectors=collectors)[3]


def test_no_finding_lasts_for_less_than_nothing() -> None:
    """Whatever clock has dated it."""
    told: dict[str, Any] = {"verdict": "critical", "findings": [finding(since=30000.0)]}
    assert lines(**told)[1].endswith("A GPU fell off the bus (for 0 s)")
