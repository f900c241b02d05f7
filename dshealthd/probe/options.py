"""The section `[probe]` of the configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dshealthd.core.options import Duration, Section, option
from dshealthd.core.sockets import listen_address
from dshealthd.probe.members.hostlist import is_name, numeric, quote


@dataclass(frozen=True, kw_only=True)
class MembershipOptions:
    """Where the list of nodes comes from: set at most one source. Without a source, probes between
    nodes are off.
    """

    hostfile: Path | None = option(None, "DeepSpeed hostfile; re-read when it changes.")
    nodes: tuple[str, ...] = option([], "Explicit list of nodes, by host name or address.")
    dns: str = option(
        "",
        "DNS name, such as a headless service: each of its addresses is a node with that name; "
        "looked up every minute. IPv6 addresses are used only if there is no IPv4 address.",
    )
    slurm: str = option("", 'Slurm node list expression, such as "gpu[001-128,130],login1".')
    topology: Path | None = option(
        None,
        "Nodes by leaf switch, in the format of Slurm's topology.conf; re-read when it changes.",
    )
    name: str = option(
        "",
        "Name of this node in the list, if neither its host name nor an address of its interfaces "
        "identifies it.",
    )

    @property
    def sources(self) -> tuple[str, ...]:
        """The configured sources of members."""
        return tuple(name for name in ("hostfile", "nodes", "dns", "slurm") if getattr(self, name))

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each membership option with an unusable value, and why."""
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
    """Communication between the agents of a cluster."""

    listen_address: str = option(
        "",
        'Address on which to serve other agents, "HOST:PORT"; HOST is this node\'s address in '
        "the member list. Empty: no probes between nodes.",
    )
    key_file: Path | None = option(
        None,
        "File with the key that all nodes share, mode 0600: one key per line, at least 32 "
        "characters (openssl rand -hex 32). The first signs; a second one is also accepted, for "
        "rotation. Re-read when it changes. A name without a slash is a systemd credential.",
    )
    check_addresses: bool = option(
        True,
        "Whether a call must come from an address of the calling node. All nodes share one key, "
        "so only this check tells them apart: turn it off only with NAT between nodes.",
    )
    off_file: Path | None = option(
        Path("/run/dshealthd/probe.off"),
        "While this file exists, calls from other nodes are declined.",
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each option of the peer API with an unusable value, and why."""
        if self.listen_address:
            try:
                host, _ = listen_address(self.listen_address)
            except (ValueError, ArithmeticError) as error:
                yield "listen_address", str(error)
            else:
                address = numeric(host or "::")
                if address is not None and address.is_unspecified:
                    problem = "names no single host; workers on other nodes connect to this address"
                    yield "listen_address", f'"{self.listen_address}" {problem}, too'
            if self.key_file is None:
                yield "listen_address", "needs key_file"


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """When rounds may use the GPUs. Otherwise a round is light: an echo between agents that does
    not touch GPUs.
    """

    gpus: Literal["idle", "always", "never"] = option(
        "idle",
        "When rounds may use the GPUs: while no process computes on any GPU of the node, no rank "
        "of a job runs there, and no GPU is in an exclusive compute mode; always; or never. "
        "Unknown counts as busy.",
    )
    duty_ratio: float = option(
        0.001,
        "Share of time for which collectives of scheduled rounds may occupy the GPUs.",
        minimum=0.0,
        maximum=1.0,
    )
    confirmations_per_minute: int = option(
        6, "Extra rounds per minute to confirm or clear a suspicion.", minimum=0, maximum=60
    )


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The processes that run the collectives."""

    environment: tuple[str, ...] = option(
        [],
        'Additional environment variables of the workers, such as "NCCL_IB_GID_INDEX=3" or '
        '"LD_LIBRARY_PATH=/opt/nccl/lib".',
    )
    interface: str = option(
        "",
        ("Network interface of the workers' traffic. Empty: the interface with the peer address."),
    )
    adapters: tuple[str, ...] = option(
        [],
        'RDMA adapter nearest to each GPU, in GPU order, such as "mlx5_0:1". Empty: NCCL chooses.',
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each worker option with an unusable value, and why."""
        for entry in self.environment:
            if re.fullmatch(r"[A-Z][A-Z0-9_]*=[ -~]*", entry) is None:
                yield "environment", f'"{entry}" is not NAME=VALUE'

    @property
    def variables(self) -> dict[str, str]:
        """The configured environment of the workers."""
        return dict(entry.split("=", 1) for entry in self.environment)


@dataclass(frozen=True, kw_only=True)
class BaselineOptions:
    """Threshold of slow timings."""

    slow_ratio: float = option(
        0.07,
        "Minimum ratio by which a flagged timing exceeds its baseline. A node whose own score "
        "is that much above 1 is the culprit of its bad rounds.",
        minimum=0.01,
    )


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(Section):
    """Small collectives that find slow and broken nodes. Off until `members` and `peer` are set."""

    period: Duration = option(
        "10s",
        "Length of an epoch, in which every node has one round; an unanswered call takes 2 s of "
        "it. Must be the same on all nodes.",
        minimum="1s",
    )
    python: Path | None = option(
        None,
        "Python interpreter of the training environment, with torch; without it, only light "
        "rounds run. Must not be writable by others.",
    )
    large_every: int = option(
        6,
        "Number of epochs between rounds with a large collective (64 MiB between GPUs, "
        "otherwise 4 MiB); 0 for never.",
        minimum=0,
    )
    members: MembershipOptions = field(default_factory=MembershipOptions)
    peer: PeerOptions = field(default_factory=PeerOptions)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    baseline: BaselineOptions = field(default_factory=BaselineOptions)

    @property
    def wanted(self) -> bool:
        """Whether probes with other nodes are configured."""
        return bool(self.members.sources) and bool(self.peer.listen_address)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each probe option with an unusable value, and why."""
        if self.peer.listen_address and not self.members.sources:
            yield "peer", "a listen address needs members; probe.members has no source of them"
