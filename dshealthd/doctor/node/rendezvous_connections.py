"""No connection to a rendezvous port waits for an answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.doctor.check import Outcome, Result
from dshealthd.doctor.snapshot_check import snapshot_check
from dshealthd.plural import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.doctor.node_context import NodeContext


def _more(context: NodeContext) -> Iterator[Result]:
    waiting = context.series.value("rendezvous_client_sockets", state="syn_sent")
    if waiting:
        yield Result(
            Outcome.WARNING,
            f"{plural(waiting, 'connection')} to a rendezvous port without an answer yet: a "
            "firewall or a dead route drops packets, or MASTER_ADDR is wrong",
            remedy="ss -tnpo state syn-sent",
            value=f"{waiting:g}",
            limit="0",
            source="dshealthd_rendezvous_client_sockets",
        )


def _looked(context: NodeContext) -> str:
    connected = context.series.value("rendezvous_client_sockets", state="established") or 0.0
    return f"{plural(connected, 'connection')} to rendezvous ports, none waiting for an answer"


CHECK = snapshot_check(
    "rendezvous-unreachable",
    "rendezvous-connections",
    "Connections to rendezvous ports are answered",
    ("rendezvous",),
    _looked,
    _more,
)
