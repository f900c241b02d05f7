"""The row of the dashboard *Node* about its ports.

It shows InfiniBand, Ethernet, and the probes' measurements of paths to other nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.panels import GREEN, ORANGE, RED, graph, timeline
from grafana.queries import SERIES, worst, worst_line

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

    from grafana.board import Source

PORT = "{{device}} port {{port}}"


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels about a node's ports and its paths to other nodes."""
    limits = source.limits
    return [
        timeline(
            "InfiniBand and RoCE ports",
            """Ports that are active with their link up. A port whose device has disappeared counts
            as down.""",
            "max by (device, port) (dshealthd_infiniband_port_up{@node})",
            PORT,
            {1: ("up", GREEN), 0: ("down", RED)},
        ),
        graph(
            "InfiniBand traffic",
            "Data sent by each port, and the port's rate.",
            (
                """max by (device, port)
                (rate(dshealthd_infiniband_port_transmit_bytes_total{@node}[$__rate_interval]))""",
                PORT,
            ),
            ("max(dshealthd_infiniband_port_rate_bytes_per_second{@node})", "limit"),
            unit="Bps",
            limits=["limit"],
        ),
        graph(
            "InfiniBand errors",
            f"""Errors per minute by kind: the {SERIES} highest now. The alerts have a threshold for
            each kind. Kinds that end with flush_error also grow when a job ends.""",
            worst_line(
                "max",
                "device, port, type",
                "60 * rate(dshealthd_infiniband_port_errors_total{@node}[$__rate_interval])",
            ),
        ),
        graph(
            "Waiting to send, congestion",
            """Congestion notifications per second, and ticks per second in which ports waited for
            credits, in the adapter's own unit.""",
            (
                """sum by (device, type)
                (rate(dshealthd_infiniband_port_congestion_total{@node}[$__rate_interval]))""",
                "{{device}} {{type}}",
            ),
            (
                """sum by (device)
                (rate(dshealthd_infiniband_port_transmit_wait_total{@node}[$__rate_interval]))""",
                "{{device}} wait",
            ),
        ),
        graph(
            "Network traffic",
            f"Bytes sent by each interface, without RDMA: the {SERIES} that send most now.",
            worst_line(
                "max",
                "device",
                "rate(dshealthd_network_transmit_bytes_total{@node}[$__rate_interval])",
            ),
            unit="Bps",
        ),
        graph(
            "Network errors and drops",
            f"Bad or dropped packets per second: the {SERIES} interfaces with most of each now.",
            *(
                (
                    worst(
                        "max",
                        "device",
                        f"rate(dshealthd_network_{kind}_total{{@node}}[$__rate_interval])",
                    ),
                    f"{{{{device}}}} {kind.replace('_', ' ')}",
                )
                for kind in ("receive_errors", "receive_drops", "transmit_errors", "transmit_drops")
            ),
            unit="pps",
        ),
        graph(
            "Adapter temperature",
            "Temperature of adapters and their transceiver modules.",
            (
                "max by (device, sensor) (dshealthd_infiniband_temperature_celsius{@node})",
                "{{device}} {{sensor}}",
            ),
            unit="celsius",
            minimum=None,
        ),
        graph(
            "Clock",
            """Seconds by which peers' clocks are ahead of this node's, from probes, and the
            kernel's own bound of the clock error.""",
            ('max(dshealthd_probe_clock_offset_seconds{@node,statistic="median"})', "peers ahead"),
            ("max(dshealthd_clock_maximum_error_seconds{@node})", "largest error"),
            unit="s",
            steps=((limits["clock_offset_seconds"], ORANGE),),
            minimum=None,
        ),
        graph(
            "Round trips of probes",
            "Round trip of an echo between agents, over the last light rounds that this node led.",
            ("max by (statistic) (dshealthd_probe_round_trip_seconds{@node})", "{{statistic}}"),
            unit="s",
        ),
    ]
