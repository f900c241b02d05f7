"""The row of the dashboard *Probes and fabric* about which nodes can probe each other.

It shows members, clocks, and disagreements between nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grafana.board import NO_PROBES, Source
from grafana.panels import GREEN, ORANGE, RED, YELLOW, graph, node_link, number
from grafana.queries import ROWS, SERIES, increase, worst_of
from grafana.tables import NODE_COLUMN, Column, rows

if TYPE_CHECKING:
    from grafana_foundation_sdk.models import dashboard


def _named(peers: str) -> str:
    """Return the series with a label `named`, the node that the member `peer` is: in Kubernetes
    members are addresses.
    """
    nodes = """label_replace(label_replace(dshealthd:member:node{@rules}, "named", "$1", "node",
    "(.+)"), "peer", "$1", "member", "(.+)")"""
    return f"""{peers} * on (cluster, peer) group_left (named) {nodes} or
    label_replace({peers} unless on (cluster, peer) {nodes}, "named", "$1", "peer", "(.+)")"""


def panels(source: Source) -> list[dashboard.Panel]:
    """Return the panels about members of the probes, their clocks and disagreements."""
    clocks = 'dshealthd_probe_clock_offset_seconds{@nodes,statistic="median"}'
    probing = "dshealthd_probe_up{@nodes}"
    confirmed = increase("dshealthd_probe_confirmations_total{@nodes}", probing, "1h")
    bad = ((None, GREEN), (1, ORANGE))
    disagree = """(max by (cluster, node, peer, reason) (dshealthd_probe_peer_disagrees{@nodes}) ==
    1)"""
    return [
        number(
            "Nodes that probe",
            "Nodes whose probes are running, whether or not they have rounds with any peer.",
            "sum(dshealthd_probe_up{@nodes})",
            unknown=NO_PROBES,
        ),
        number(
            "Nodes that cannot probe",
            "Nodes with probes configured but without usable members, a key or an address.",
            "count(dshealthd_probe_up{@nodes}) - sum(dshealthd_probe_up{@nodes})",
            steps=bad,
            unknown=NO_PROBES,
        ),
        number(
            "Member lists",
            """Number of different member lists among the agents, by hash; of several clusters, of
            the one with most. Nodes with different lists decline each other's rounds.""",
            """max(count by (cluster) (count_values by (cluster) ("hash",
            dshealthd_members_hash{@fleet})))""",
            steps=((None, GREEN), (2, RED)),
            unknown=NO_PROBES,
        ),
        number(
            "Confirmations",
            "Extra rounds per hour to confirm or clear suspicions.",
            f"sum({confirmed}) or 0 * sum({probing})",
            unknown=NO_PROBES,
        ),
        number(
            "Hung workers",
            "Probe workers hung in the kernel that cannot be killed.",
            "sum(dshealthd_probe_workers_stuck{@nodes}) or 0 * sum(dshealthd_probe_up{@nodes})",
            steps=((None, GREEN), (1, RED)),
            unknown=NO_PROBES,
        ),
        number(
            "Without fork server",
            """Nodes on which the fork server of the probe workers is not running. It is started on
            demand, so a high number is normal.""",
            "count(dshealthd_probe_parent_up{@nodes} == 0) or 0 * sum(dshealthd_probe_up{@nodes})",
            unknown=NO_PROBES,
        ),
        rows(
            "Set up differently",
            f"""Pairs of nodes that decline each other's rounds because their clocks, member lists,
            versions or addresses differ: at most {ROWS}.""",
            [
                NODE_COLUMN,
                Column("Peer", "named", link=node_link("${__data.fields.named}")),
                Column("Reason", "reason"),
                Column(expr=f"topk({ROWS}, {_named(disagree)})"),
            ],
            size=(12, 8),
        ),
        graph(
            "Clocks",
            f"""Seconds by which the clocks of a node's peers are ahead of its own: the median over
            its last peers, for the {SERIES} nodes that are furthest off. The alert fires at the
            threshold in either direction.""",
            (
                worst_of(
                    f"max by (cluster, node) ({clocks})",
                    "cluster, node",
                    f"max by (cluster, node) (abs({clocks}))",
                ),
                "{{node}}",
            ),
            unit="s",
            steps=((source.limits["clock_offset_seconds"], YELLOW),),
            minimum=None,
            size=(6, 8),
        ),
        graph(
            "Echoes",
            """Round trip of an echo between agents: the median of all nodes' medians, and the
            slowest node's median.""",
            (
                'quantile(0.5, dshealthd_probe_round_trip_seconds{@nodes,statistic="median"})',
                "median",
            ),
            ('max(dshealthd_probe_round_trip_seconds{@nodes,statistic="median"})', "slowest node"),
            unit="s",
            size=(6, 8),
        ),
    ]
