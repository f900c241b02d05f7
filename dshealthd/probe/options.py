"""The section `[probe]` of the configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dshealthd.core.options import Duration, option
from dshealthd.probe.members.membership import MembershipOptions
from dshealthd.probe.peers.contract import PeerOptions
from dshealthd.probe.verdicts.baseline import BaselineOptions
from dshealthd.probe.verdicts.detector import VerdictOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

_WINDOW = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_MINUTES = 60


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
        """Yield what is wrong although its type is right."""
        if self.window and self.minutes is None:
            yield "window", f'"{self.window}" is not a time such as "22:00-04:30"'

    @property
    def minutes(self) -> tuple[int, int] | None:
        """Begin and end of the window in minutes of the day; None where there is none."""
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
        """Yield what is wrong although its type is right."""
        for entry in self.environment:
            if re.fullmatch(r"[A-Z][A-Z0-9_]*=[ -~]*", entry) is None:
                yield "environment", f'"{entry}" is not NAME=VALUE'

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the workers."""
        variables = dict(entry.split("=", 1) for entry in self.environment)
        return (
            {"LD_LIBRARY_PATH": self.library_path, **variables} if self.library_path else variables
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
        """Yield what is wrong although its type is right."""
        if self.peer.listen_address and not self.members.sources:
            yield "peer", "a listen address needs members: probe.members says nowhere who they are"
