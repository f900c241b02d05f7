"""TCP limits: ephemeral ports, TIME_WAIT, and tracked connections."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from dshealthd.core.collector import Collector, Fault, Metric, NotAvailable, Sample, every, gauge
from dshealthd.core.result import read_parsed, read_parts
from dshealthd.linux.local_network import RANGE, RESERVED, parse_range, parse_reserved
from dshealthd.linux.tcp_sockets import Sockets

PORTS = gauge(
    "dshealthd_tcp_ephemeral_ports",
    "Ports that the kernel assigns itself: ip_local_port_range less ip_local_reserved_ports.",
)
PORTS_USED = gauge(
    "dshealthd_tcp_ephemeral_ports_used",
    "Ports of ip_local_port_range that at least one socket is bound to, in any state, including "
    "TIME_WAIT. Counts ports, not sockets, because connections to different destinations can "
    "share a port. When the range is full, bind(2) to port 0 fails; connect(2) fails only to a "
    "destination already connected from every port.",
)
MAX_TIME_WAIT = gauge(
    "dshealthd_tcp_time_wait_limit",
    "Limit of sockets in TIME_WAIT; further ones close without it. tcp_max_tw_buckets.",
)
CONNECTIONS = gauge(
    "dshealthd_conntrack_entries",
    "Connections tracked by the kernel's firewall; nf_conntrack_count. Absent without connection "
    "tracking.",
)
CONNECTIONS_LIMIT = gauge(
    "dshealthd_conntrack_entries_limit",
    "Limit of tracked connections; beyond it, packets of new ones are dropped. nf_conntrack_max.",
)

_SETTINGS = {
    "net/netfilter/nf_conntrack_count": CONNECTIONS,
    "net/netfilter/nf_conntrack_max": CONNECTIONS_LIMIT,
    "net/ipv4/tcp_max_tw_buckets": MAX_TIME_WAIT,
}


class TcpLimits(Collector):
    """Reads sysctls of the agent's network namespace, and the ports of all sockets."""

    Options = every("30s")

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the TCP settings that this kernel has, then the ephemeral ports."""
        readers = {name: partial(self._setting, name, metric) for name, metric in _SETTINGS.items()}
        found = [*read_parts({**readers, RANGE: self._ephemeral})]
        if not found:
            raise NotAvailable(f"{self.host.proc('sys/net')} has no TCP settings")
        yield from found

    def _setting(self, name: str, metric: Metric) -> Iterator[Sample]:
        with contextlib.suppress(FileNotFoundError):
            yield metric(read_parsed(self.host.proc(f"sys/{name}"), int))

    def _ephemeral(self) -> Iterator[Sample]:
        reserved: frozenset[int] = frozenset()
        with contextlib.suppress(FileNotFoundError):
            reserved = read_parsed(self.host.proc(f"sys/{RESERVED}"), parse_reserved)
        try:
            ports = read_parsed(self.host.proc(f"sys/{RANGE}"), parse_range)
        except FileNotFoundError:
            return
        yield PORTS(len(ports) - sum(port in ports for port in reserved))
        yield PORTS_USED(sum(port in ports for port in self._held(ports) - reserved))

    def _held(self, ports: range) -> set[int]:
        """Return the local ports of all TCP sockets; of those in TIME_WAIT, only ports in range."""
        sockets = self.context.shared(Sockets)
        leftover = sockets.time_wait_ports(ports[0], ports[-1])
        return {*(found.port for found in sockets.active()), *leftover}
