"""The rows of the dashboard *Probes and fabric* about InfiniBand, NVLink, PCIe and Ethernet in the
whole fleet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import Row, Source
from grafana.panels import BLUE, ORANGE, RED, YELLOW, graph, number
from grafana.queries import ROWS, SERIES, grown, grown_or_new, least, most, worst, worst_line
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard

PORT = "cluster, node, device, port"
GPU = "cluster, node, gpu"
SENT = "rate(dshealthd_infiniband_port_transmit_bytes_total{@nodes}[$__rate_interval])"
DOMAIN = "cluster, domain, clique"


def board_rows(source: Source) -> list[Row]:
    """Return the rows about InfiniBand, NVLink, PCIe and Ethernet in the fleet."""
    return [
        Row(title="InfiniBand and RoCE", panels=_infiniband(source)),
        Row(title="NVLink and PCIe", panels=_nvlink(source)),
        Row(
            title="Errors of single ports and links: takes seconds for hundreds of nodes, so "
            "select a few",
            panels=_errors(),
            closed=True,
        ),
        Row(title="Ethernet", panels=_ethernet(), closed=True),
    ]


def _infiniband(source: Source) -> list[dashboard.Panel]:
    up = "dshealthd_infiniband_port_up{@nodes}"
    flaps = f"max by ({PORT}) (increase(dshealthd_infiniband_port_flaps_total{{@nodes}}[12h]))"
    return [
        number(
            "Ports", "InfiniBand and RoCE ports of all nodes.", f"count({up})", unknown="no ports"
        ),
        number(
            "Ports not up",
            "Ports that are not active, including uncabled ones.",
            f"count({up}) - sum({up})",
            unknown="no ports",
        ),
        graph(
            "InfiniBand traffic",
            "Data sent by all ports together, and by the busiest port.",
            (f"sum({SENT})", "all"),
            (f"max({SENT})", "busiest port"),
            unit="Bps",
        ),
        rows(
            "Ports that went down",
            f"""Ports that are down now and were up in the time shown, and flaps in 12 hours: at
            most {ROWS} of each.""",
            [
                NODE_COLUMN,
                Column("Device", "device"),
                Column("Port", "port", width=60),
                Column(
                    "Down",
                    expr=most("max", PORT, f"{up} == 0 and max_over_time({up}[$__range]) == 1"),
                    states={0: ("down", RED)},
                ),
                Column(
                    "Flaps in 12 h",
                    expr=f"round(topk({ROWS}, {flaps} > 0))",
                    steps=((None, YELLOW), (source.limits["infiniband_flaps_in_12h"], ORANGE)),
                ),
            ],
            sort=("Flaps in 12 h", True),
            unknown="",
            size=(12, 8),
        ),
        rows(
            "Port rates",
            f"Number of active ports at each rate; check the rare ones. At most {ROWS} rates.",
            [
                Column("Bytes per second", "rate"),
                Column(
                    "Ports",
                    expr=f"""bottomk({ROWS}, count_values("rate",
                    dshealthd_infiniband_port_rate_bytes_per_second{{@nodes}}))""",
                ),
            ],
            sort=("Ports", False),
            unknown="no ports",
        ),
        graph(
            "Congestion",
            f"""Congestion notifications per second by kind, of all ports together: the {SERIES}
            most frequent. They are not errors by themselves.""",
            worst_line(
                "sum",
                "type",
                "rate(dshealthd_infiniband_port_congestion_total{@nodes}[$__rate_interval])",
            ),
        ),
        graph(
            "Waiting for credits",
            f"""Ticks per second in which ports had data but could not send, in the adapters' own
            unit: the {SERIES} ports that wait most now.""",
            worst_line(
                "max",
                PORT,
                "rate(dshealthd_infiniband_port_transmit_wait_total{@nodes}[$__rate_interval])",
            ),
        ),
    ]


def _nvlink(source: Source) -> list[dashboard.Panel]:
    limits = source.limits
    up = "dshealthd_nvlinks_up{@nodes}"
    return [
        rows(
            "NVLinks that went down",
            f"""GPUs with fewer NVLinks up than earlier in the time shown: at most {ROWS}, those
            that lost most.""",
            [
                NODE_COLUMN,
                Column("GPU", "gpu", width=60),
                Column(
                    "Links lost",
                    expr=most("max", GPU, f"max_over_time({up}[$__range]) - {up} > 0"),
                    steps=((1, RED),),
                ),
            ],
            sort=("Links lost", True),
            size=(12, 8),
        ),
        graph(
            "Bit errors of NVLink 5",
            f"Bit error ratio after correction on a GPU's worst link: the {SERIES} worst GPUs.",
            (
                worst(
                    "max",
                    "cluster, node, gpu",
                    "dshealthd_nvlink_effective_bit_error_ratio{@nodes}",
                ),
                "{{node}} GPU {{gpu}}",
            ),
            unit="sci",
            steps=((limits["nvlink_bit_error_ratio"], RED),),
        ),
        graph(
            "PCIe replays",
            f"Packets resent per minute after an error: the {SERIES} GPUs with most.",
            (
                worst(
                    "max",
                    "cluster, node, gpu",
                    "60 * rate(dshealthd_pcie_replays_total{@nodes}[$__rate_interval])",
                ),
                "{{node}} GPU {{gpu}}",
            ),
            steps=(
                (limits["pcie_replays_per_minute"], ORANGE),
                (limits["pcie_replays_gen5_per_minute"], RED),
            ),
        ),
        rows(
            "PCIe links below full width",
            f"GPUs with fewer lanes than they and their slot allow: at most {ROWS}.",
            [
                NODE_COLUMN,
                Column("GPU", "gpu", width=60),
                Column(
                    "Lanes",
                    expr=most(
                        "max",
                        "cluster, node, gpu",
                        "dshealthd_pcie_link_width{@nodes} < dshealthd_pcie_link_width_max{@nodes}",
                    ),
                ),
            ],
            size=(12, 8),
        ),
        _domains(),
    ]


def _domains() -> dashboard.Panel:
    of_nodes = '{@rules,node=~"$node"}'
    member = f"dshealthd:node:nvlink_domain{of_nodes}"
    registered = f"count by ({DOMAIN}) (dshealthd_nvlink_domain_info{{@nodes}})"
    off = f"dshealthd:node:gpus_off_fabric:count{of_nodes}"
    return rows(
        "NVLink domains",
        f"""NVLink fabrics of several nodes (GB200 NVL72 and the like): the nodes in each, the nodes
        with a GPU that is not registered or that the fabric reports as unhealthy, and the
        registered GPUs. The {ROWS} domains with the fewest nodes.""",
        [
            Column("Domain", "domain"),
            Column("Clique", "clique", width=80),
            Column("Nodes", expr=least("count", DOMAIN, member)),
            Column(
                "Nodes off the fabric",
                expr=most("count", DOMAIN, f"{member} and on (cluster, instance) {off}"),
                steps=((None, ORANGE), (2, RED)),
            ),
            Column("GPUs", expr=f"bottomk({ROWS}, {registered})"),
        ],
        sort=("Nodes off the fabric", True),
        unknown="",
        size=(12, 8),
    )


def _errors() -> list[dashboard.Panel]:
    ports = grown("dshealthd_infiniband_port_errors_total{@nodes}")
    links = grown_or_new(
        "dshealthd_nvlink_errors_total{@nodes}", 'dshealthd_collector_up{@nodes,collector="nvlink"}'
    )
    return [
        rows(
            "Ports with most errors",
            f"""Errors in the time shown, by port and kind: at most {ROWS}. Kinds differ in
            severity; the alerts have a threshold for each.""",
            [
                NODE_COLUMN,
                Column("Device", "device"),
                Column("Port", "port", width=60),
                Column("Kind", "type"),
                Column(
                    "Errors",
                    expr=most("max", f"{PORT}, type", ports),
                    steps=((None, BLUE), (10, YELLOW), (1000, ORANGE)),
                ),
            ],
            sort=("Errors", True),
            size=(12, 8),
        ),
        rows(
            "NVLinks with most errors",
            f"""Errors in the time shown, by link and kind: at most {ROWS}. A driver restart hides
            earlier errors.""",
            [
                NODE_COLUMN,
                Column("GPU", "gpu", width=60),
                Column("Link", "link", width=60),
                Column("Kind", "type"),
                Column(
                    "Errors",
                    expr=most("max", f"{GPU}, link, type", links),
                    steps=((None, BLUE), (1, ORANGE)),
                ),
            ],
            sort=("Errors", True),
            size=(12, 8),
        ),
    ]


def _ethernet() -> list[dashboard.Panel]:
    def interfaces(kind: str) -> tuple[str, str]:
        rate = f"rate(dshealthd_network_{kind}_total{{@nodes}}[$__rate_interval])"
        return worst_line("max", "cluster, node, device", rate)

    return [
        graph(
            "Receive errors",
            f"Bad packets per second: the {SERIES} interfaces with most.",
            interfaces("receive_errors"),
            unit="pps",
        ),
        graph(
            "Receive drops",
            f"Packets dropped per second: the {SERIES} interfaces with most.",
            interfaces("receive_drops"),
            unit="pps",
        ),
        graph(
            "Carrier changes",
            f"Carrier changes per second; a flap is two: the {SERIES} interfaces with most.",
            interfaces("carrier_changes"),
        ),
    ]
