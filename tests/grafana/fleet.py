"""A fleet in the data folder of a Prometheus.

What one simulated node exports, for as many nodes, some of them with faults.

The text goes through `promtool tsdb create-blocks-from openmetrics`. The shipped rules run on it as
they would on scraped series.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.agents import Scrape
from tests.grafana import jobs
from tests.grafana.documents import FILES
from tests.grafana.jobs import Series
from tests.grafana.server import Answer, write_blocks

OFFSETS = (-720, -420, -60, -5)
"""When there are samples, in seconds from the moment at which they are made.

A Prometheus records nothing from before its blocks' end.
"""
HEALTHY = 2
"""At how many of these times the sick nodes still are well."""
SICK = "node-2"
KEPT_WHOLE = 8
"""How many nodes have all series; the others those of the dashboards about many nodes, without
dense ones that stay 0.
"""
DENSE = 100
"""More series of one metric than this on a node are too many for what is always shown of a fleet.
"""
TROUBLE = (
    "ALERTS",
    "dshealthd:suspect:",
    "dshealthd:node:drift",
    "dshealthd:job:hang",
)
"""What rules record of sick nodes only."""
COUNTERS = ("_total", "_bucket", "_count", "_sum")


def faults(node: int, nodes: int) -> list[Series]:
    """Return the series that a sick node has, or has otherwise than a healthy one. One for each
    condition that panels look for.
    """
    gpu = {"gpu": "3"}
    port = {"device": "mlx5_0", "port": "1"}
    peer = f"node-{node % nodes + 1}"
    off_fabric = {
        "finding": "NvlinkFabricUnhealthy",
        "symptom": "bad-link",
        "component": "node",
        "part": "rack/1",
        "reason": "",
        "severity": "critical",
        "training_job": "",
    }
    lost = off_fabric | {
        "finding": "GpuLost",
        "symptom": "gpu-lost",
        "component": "gpu",
        "part": "GPU 3",
    }
    accused = {"kind": "link", "component": f"node-{node}--{peer}", "reason": "hung"}
    return [
        Series("dshealthd_gpu_up", gpu, 1, 0),
        Series("dshealthd_gpu_fault", {**gpu, "reason": "gpu_lost"}, 1, 1),
        Series("dshealthd_gpu_remapped_rows_pending", {"gpu": "1"}, 0, 1),
        Series(
            "dshealthd_gpu_throttle_active", {"gpu": "2", "reason": "hw_thermal_slowdown"}, 1, 1
        ),
        Series("dshealthd_gpu_utilization_ratio", {"gpu": "5"}, 1, 1),
        Series("dshealthd_gpu_memory_activity_ratio", {"gpu": "5"}, 0.01, 0.01),
        Series("dshealthd_gpu_power_watts", {"gpu": "5"}, 130, 130),
        Series("dshealthd_software_fingerprint", {"component": "kernel"}, 4711, 4711),
        Series("dshealthd_nvlink_effective_bit_error_ratio", {"gpu": "0"}, 1e-15, 1e-11),
        Series("dshealthd_nvlink_up", {"gpu": "0", "link": "7"}, 1, 0),
        Series("dshealthd_nvlinks_up", {"gpu": "0"}, 18, 17),
        Series("dshealthd_nvlink_errors_total", {"gpu": "0", "link": "7", "type": "replay"}, 0, 40),
        Series("dshealthd_nvlink_domain_info", {"gpu": "0", "domain": "rack", "clique": "1"}, 1, 1),
        Series("dshealthd_gpu_fabric_healthy", {"gpu": "6"}, 1, 0),
        Series("dshealthd_finding", lost, 1, 1),
        Series("dshealthd_finding", off_fabric, 1, 1),
        Series("dshealthd_finding_value", off_fabric, 1, 1),
        Series("dshealthd_pcie_link_width", {"gpu": "4"}, 16, 8),
        Series("dshealthd_infiniband_port_up", port, 1, 0),
        Series("dshealthd_infiniband_port_flaps_total", port, 0, 3),
        Series("dshealthd_infiniband_port_errors_total", {**port, "type": "symbol_error"}, 0, 50),
        Series(
            "dshealthd_xid_errors_total", {"gpu": "3", "pci": "0000:3b:00.0", "xid": "79"}, 1, 1
        ),
        Series(
            "dshealthd_xid_last_timestamp_seconds",
            {"gpu": "3", "pci": "0000:3b:00.0", "xid": "79"},
            1.7e9,
            1.7e9,
        ),
        Series("dshealthd_kernel_events_total", {"event": "oom_kill", "device": ""}, 0, 2),
        Series("dshealthd_path_failing", {"path": "/data", "reason": "io_error"}, 1, 1),
        Series("dshealthd_collector_failing", {"collector": "gpu", "reason": "gpu_lost"}, 1, 1),
        Series("dshealthd_worker_failures_total", {"worker": "device", "reason": "timeout"}, 0, 2),
        Series("dshealthd_rendezvous_listener_age_seconds", {"orphaned": "true"}, 3600, 3600),
        Series("dshealthd_rendezvous_listeners", {"orphaned": "true"}, 1, 1),
        Series("dshealthd_clock_maximum_error_seconds", {}, 0.01, 0.01),
        Series("dshealthd_probe_rounds_total", {"kind": "pair", "outcome": "hung"}, 0, 9),
        Series("dshealthd_probe_peer_disagrees", {"peer": peer, "reason": "clock"}, 1, 1),
        Series("dshealthd_probe_skips_total", {"reason": "busy"}, 0, 9),
        Series("dshealthd_suspect", accused, 1, 1),
        Series(
            "dshealthd_suspect",
            {"kind": "gpu", "component": f"{peer}/gpu-3", "reason": "slow"},
            1,
            1,
        ),
    ]


class Fleet:
    """A fleet of so many nodes like one that was scraped, at about the present."""

    def __init__(
        self, template: Scrape, nodes: int, recorded: Answer | None = None, *, sick_every: int = 8
    ) -> None:
        """Prepare it.

        The second of each `sick_every` nodes has every fault. `recorded` is what rules had of such
        a node, and of the fleet, in a smaller one.
        """
        self.nodes = nodes
        self._sick_every = sick_every
        pairs = zip(recorded.series, recorded.values, strict=True) if recorded else ()
        self._recorded = [(labels, values[-1]) for labels, values in pairs]
        self.made = time.time()
        self._template = template

    def write(self, directory: Path) -> None:
        """Write the data folder of a Prometheus."""
        nodes = range(1, self.nodes + 1)
        write_blocks((line for node in nodes for line in self._lines(node)), directory)

    def _lines(self, node: int) -> Iterator[str]:
        """Yield the samples of one node."""
        address = f"10.0.{node // 250}.{node % 250}:10061"
        target = (
            f'cluster="a",leaf="leaf-1",instance="{address}",exporter="dshealthd",job="dshealthd",'
            f'node="node-{node}"'
        )
        times = [f"{self.made + offset:.3f}" for offset in OFFSETS]
        own = {_key(series.name, series.labels): series for series in self._own(node)}
        wanted = None if node <= KEPT_WHOLE else names("fleet", "jobs", "probes")
        yield from (f"up{{{target}}} 1 {when}\n" for when in times)
        for name, found in self._template.series.items():
            for labels, value in found.items() if wanted is None or name in wanted else ():
                series = own.pop(_key(name, dict(labels)), None)
                if series or value or len(found) <= DENSE or node <= KEPT_WHOLE:
                    values = _values(series or Series(name, {}, value, value))
                    yield from _lines(name, target, dict(labels), zip(values, times, strict=True))
        for series in own.values():
            if wanted is None or series.name in wanted:
                yield from _lines(
                    series.name, target, series.labels, zip(_values(series), times, strict=True)
                )
        if self._recorded:
            yield from self._of_rules(node, times[-1])

    def _of_rules(self, node: int, when: str) -> Iterator[str]:
        """Yield the last sample of what rules record of a node and, with the first, of the fleet.
        And of their alerts.
        """
        instance, sick = f"10.0.{node // 250}.{node % 250}:10061", self._sick(node)
        for labels, value in self._recorded:
            of_node = "node" in labels
            if (of_node and (sick or not labels["__name__"].startswith(TROUBLE))) or (
                not of_node and node == 1
            ):
                told = {**labels, "instance": instance} if "instance" in labels else labels
                text = ",".join(
                    f'{name}="{told[name].replace(SICK, f"node-{node}")}"'
                    for name in told
                    if name != "__name__"
                )
                is_verdict = labels["__name__"] == "dshealthd:node:severity"
                yield (
                    f"{labels['__name__']}{{{text}}} "
                    f"{value if sick or not is_verdict else 0:g} {when}\n"
                )

    def _sick(self, node: int) -> bool:
        return node % self._sick_every == 2

    def _own(self, node: int) -> list[Series]:
        """Return what a node has beside the template's series, or otherwise."""
        sick = self._sick(node)
        large = {"kind": "pair", "backend": "gloo", "op": "all_reduce", "size": "67108864"}
        bandwidth = Series("dshealthd_probe_bus_bandwidth_bytes_per_second", large, 1e9, 1e9)
        trips = {"median": 2e-4, "max": 4e-4}
        return [
            bandwidth,
            bandwidth._replace(labels=large | {"kind": "light", "size": "1048576"}),
            Series("dshealthd_probe_operation_seconds", large, 0.1, 0.1),
            *(
                Series("dshealthd_probe_round_trip_seconds", {"statistic": name}, value, value)
                for name, value in trips.items()
            ),
            *jobs.series(node, sick=sick),
            *(faults(node, self.nodes) if sick else ()),
        ]


@functools.cache
def names(*boards: str) -> set[str]:
    """Return the metrics that dashboards read."""
    files = [file for file in FILES if file.stem.removeprefix("dshealthd-") in boards]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"\b(?:dshealthd|process)_\w+", text))


def _values(series: Series) -> list[float]:
    """Return a series' value at each time; counters that ever counted anything grow besides."""
    values = [series.before] * HEALTHY + [series.after] * (len(OFFSETS) - HEALTHY)
    return [
        value + step * (value > 0 and series.name.endswith(COUNTERS))
        for step, value in enumerate(values)
    ]


def _lines(
    name: str, target: str, labels: Mapping[str, str], samples: Iterable[tuple[float, str]]
) -> Iterator[str]:
    """Yield lines. Labels are as a scrape leaves them: empty ones do not exist."""
    text = "".join(f',{label}="{value}"' for label, value in labels.items() if value)
    yield from (f"{name}{{{target}{text}}} {value:g} {when}\n" for value, when in samples)


def _key(name: str, labels: Mapping[str, str]) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return what tells a series from others of its node. The number of a GPU does without its
    UUID.
    """
    return name, frozenset(
        (label, value) for label, value in labels.items() if value and label != "uuid"
    )
