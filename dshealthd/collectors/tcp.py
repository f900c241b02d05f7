"""TCP sockets by state, IPv4 and IPv6, in the agent's network namespace."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dshealthd.core.collector import Collector, every, gauge
from dshealthd.linux.sock_diag import TIME_WAIT_TIMER, TcpState
from dshealthd.linux.tcp_sockets import Sockets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.core.collector import Fault, Sample
    from dshealthd.linux.sock_diag import TcpSocket

SOCKETS = gauge(
    "dshealthd_tcp_sockets",
    "TCP sockets, IPv4 and IPv6, in the agent's network namespace. From netlink, or from "
    "/proc/net/tcp if netlink is refused; large numbers in time_wait from /proc/net/sockstat.",
    "state",
)


def count_states(sockets: list[TcpSocket]) -> dict[TcpState, int]:
    """Return the number of TCP sockets in each state."""
    states = Counter(found.state for found in sockets)
    return {state: states[state] for state in TcpState}


def count_stand_ins(sockets: list[TcpSocket]) -> int:
    """Return the number of TCP sockets in FIN_WAIT2 whose process has closed them.

    `/proc/net/sockstat` counts them under `tw`.
    """
    stand_in = TcpState.FIN_WAIT2, TIME_WAIT_TIMER
    return sum((found.state, found.timer) == stand_in for found in sockets)


class Tcp(Collector):
    """Lets the kernel leave out sockets in TIME_WAIT if there are many, and takes their number from
    the kernel's own count.
    """

    # The kernel walks its whole socket table, which `rendezvous` shares at the same interval.
    Options = every("15s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the number of TCP sockets in every state, including 0."""
        sockets = self.context.shared(Sockets)
        active = sockets.active()
        counts = count_states(active)
        summary = sockets.summary()
        if summary is not None and not sockets.complete():
            counts[TcpState.TIME_WAIT] = max(0, summary.time_wait - count_stand_ins(active))
        for state, count in counts.items():
            yield SOCKETS(count, state.label)
