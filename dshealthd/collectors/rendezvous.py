"""Ports that jobs rendezvous on: sockets that hold them, their clients, orphaned listeners."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Sample,
    Worker,
    gauge,
)
from dshealthd.core.options import Duration, option
from dshealthd.jobs.processes import part_of
from dshealthd.linux.process import TICKS, uptime
from dshealthd.linux.sock_diag import TcpSocket, TcpState
from dshealthd.linux.socket_owners import Search
from dshealthd.linux.tcp_sockets import Sockets

SOCKETS = gauge(
    "dshealthd_rendezvous_sockets",
    "TCP sockets bound to a rendezvous port, which keep a job from binding it. IPv4 and IPv6, in "
    "the agent's network namespace.",
    "state",
)
CLIENTS = gauge(
    "dshealthd_rendezvous_client_sockets",
    "TCP sockets connected to a rendezvous port, here or on another node: ranks that are "
    "connecting (syn_sent) or connected (established). They do not hold the port.",
    "state",
)
PORTS = gauge("dshealthd_rendezvous_ports", "Number of configured rendezvous ports.")
PORTS_USED = gauge(
    "dshealthd_rendezvous_ports_used",
    "Rendezvous ports that at least one TCP socket is bound to, including TIME_WAIT.",
)
LISTENERS = gauge(
    "dshealthd_rendezvous_listeners",
    "Listeners on rendezvous ports by whether their process has lost its parent. A launcher "
    "detached on purpose (nohup) is an orphan too. unknown: the process has not been found yet, "
    "is not visible to the agent, or is a child of a container's first process.",
    "orphaned",
)
AGE = gauge(
    "dshealthd_rendezvous_listener_age_seconds",
    "Age of the oldest listener: since the agent first saw it, or since its process started if "
    "that was before the agent.",
    "orphaned",
)

ORPHAN_AGE = gauge(
    "dshealthd_rendezvous_orphan_age_seconds",
    "Age of an orphaned listener by port, measured as dshealthd_rendezvous_listener_age_seconds. "
    "At most 16 ports, the lowest.",
    "port",
)
ORPHAN_CONNECTIONS = gauge(
    "dshealthd_rendezvous_orphan_connections",
    "Established connections on the port of an orphaned listener: ranks that still use it.",
    "port",
)

UNPRIVILEGED, MAX_PORT = 1024, 65535
"""Ports that every user may bind: those below are services' (PROT_SOCK of the kernel)."""
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
MAX_ORPHANS = 16
"""Ports of orphans that get their own series."""
MAX_FOLLOWED = 64
"""Listeners whose owners are searched for; the owners of further ones are unknown."""
_CLIENT_STATES = (TcpState.SYN_SENT, TcpState.ESTABLISHED)


def parse_ports(text: str) -> tuple[int, int]:
    """Return the first and last port of a range such as "29500-29600", or one port. ValueError."""
    match = _PORTS.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not UNPRIVILEGED <= low <= high <= MAX_PORT:
        raise ValueError(
            f'"{text}" is not a range of ports from {UNPRIVILEGED} to {MAX_PORT} such as '
            '"29500-29600"'
        )
    return low, high


@dataclass(frozen=True, kw_only=True)
class RendezvousOptions(CollectorOptions):
    """Options of this collector."""

    interval: Duration = option(
        "15s",
        "Time from one sample to the next; shares its read of the socket table with tcp.",
        minimum="100ms",
    )
    ports: str = option("29500-29600", "Ports that jobs use as MASTER_PORT.")

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invalid option of rendezvous ports, and why."""
        try:
            parse_ports(self.ports)
        except (ValueError, ArithmeticError) as error:
            yield "ports", str(error)


class RendezvousPorts(Collector):
    """Requests only the range's ports if there are many sockets; owners only of listeners.

    Runs in a worker, as the environment of an owner is read, which its user can make wait.
    """

    worker = Worker.STORAGE

    Options = RendezvousOptions

    def __init__(self, options: RendezvousOptions, context: Context) -> None:
        super().__init__(options, context)
        self._first, self._last = parse_ports(options.ports)
        self._search = Search(
            context.host,
            context.monotonic,
            lambda pid: context.entering(part_of(context.host, pid)) is None,
        )
        self._seen: dict[int, tuple[float, bool]] = {}
        """Listeners by inode: when they were first seen, and whether the agent saw them appear."""
        self._watching = False

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the sockets on rendezvous ports by state, then the listeners."""
        sockets = self.context.shared(Sockets)
        active = sockets.active()
        held = [found for found in active if self._first <= found.port <= self._last]
        counts = Counter(found.state for found in held)
        leftover = sockets.time_wait_ports(self._first, self._last)
        counts[TcpState.TIME_WAIT] = len(leftover)
        for state in TcpState:
            yield SOCKETS(counts[state], state.label)
        clients = Counter(
            found.state for found in active if self._first <= found.peer_port <= self._last
        )
        for state in _CLIENT_STATES:
            yield CLIENTS(clients[state], state.label)
        yield PORTS(self._last - self._first + 1)
        yield PORTS_USED(len({*leftover, *(found.port for found in held)}))
        orphans: dict[int, float] = {}
        listeners = [found for found in held if found.state == TcpState.LISTEN]
        yield from self._listeners(listeners, orphans)
        established = Counter(found.port for found in held if found.state == TcpState.ESTABLISHED)
        for port, age in sorted(orphans.items())[:MAX_ORPHANS]:
            yield ORPHAN_AGE(age, str(port))
            yield ORPHAN_CONNECTIONS(established[port], str(port))

    def close(self) -> None:
        """Stop a search for listeners' owners in progress."""
        self._search.close()

    def _listeners(self, listeners: list[TcpSocket], orphans: dict[int, float]) -> Iterator[Sample]:
        """Yield the samples of listeners on rendezvous ports.

        Fill `orphans` with the ages of the orphaned ones, by port.
        """
        now = self.context.monotonic()
        inodes = [found.inode for found in listeners]
        self._seen = {inode: self._seen.get(inode, (now, self._watching)) for inode in inodes}
        self._watching = True
        owners = self._search.owners({inode for inode in inodes[:MAX_FOLLOWED] if inode})
        since_boot = uptime(self.host) if owners else 0.0
        ages: dict[str, list[float]] = {"true": [], "false": [], "unknown": []}
        for listener in listeners:
            port, inode = listener.port, listener.inode
            since, appeared = self._seen[inode]
            age, orphaned = now - since, None
            if (owner := owners.get(inode)) is not None:
                orphaned = owner.orphaned
                if not appeared:
                    age = max(age, since_boot - owner.process.start / TICKS)
            if orphaned:
                orphans[port] = max(age, orphans.get(port, 0.0))
            ages["unknown" if orphaned is None else str(orphaned).lower()].append(age)
        for label, those in ages.items():
            yield LISTENERS(len(those), label)
            if those:
                yield AGE(max(those), label)
