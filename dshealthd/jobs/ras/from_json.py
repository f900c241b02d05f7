"""The JSON form of a RAS answer (NCCL 2.28.7 and later), parsed without trust.

Anything that NCCL would not write is a `MalformedAnswer`.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

from dshealthd.core import schema
from dshealthd.core.schema import Array, Flag, Integer, Plain, Record, SchemaError, String
from dshealthd.jobs.nccl.release import release
from dshealthd.jobs.ras.status import (
    OPERATIONS,
    OTHER,
    REMOTE_ERROR,
    Communicator,
    Lag,
    MalformedAnswer,
    RankLocation,
    RasRankState,
    Status,
    Trouble,
    canonical_address,
    error_name,
)

_RANKS = Integer(0, 1 << 20)
"""Ranks of a communicator: ten times those of the largest job."""
_PLACE = {
    "rank": _RANKS,
    "host": String(),
    "pid": Integer(-1, 1 << 22),  # PID_MAX_LIMIT of Linux
    "nvml_dev": Integer(-1, 1 << 10),  # no driver drives more than some dozens
}
_CODE = Integer(0, (1 << 31) - 1)
"""NCCL's results are of type int."""
_FLAGS = dict.fromkeys(("finalize_called", "destroy_flag", "abort_flag"), Flag())
_LOST_COMMA = re.compile(rb'("nvml_dev": -?[0-9]{1,10})\n( {10}"status": \{)')
_HASH = re.compile(r"0x([0-9a-f]{1,16})")


class _Unread(Plain):
    """A value that is not used."""

    def read(self, value: object, place: str) -> object:  # noqa: ARG002 - of every type
        """Return the value."""
        return value


def _record(**fields: Any) -> Record:
    return Record(fields, rest=_Unread())


@functools.cache
def _answer() -> Record:
    present = _record(
        **_PLACE,
        status=_record(init_state=_CODE, async_error=_CODE, **_FLAGS),
        # A million a second for 285 years. A float64 holds it exactly.
        collective_counts=Record({}, rest=Integer(0, 1 << 53)),
    )
    missing = _record(**_PLACE, status=_record(unresponsive=Flag(), considered_dead=Flag()))
    communicator = _record(
        hash=String(),
        secondary_hash=String(),
        size=_RANKS,
        ranks=Array(present),
        missing_ranks=Array(missing),
    )
    return _record(nccl_version=String(), communicators=Array(communicator))


def repair(data: bytes) -> bytes:
    """Insert the comma that NCCL 2.28.7 and 2.28.9 omit after `nvml_dev` in `missing_ranks`.

    Valid JSON is returned unchanged: it always has a comma between a number and a string, and its
    strings contain no line breaks.
    """
    return _LOST_COMMA.sub(rb"\1,\n\2", data)


def parse_json(data: bytes) -> Status:
    """Return the status in a JSON answer. Raises MalformedAnswer."""
    try:
        document = _answer().read(schema.document(repair(data)), "the answer")
    except SchemaError as error:
        raise MalformedAnswer(str(error)[:400]) from error
    found = document["communicators"]
    largest = max(found, key=lambda entry: int(entry["size"]), default=None)
    ranks = (*largest["ranks"], *largest["missing_ranks"]) if largest else ()
    return Status(
        version=release(document["nccl_version"]),
        communicators=tuple(map(_communicator, found)),
        ranks={_place(rank): rank["rank"] for rank in ranks},
    )


def _communicator(entry: dict[str, Any]) -> Communicator:
    match = _HASH.fullmatch(entry["hash"])
    if match is None:
        raise MalformedAnswer(f"the hash {entry['hash'][:40]!r} is not a hexadecimal number")
    states: Counter[RasRankState] = Counter()
    troubles: list[Trouble] = []
    counts: dict[int, tuple[Counter[str], RankLocation]] = {}
    for rank in entry["ranks"]:
        number, place, status = rank["rank"], _place(rank), rank["status"]
        states[_state(status)] += 1
        counts[number] = _counts(rank["collective_counts"]), place
        errors = map(error_name, (status["init_state"], status["async_error"]))
        troubles += [Trouble(number, error, place) for error in errors if error is not None]
    for rank in entry["missing_ranks"]:
        states[state := _absence(rank["status"])] += 1
        if state is not RasRankState.NOT_MEMBER:
            troubles.append(Trouble(rank["rank"], state, _place(rank)))
    # After such an error NCCL refuses a rank's launches, so its lag is a consequence.
    broken = {trouble.rank for trouble in troubles if trouble.what == REMOTE_ERROR}
    return Communicator(
        name=f"{match[1]:0>16} {entry['secondary_hash'][:40]}",
        size=entry["size"],
        states=dict(states),
        marks={rank: sum(operations.values()) for rank, (operations, _) in counts.items()},
        behind=_behind(counts, broken),
        troubles=tuple(troubles),
    )


def _state(status: dict[str, Any]) -> RasRankState:
    if status["abort_flag"]:
        return RasRankState.ABORT
    if status["finalize_called"] or status["destroy_flag"]:
        return RasRankState.FINALIZE
    return RasRankState.INIT if status["init_state"] else RasRankState.RUNNING


def _absence(status: dict[str, Any]) -> RasRankState:
    if status["considered_dead"]:
        return RasRankState.DEAD
    return RasRankState.UNRESPONSIVE if status["unresponsive"] else RasRankState.NOT_MEMBER


def _counts(table: dict[str, int]) -> Counter[str]:
    """Return a rank's counts by operation; unknown operations count together."""
    counts: Counter[str] = Counter()
    for name, count in table.items():
        counts[name if name in OPERATIONS else OTHER] += count
    return counts


def _behind(
    counts: dict[int, tuple[Counter[str], RankLocation]], broken: set[int]
) -> tuple[Lag, ...]:
    most: Counter[str] = Counter()
    for operations, _ in counts.values():
        most |= operations  # the greater of each
    return tuple(
        Lag(rank, name, most[name] - count, place)
        for rank, (operations, place) in counts.items()
        for name, count in operations.items()
        if count < most[name] and rank not in broken
    )


def _place(rank: dict[str, Any]) -> RankLocation:
    return RankLocation(canonical_address(rank["host"]), rank["pid"], rank["nvml_dev"])
