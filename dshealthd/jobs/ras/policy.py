"""Which NCCL releases may be asked for their RAS status, and in which form.

A query runs inside the training: the process that answers formats the answer, and a release with a
defect there crashes the job. Standing apart from all I/O, so that `doctor` can use it too.

The defect (`rasClientRunComms` in `src/ras/client_support.cc`): 2.26.2 appended an array of
missing ranks to each communicator of the collected data, and the loop that walks the communicators
to write the text form does not step over it (`v2.27.7-1` line 944, `v2.28.9-1` line 993). With
several communicators and a missing rank it takes addresses of ranks for communicators and runs past
its buffer. Run on genuine NCCL: 2.27.7 ended another process with SIGSEGV within two queries, in 6
of 6 runs. 2.24 has no such array (`v2.24.3-1` line 897), and 2.29.2 steps over it.

JSON appears in 2.28.7 and is written by a loop of its own that steps correctly. In 2.28.7 to 2.28.9
the faulty loop still runs first, to find the largest communicator. With IPv4 it stays in step by
luck: a missing rank is as long as the head of a communicator, 40 bytes, and the bytes read as a
count of ranks are the zero padding of the IPv4 address. With IPv6 they are its scope id, and the
bytes read as a size, which NCCL then allocates and clears at 16 bytes each, are its last four. On
genuine 2.28.9 with fd00::abcd:1234:5678:1 (0x01000000 x 16 bytes), the peak resident memory of the
rank that answered one JSON query rose from 547,892 to 810,292 kB, by 269 MB, and memory in use fell
back at the end of the query. Without a query, over IPv4 and on 2.30.7 it rose by less than 0.1 MB.
By the source, other addresses cost up to 34 GB. So these are asked over IPv4 only.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

Release = tuple[int, int, int]


class Form(enum.StrEnum):
    """How an answer is asked for."""

    TEXT = "text"
    JSON = "json"
    """Only after `SET FORMAT json` was accepted; the text form is never the substitute."""


class AskReason(enum.StrEnum):
    """Why a release is asked, or not: the values of the label `state` for those that are not."""

    SAFE = "safe"
    UNSAFE = "unsafe_release"
    UNKNOWN = "unknown_release"
    WITHOUT_RAS = "release_without_ras"
    IPV6 = "unsafe_on_ipv6"


class Decision(NamedTuple):
    """Whether a release is asked."""

    form: Form | None
    """None where it is not asked at all."""
    reason: AskReason
    ipv4_only: bool = False
    """Whether `form` holds only where NCCL's bootstrap network is IPv4."""


class Rule(NamedTuple):
    """What holds from one release up to the next rule's."""

    since: Release
    decision: Decision
    source: str


RULES = (
    Rule((0, 0, 0), Decision(None, AskReason.WITHOUT_RAS), "RAS is new in 2.24 (release notes)"),
    Rule(
        (2, 24, 0),
        Decision(Form.TEXT, AskReason.SAFE),
        "2.24.3 read and run: the data has no array of missing ranks; no other form exists",
    ),
    # 2.26.2 is the first public tag of 2.26; what came before it is refused, as no source shows it.
    Rule(
        (2, 26, 0),
        Decision(None, AskReason.UNSAFE),
        "2.27.7 read and run: text overruns its buffer; no other form until 2.28.7",
    ),
    Rule(
        (2, 28, 7),
        Decision(Form.JSON, AskReason.SAFE, ipv4_only=True),
        "2.28.9 read: text overruns its buffer, JSON has a loop of its own",
    ),
    # No source of 2.28.10 to 2.29.1 was read, so that nothing shows on which side of the fix they
    # are.
    Rule((2, 28, 10), Decision(None, AskReason.UNKNOWN), "no source at hand"),
    Rule(
        (2, 29, 2), Decision(Form.JSON, AskReason.SAFE), "2.30.7 read and run: the loop is mended"
    ),
    # The next major version may change the protocol.
    Rule((3, 0, 0), Decision(None, AskReason.UNKNOWN), "does not exist yet"),
)
"""In rising order; each holds up to the next."""

UNKNOWN = Decision(None, AskReason.UNKNOWN)
PERMITTED = Decision(Form.JSON, AskReason.SAFE, ipv4_only=True)
"""For a release that is not known and that the operator permits.

In JSON: every release whose text is unsafe and that has no JSON refuses the format, and then
nothing more is said.
"""
_VERSION = re.compile(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})(.*)", re.DOTALL)
_ORDER = (AskReason.UNSAFE, AskReason.IPV6, AskReason.UNKNOWN, AskReason.WITHOUT_RAS)
"""Refusals, the one that most needs saying first."""


def decide(version: str | None) -> Decision:
    """Return whether and how a release such as `2.27.7` may be asked; None is not known.

    A version with a suffix is a build of somebody's own: not known, unless it is of a release that
    is unsafe anyway.
    """
    match = _VERSION.fullmatch(version or "")
    if match is None:
        return UNKNOWN
    major, minor, patch, suffix = match.groups()
    release = int(major), int(minor), int(patch)
    decision = next(rule.decision for rule in reversed(RULES) if rule.since <= release)
    return UNKNOWN if suffix and decision.reason is not AskReason.UNSAFE else decision


def strictest(versions: Iterable[str | None], *, permit_unknown: bool = False) -> Decision:
    """Return the policy's decision for a job whose ranks have loaded these releases, at least one.

    Ranks that would be asked in different forms are not asked: it is not known who answers.
    """
    decisions = {decide(version) for version in versions} or {UNKNOWN}
    if permit_unknown:
        decisions = {
            PERMITTED if found.reason is AskReason.UNKNOWN else found for found in decisions
        }
    for reason in _ORDER:
        if any(found.reason is reason for found in decisions):
            return Decision(None, reason)
    if len({found.form for found in decisions}) > 1:
        return UNKNOWN
    return min(decisions, key=lambda found: not found.ipv4_only)
