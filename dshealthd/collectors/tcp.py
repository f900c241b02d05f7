"""TCP sockets by state, IPv4 and IPv6, in the agent's network namespace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dshealthd.core.collector import Collector, Fault, Sample, Worker, every, gauge
from dshealthd.linux.sock_diag import TIME_WAIT_TIMER, TcpState
from dshealthd.linux.tcp_sockets import Sockets

SOCKETS = gauge(
    "dshealthd_tcp_sockets",
    "TCP sockets, IPv4 and IPv6, in the agent's network namespace. From netlink, or from "
    "/proc/net/tcp if netlink is refused; large numbers in time_wait from /proc/net/sockstat.",
    "state",
)


_STAND_IN = TcpState.FIN_WAIT2, TIME_WAIT_TIMER
"""A socket that its process has closed, which `/proc/net/sockstat` counts under `tw`."""


class Tcp(Collector):
    """Takes the number of sockets in TIME_WAIT from the kernel's count if there are many."""

    # The kernel walks its whole socket table, which `rendezvous` shares at the same interval.
    worker = Worker.STORAGE
    Options = every("15s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the number of TCP sockets in every state, including 0."""
        sockets = self.context.shared(Sockets)
        active = sockets.active()
        counts = Counter(found.state for found in active)
        summary = sockets.summary()
        if summary is not None and not sockets.complete():
            stand_ins = sum((found.state, found.timer) == _STAND_IN for found in active)
            counts[TcpState.TIME_WAIT] = max(0, summary.time_wait - stand_ins)
        for state in TcpState:
            yield SOCKETS(counts[state], state.label)
