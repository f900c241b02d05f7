"""The fields of messages between agents: the types of their values beside those of `core.schema`,
and every known reason for which rounds and calls fail, so that labels stay bounded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dshealthd.core.schema import Array, Number, Plain, misfit
from dshealthd.probe.members.hostlist import is_name

SLUG = re.compile(r"[a-z][a-z0-9_]{0,47}")
MAX_RANKS_OF_NODE = 64
"""Four times the 16 GPUs of the largest node (HGX-2): a round has a rank for each."""
RATIO = Number(0, 1e6)
MAX_SIZE = 1 << 30
"""Bytes of one collective's payload."""
MAX_SIZES, MAX_REPETITIONS = 32, 1000
"""Most sizes of a round's collectives, and repetitions of each."""
MAX_PAIRS = 6
"""Most pairs that a report has; only those of this epoch or the last one are reported."""
MAX_KEY, MAX_VALUE = 256, 45000
"""Characters of a key and bytes of a value in a rendezvous store. With the other fields both fit
into `protocol.MAX_MESSAGE`: the value takes 60,000 bytes in base64, the key at most twelve for each
character, where JSON escapes it.
"""
MAX_WAIT = 4.0
"""Seconds that one operation of the store waits for a key; a longer wait takes several calls."""
OTHER = "other"
"""A reason from a peer that this release does not know."""
REASONS = frozenset({
    OTHER, "already_testing", "answer_not_signed", "bad_answer", "busy", "busy_cpu", "busy_gpu",
    "clock_differs", "closed", "compute_mode", "connect_timeout",
    "connection_lost", "deadline", "draining", "duty", "ended_early", "error", "exited",
    "gpu_unknown", "gpus_differ", "implausible", "key", "killed", "maintenance", "malformed",
    "members_differ", "name_server", "name_timeout", "name_unknown", "no_address", "no_answer",
    "no_credentials", "no_cuda", "no_python", "no_route", "no_torch", "not_a_member",
    "not_acknowledged", "not_permitted", "out_of_memory", "own_name", "parent",
    "peer_error", "policy_never", "rate_limited", "refused", "rejected", "reset",
    "resting", "silent", "starved", "stopped", "store", "switched_off",
    "system_error", "timed_out", "timeout", "too_many_calls",
    "uninterruptible", "unkillable", "unknown_round",
    "version_differs", "versions_differ", "warming_up", "writable", "wrong_address",
    "wrong_data", "wrong_receiver",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeName(Plain):
    """A node's name, which is only compared with those of the membership."""

    def read(self, value: object, place: str) -> str:
        """Return the node's name that the schema allows."""
        if not isinstance(value, str) or not is_name(value):
            misfit(place, "is not a valid node name")
        return value


@dataclass(frozen=True, slots=True)
class KnownReason(Plain):
    """A slug that this release knows as a reason, or nothing; any other slug becomes `other`."""

    def read(self, value: object, place: str) -> str:
        """Return the reason that the schema allows."""
        if not isinstance(value, str) or (value and SLUG.fullmatch(value) is None):
            misfit(place, "is not a slug")
        return value if not value or value in REASONS else OTHER


@dataclass(frozen=True, slots=True)
class Text(Plain):
    """Printable ASCII of a bounded length."""

    maximum: int

    def read(self, value: object, place: str) -> str:
        """Return the text that the schema allows."""
        if (
            not isinstance(value, str)
            or len(value) > self.maximum
            or not value.isascii()
            or not (value.isprintable())
        ):
            misfit(place, f"is not printable ASCII text of at most {self.maximum} characters")
        return value


@dataclass(frozen=True, slots=True)
class Ratios(Plain):
    """Ratios of the last rounds with a few nodes, by name."""

    ratio: Number = RATIO
    maximum: int = MAX_PAIRS

    def read(self, value: object, place: str) -> dict[str, float]:
        """Return the ratios that the schema allows."""
        if not isinstance(value, dict) or len(value) > self.maximum:
            misfit(place, f"is not an object of at most {self.maximum} ratios")
        return {
            NodeName().read(name, place): self.ratio.read(one, place) for name, one in value.items()
        }


NAME = Text(64)
"""Name of a round or a part, or a digest."""
MEMBERS = Array(NodeName(), 2, 2)
LATE = Array(NodeName(), 2)
