"""Which NCCL releases may be queried for their RAS status.

A query runs inside the job: the process that answers formats the answer, and a release with a
defect there crashes the job. This module does no I/O, so that `doctor` can use it too.

The defect (`rasClientRunComms` in `src/ras/client_support.cc`): 2.26.2 appended an array of
missing ranks to each communicator of the collected data, and the loop that walks the communicators
to write the text form does not step over it (`v2.27.7-1` line 944, `v2.28.9-1` line 993). With
several communicators and a missing rank it takes addresses of ranks for communicators and runs past
its buffer. On genuine NCCL, 2.27.7 ended another process with SIGSEGV within two queries, in 6 of 6
runs. 2.29.2 steps over it.

JSON appears in 2.28.7 and is written by a separate loop that steps correctly. In 2.28.7 to 2.28.9
the faulty loop still runs first, to find the largest communicator. With IPv4 it stays in step by
luck: a missing rank is as long as the head of a communicator, 40 bytes, and the bytes read as a
count of ranks are the zero padding of the IPv4 address. With IPv6 they are its scope id, and the
bytes read as a size, which NCCL then allocates and clears at 16 bytes each, are its last four. On
genuine 2.28.9 with fd00::abcd:1234:5678:1 (0x01000000 x 16 bytes), the peak resident memory of the
rank that answered one JSON query rose from 547,892 to 810,292 kB, by 269 MB, and memory in use fell
back at the end of the query. Without a query, over IPv4 and on 2.30.7 it rose by less than 0.1 MB.
According to the source, other addresses cost up to 34 GB. So these releases are queried only over
IPv4.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import NamedTuple

Release = tuple[int, int, int]
READ: frozenset[Release] = frozenset(
    {(2, 29, 2), (2, 29, 3), (2, 29, 7), (2, 30, 3), (2, 30, 4), (2, 30, 7), (2, 31, 2)}
)
"""Releases from 2.28.10 on whose sources of RAS were read: the loop is fixed. 2.30.7 was run, too.

2.31.2 adds commands that change the job, which are never sent, and frees what it collected for a
client that leaves early. Of 2.32.3 only the code that answers was read, not what it collects from.
"""
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})(.*)", re.DOTALL)


class AskReason(enum.StrEnum):
    """Why a release is queried or not: the label `state` has those of releases that are not."""

    SAFE = "safe"
    UNSAFE = "unsafe_release"
    UNKNOWN = "unknown_release"
    WITHOUT_RAS = "release_without_ras"
    WITHOUT_JSON = "release_without_json"
    IPV6 = "unsafe_on_ipv6"


class Decision(NamedTuple):
    """Whether a release is queried."""

    reason: AskReason
    ipv4_only: bool = False
    """Whether it is safe only if NCCL's bootstrap network is IPv4."""

    @property
    def is_asked(self) -> bool:
        """Whether it is queried; in JSON, the only form that is understood."""
        return self.reason is AskReason.SAFE


RULES: tuple[tuple[Release, Decision], ...] = (
    # RAS is new in 2.24 (release notes); text is its only form in 2.24.3, which was read.
    ((0, 0, 0), Decision(AskReason.WITHOUT_RAS)),
    ((2, 24, 0), Decision(AskReason.WITHOUT_JSON)),
    # 2.27.7 read and run: text overruns its buffer; no other form until 2.28.7. 2.26.2 is the first
    # public tag of 2.26; earlier builds, whose source is unknown, are refused.
    ((2, 26, 0), Decision(AskReason.UNSAFE)),
    # 2.28.9 read: text overruns its buffer, JSON has a separate loop.
    ((2, 28, 7), Decision(AskReason.SAFE, ipv4_only=True)),
    # Only the releases in `READ` were read.
    ((2, 28, 10), Decision(AskReason.UNKNOWN)),
)
"""The decisions from one release up to that of the next, in ascending order."""

UNKNOWN = Decision(AskReason.UNKNOWN)
PERMITTED = Decision(AskReason.SAFE, ipv4_only=True)
"""For an unknown release that the operator permits.

A release whose text is unsafe and that has no JSON refuses the format, and then nothing more is
sent.
"""
_ORDER = (
    AskReason.UNSAFE,
    AskReason.IPV6,
    AskReason.UNKNOWN,
    AskReason.WITHOUT_JSON,
    AskReason.WITHOUT_RAS,
)
"""Refusals, the most important first."""


def decide(version: str | None) -> Decision:
    """Return whether a release such as `2.27.7` may be queried; None is unknown.

    A version with a suffix is a custom build and counts as unknown, unless its release is unsafe.
    """
    match = _VERSION.fullmatch(version or "")
    if match is None:
        return UNKNOWN
    major, minor, patch, suffix = match.groups()
    release = int(major), int(minor), int(patch)
    decision = (
        Decision(AskReason.SAFE)
        if release in READ
        else next(decision for since, decision in reversed(RULES) if since <= release)
    )
    return UNKNOWN if suffix and decision.reason is not AskReason.UNSAFE else decision


def strictest(versions: Iterable[str | None], *, permit_unknown: bool = False) -> Decision:
    """Return the decision for a job whose ranks have loaded these releases: any may answer."""
    decisions = {decide(version) for version in versions} or {UNKNOWN}
    if permit_unknown:
        decisions = {
            PERMITTED if found.reason is AskReason.UNKNOWN else found for found in decisions
        }
    for reason in _ORDER:
        if any(found.reason is reason for found in decisions):
            return Decision(reason)
    return min(decisions, key=lambda found: not found.ipv4_only)
