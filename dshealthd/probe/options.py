"""The section `[probe]` of the configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dshealthd.core.address import listen_address
from dshealthd.core.options import Duration, option
from dshealthd.probe.members.hostlist import is_name, quote

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_MINUTES = 60


@dataclass(frozen=True, kw_only=True)
class MembershipOptions:
    """Where the list of nodes comes from.

    One source, or none, which leaves probes between nodes off.
    """

    hostfile: Path | None = option(
        None, "DeepSpeed hostfile, the one that training is started with; re-read as it changes."
    )
    nodes: tuple[str, ...] = option([], "The nodes themselves, as their agents are reached.")
    dns: str = option(
        "",
        "DNS name, such as a headless service: each of its addresses is a node, and the "
        "addresses are the names. "
        "IPv6 ones count only where there is no IPv4 one.",
    )
    dns_interval: Duration = option(
        "1m", "How often the DNS name is looked up again.", minimum="1s"
    )
    slurm: str = option("", 'Slurm node list expression, such as "gpu[001-128,130],login1".')
    topology: Path | None = option(
        None,
        "File in the form of Slurm's topology.conf that says which nodes share a leaf "
        "switch; re-read as it changes.",
    )
    name: str = option(
        "",
        "Which of the nodes this one is, where neither its host name nor an address of its "
        "interfaces tells.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The configured sources of members."""
        return tuple(name for name in ("hostfile", "nodes", "dns", "slurm") if getattr(self, name))

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of the membership whose values cannot be used, and why."""
        if len(self.sources) > 1:
            yield (
                self.sources[1],
                f"only one of {', '.join(self.sources)} can say who the members are",
            )
        for key in ("dns", "name"):
            if getattr(self, key) and not is_name(getattr(self, key)):
                yield key, f"{quote(getattr(self, key))} is not a valid node name"


@dataclass(frozen=True, kw_only=True)
class PeerOptions:
    """How the agents of a cluster talk to each other."""

    listen_address: str = option(
        "",
        'Address for the other nodes\' agents, "HOST:PORT"; the host is the address they '
        "know this node by. Empty: no probes across nodes.",
    )
    key_file: Path | None = option(
        None,
        "File with the key that all nodes share, of mode 0600: one key a line, at least 32 "
        "characters (openssl rand -hex 32). The first "
        "signs, a second one is accepted too, for rotation; re-read as it changes. A name "
        "without a slash is one of systemd's credentials.",
    )
    tls_cert_file: Path | None = option(
        None, "Certificate of this node, for TLS 1.3 in both directions; re-read as it changes."
    )
    tls_key_file: Path | None = option(
        None, "Its private key, of mode 0600, or the name of one of systemd's credentials."
    )
    tls_ca_file: Path | None = option(
        None, "Certificates of the authorities that sign the nodes' certificates."
    )
    tls_name: str = option(
        "{node}",
        "Subject alternative name (DNS or URI) of a node's certificate; {node} is its name "
        "among the members.",
    )
    check_addresses: bool = option(
        True,
        "Whether a call must come from an address of the node that makes it. Without "
        "certificates nothing else tells the nodes apart, "
        "as all have the same key; off only where addresses are translated between nodes.",
    )
    off_file: Path | None = option(
        Path("/run/dshealthd/probe.off"),
        "While this file exists, calls of other nodes are declined.",
    )
    max_connections: int = option(
        48,
        "Connections served at a time; further ones replace those that have not authenticated.",
        minimum=2,
    )
    max_connections_per_address: int = option(8, "The same for one client address.", minimum=1)
    header_timeout: Duration = option(
        "5s",
        "How long a caller may take for a TLS handshake, for headers and for a body.",
        minimum="100ms",
    )
    calls_per_second: float = option(
        200.0, "Calls that one node may make, in the long run.", minimum=1.0
    )
    burst: int = option(1000, "Calls that one node may make at once, after a pause.", minimum=1)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of the peer API whose values cannot be used, and why."""
        if self.listen_address:
            try:
                host, _ = listen_address(self.listen_address)
            except ValueError as error:
                yield "listen_address", str(error)
            else:
                if host is None:
                    yield (
                        "listen_address",
                        (
                            f'"{self.listen_address}" names no host; the listener never takes '
                            "all addresses by default"
                        ),
                    )
            if self.key_file is None and not self.tls:
                yield (
                    "listen_address",
                    "needs key_file, or tls_cert_file, tls_key_file and tls_ca_file",
                )
        given = [
            name
            for name in ("tls_cert_file", "tls_key_file", "tls_ca_file")
            if getattr(self, name) is not None
        ]
        if len(given) in {1, 2}:
            yield given[0], "needs all of tls_cert_file, tls_key_file and tls_ca_file"
        if self.tls_name.count("{node}") != 1:
            yield "tls_name", "must contain {node} once"

    @property
    def tls(self) -> bool:
        """Whether connections to peers are configured to be protected with TLS."""
        return None not in {self.tls_cert_file, self.tls_key_file, self.tls_ca_file}

    def certificate_name(self, node: str) -> str:
        """Return the configured subject alternative name of a node's certificate."""
        return self.tls_name.replace("{node}", node)


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When rounds may use the GPUs.

    A round that may not becomes a light one: an echo between the agents, which touches none.
    """

    gpus: Literal["idle", "always", "never"] = option(
        "idle",
        "When rounds may use the GPUs: while no process computes on one of the node's, "
        "always, or never. Unknown counts as busy.",
    )
    window: str = option(
        "",
        'Daily time, in UTC, at which alone rounds may use the GPUs: "22:00-04:30". Empty: '
        "at any time.",
    )
    duty_ratio: float = option(
        0.001,
        "Share of the time that collectives of scheduled rounds may keep the GPUs occupied.",
        minimum=0.0,
        maximum=1.0,
    )
    on_demand_ratio: float = option(
        0.1,
        "The same for rounds beside the schedule: where they have used up their share, this node "
        "refuses those that other nodes ask for.",
        minimum=0.0,
        maximum=1.0,
    )
    confirmations_per_minute: int = option(
        6, "Extra rounds in a minute that confirm or clear a suspicion.", minimum=0, maximum=60
    )
    on_demand_per_minute: int = option(
        60,
        "Rounds on GPUs in a minute that other nodes may ask for beside the scheduled ones: "
        "confirmations, and `dshealthd probe`.",
        minimum=0,
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of the policy on busy GPUs whose values cannot be used, and why."""
        if self.window and self.minutes is None:
            yield "window", f'"{self.window}" is not a time such as "22:00-04:30"'

    @property
    def minutes(self) -> tuple[int, int] | None:
        """Begin and end of the configured window in minutes of the day; None without."""
        match = _WINDOW.fullmatch(self.window)
        if match is None:
            return None
        numbers = [int(group) for group in match.groups()]
        return numbers[0] * _MINUTES + numbers[1], numbers[2] * _MINUTES + numbers[3]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The processes that run the collectives."""

    idle_timeout: Duration = option(
        "2m",
        "How long the process that has imported torch is kept without a round; it holds some "
        "200 MiB.",
        minimum="1s",
    )
    library_path: str = option(
        "", "LD_LIBRARY_PATH of the workers, where the training environment needs one."
    )
    environment: tuple[str, ...] = option(
        [], 'Further variables of the workers, such as "NCCL_IB_GID_INDEX=3".'
    )
    interface: str = option(
        "", "Network interface of the workers' traffic; the one with the peer address where empty."
    )
    adapters: tuple[str, ...] = option(
        [],
        'RDMA adapter next to each GPU, in the order of the GPUs, such as "mlx5_0:1"; where '
        "empty NCCL chooses.",
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of the workers whose values cannot be used, and why."""
        for entry in self.environment:
            if re.fullmatch(r"[A-Z][A-Z0-9_]*=[ -~]*", entry) is None:
                yield "environment", f'"{entry}" is not NAME=VALUE'

    @property
    def variables(self) -> dict[str, str]:
        """The configured environment of the workers."""
        variables = dict(entry.split("=", 1) for entry in self.environment)
        return (
            {"LD_LIBRARY_PATH": self.library_path, **variables} if self.library_path else variables
        )


@dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    """When a timing is out of the usual."""

    slow_ratio: float = option(
        0.07,
        "How much longer than usual, as a ratio, a timing takes at least to be flagged.",
        minimum=0.01,
    )
    light_ratio: float = option(
        2.0,
        "The same for echoes between agents, whose times depend on the load of both hosts.",
        minimum=0.01,
    )
    deviations: float = option(
        3.5,
        "How many standard deviations of its class above the usual a timing is at least to "
        "be flagged.",
        minimum=2,
    )
    creep_ratio: float = option(
        0.05,
        "How far the usual may rise above the lowest usual of this software.",
        minimum=0,
        maximum=1,
    )
    sibling_ratio: float = option(
        0.15,
        "How far the usual of one GPU or rail may lie above the median of the others of its "
        "node; a part that was slow from the beginning"
        " is flagged by this.",
        minimum=0.02,
    )


@dataclass(frozen=True, kw_only=True)
class VerdictOptions:
    """Suspect thresholds."""

    confirmations: int = option(
        4,
        "Extra rounds that must be flagged, with at most one that is not, before a part becomes "
        "a suspect.",
        minimum=2,
    )
    told_ratio: float = option(
        0.07,
        "The own score, above 1, from which on a node takes a bad round on itself.",
        minimum=0.01,
    )
    hold_epochs: int = option(
        4, "Epochs for which a suspicion of another node lasts without new evidence.", minimum=2
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Small collectives with the other nodes, which find the slow and broken ones.

    Off until `members` and `peer` are set.
    """

    enabled: bool = option(
        True, "Whether rounds are run; without, calls of other nodes are not answered either."
    )
    period: Duration = option(
        "10s",
        "Length of an epoch, in which every node has one round; the same on all nodes.",
        minimum="1s",
    )
    python: Path | None = option(
        None,
        "Interpreter of the training environment, which has torch; without, light rounds "
        "only. Must not be writable by others.",
    )
    group_size: int = option(2, "Nodes in a round; the same on all nodes.", minimum=2, maximum=8)
    large_every: int = option(
        6, "Every how many epochs the collectives include one of 64 MiB; 0 for never.", minimum=0
    )
    members: MembershipOptions = field(default_factory=MembershipOptions)
    peer: PeerOptions = field(default_factory=PeerOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    baseline: BaselineOptions = field(default_factory=BaselineOptions)
    verdict: VerdictOptions = field(default_factory=VerdictOptions)

    @property
    def wanted(self) -> bool:
        """Whether probes with other nodes are configured."""
        return self.enabled and bool(self.members.sources) and bool(self.peer.listen_address)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of probes whose values cannot be used, and why."""
        if self.peer.listen_address and not self.members.sources:
            yield "peer", "a listen address needs members: probe.members says nowhere who they are"
