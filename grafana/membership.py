"""The row of the dashboard *Probes and fabric* about which nodes can probe each other.

Members, clocks, and what nodes disagree in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import NO_PROBES, Source, node_link, series_link
from grafana.panels import GREEN, ORANGE, RED, YELLOW, graph, number
from grafana.queries import ROWS, SERIES, worst
from grafana.tables import Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels."""
    bad = ((None, GREEN), (1, ORANGE))
    return [
        number(
            "Nodes that probe",
            "Nodes whose probes run, whether or not they meet anybody.",
            "sum(dshealthd_probe_up{@nodes})",
            unknown=NO_PROBES,
        ),
        number(
            "Nodes that cannot probe",
            "Nodes with probes configured that lack usable members, a key or an address.",
            "count(dshealthd_probe_up{@nodes}) - sum(dshealthd_probe_up{@nodes})",
            steps=bad,
            unknown=NO_PROBES,
        ),
        number(
            "Lists of members",
            "How many different lists of members the agents have, by their hash. Nodes that "
            "differ in it have no rounds with each other.",
            'count(count_values("hash", dshealthd_members_hash{@fleet}))',
            steps=((None, GREEN), (2, RED)),
            unknown=NO_PROBES,
        ),
        number(
            "Confirmations",
            "Extra rounds an hour that suspicions asked for.",
            "sum(increase(dshealthd_probe_confirmations_total{@nodes}[1h])) or 0 * "
            "sum(dshealthd_probe_up{@nodes})",
            unknown=NO_PROBES,
        ),
        number(
            "Workers that hang",
            "Probe workers that hang in the kernel and cannot be killed.",
            "sum(dshealthd_probe_workers_stuck{@nodes}) or 0 * sum(dshealthd_probe_up{@nodes})",
            steps=((None, GREEN), (1, RED)),
            unknown=NO_PROBES,
        ),
        number(
            "Without torch",
            """Nodes where the process that runs collectives is not kept now: it is started on demand, so a high number is normal.""",
            "count(dshealthd_probe_parent_up{@nodes} == 0) or 0 * sum(dshealthd_probe_up{@nodes})",
            unknown=NO_PROBES,
        ),
        rows(
            "Set up differently",
            "Pairs of nodes that decline each other's rounds, as their clocks, lists of "
            f"members or versions differ: at most {ROWS}.",
            [
                Column(title="Node", label="node", link=node_link()),
                Column(title="Peer", label="peer", link=node_link("${__data.fields.peer}")),
                Column(title="Reason", label="reason"),
                Column(
                    title="",
                    expr=(
                        f"topk({ROWS}, max by (cluster, node, peer, reason) "
                        f"(dshealthd_probe_peer_disagrees{{@nodes}}) == 1)"
                    ),
                ),
            ],
        ),
        graph(
            "Clocks",
            f"""How far the clocks of a node's peers are ahead of its own: the median over its last peers, of the {SERIES} nodes that are
            furthest off. The alert fires at the threshold either way.""",
            (
                worst(
                    "max by (cluster, node) "
                    '(dshealthd_probe_clock_offset_seconds{@nodes,statistic="median"})',
                    "cluster, node",
                    "max by (cluster, node) "
                    '(abs(dshealthd_probe_clock_offset_seconds{@nodes,statistic="median"}))',
                ),
                "{{node}}",
            ),
            unit="s",
            steps=((source.limits["clock_offset_seconds"], YELLOW),),
            minimum=None,
            link=series_link(),
            size=(6, 8),
        ),
        graph(
            "Echoes",
            "Time of an echo between agents: the median of all nodes' medians, and the node "
            "with the slowest.",
            (
                'quantile(0.5, dshealthd_probe_round_trip_seconds{@nodes,statistic="median"})',
                "median",
            ),
            ('max(dshealthd_probe_round_trip_seconds{@nodes,statistic="median"})', "slowest node"),
            unit="s",
            size=(6, 8),
        ),
    ]
