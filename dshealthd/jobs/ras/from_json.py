"""The JSON form of a RAS answer (NCCL 2.28.7 and later), parsed without trust.

Anything that NCCL would not write is a `MalformedAnswer`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, TypeVar

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
    first_lags,
    first_troubles,
)

T = TypeVar("T")

_MAX_RANKS = 1 << 20
"""Most ranks of a communicator: ten times those of the largest job."""
_MAX_PID = 1 << 22
"""PID_MAX_LIMIT of Linux."""
_MAX_GPU = 1 << 10
"""NVML's index on a node; no driver drives more than some dozens."""
_MAX_COUNT = 1 << 53
"""Operations: a million a second for 285 years. A float64 holds it exactly."""
_MAX_CODE = (1 << 31) - 1
"""NCCL's results are of type int."""
_KINDS = {dict: "an object", list: "an array", str: "a string", bool: "true or false"}
_LOST_COMMA = re.compile(rb'("nvml_dev": -?[0-9]{1,10})\n( {10}"status": \{)')
_HASH = re.compile(r"0x([0-9a-f]{1,16})")


def repair(data: bytes) -> bytes:
    """Insert the comma that NCCL 2.28.7 and 2.28.9 omit after `nvml_dev` in `missing_ranks`.

    Valid JSON is returned unchanged: it always has a comma between a number and a string, and its
    strings contain no line breaks.
    """
    return _LOST_COMMA.sub(rb"\1,\n\2", data)


def parse_json(data: bytes) -> Status:
    """Return the status in a JSON answer. Raises MalformedAnswer."""
    document = _table(_load(data), "the answer")
    communicators = [
        _communicator(_table(entry, f"communicators[{index}]"), f"communicators[{index}]")
        for index, entry in enumerate(_field(document, "communicators", list, "the answer"))
    ]
    return Status(
        version=release(_field(document, "nccl_version", str, "the answer")),
        communicators=tuple(communicators),
        ranks=_numbers(document),
    )


def _load(data: bytes) -> object:
    """Return the JSON document of an answer, repaired if necessary."""
    try:
        try:
            return json.loads(data.decode(), parse_constant=_no_number)
        except json.JSONDecodeError:
            repaired = repair(data)
            if repaired == data:
                raise
            return json.loads(repaired.decode(), parse_constant=_no_number)
    except (ValueError, ArithmeticError, RecursionError) as error:
        message = f"not JSON: {str(error)[:200]}"
        raise MalformedAnswer(message) from error


def _no_number(name: str) -> float:
    message = f"{name} is not a JSON number"
    raise ValueError(message)


def _communicator(entry: dict[str, Any], at: str) -> Communicator:
    match = _HASH.fullmatch(_field(entry, "hash", str, at))
    if match is None:
        message = f"{at}.hash is not a hexadecimal number"
        raise MalformedAnswer(message)
    states: Counter[RasRankState] = Counter()
    troubles: list[Trouble] = []
    counts: dict[int, tuple[dict[str, int], RankLocation]] = {}
    for index, item in enumerate(_field(entry, "ranks", list, at)):
        where = f"{at}.ranks[{index}]"
        rank = _table(item, where)
        number, place = _integer(rank, "rank", where, most=_MAX_RANKS), _place(rank, where)
        status = _field(rank, "status", dict, where)
        states[_state(status, where)] += 1
        counts[number] = _counts(rank, where), place
        errors = (
            error_name(_integer(status, key, where, most=_MAX_CODE))
            for key in ("init_state", "async_error")
        )
        troubles += [Trouble(number, error, place) for error in errors if error is not None]
    for index, item in enumerate(_field(entry, "missing_ranks", list, at)):
        where = f"{at}.missing_ranks[{index}]"
        rank = _table(item, where)
        states[state := _absence(rank, where)] += 1
        number = _integer(rank, "rank", where, most=_MAX_RANKS)
        trouble = Trouble(number, state, _place(rank, where))
        if state is not RasRankState.NOT_MEMBER:
            troubles.append(trouble)
    # After such an error NCCL refuses a rank's launches, so its lag is a consequence.
    broken = {trouble.rank for trouble in troubles if trouble.what == REMOTE_ERROR}
    return Communicator(
        name=f"{match[1]:0>16} {_field(entry, 'secondary_hash', str, at)[:40]}",
        size=_integer(entry, "size", at, most=_MAX_RANKS),
        states=dict(states),
        marks={rank: sum(operations.values()) for rank, (operations, _) in counts.items()},
        behind=_behind(counts, broken),
        troubles=first_troubles(troubles),
    )


def _state(status: dict[str, Any], at: str) -> RasRankState:
    if _field(status, "abort_flag", bool, at):
        return RasRankState.ABORT
    if _field(status, "finalize_called", bool, at) or _field(status, "destroy_flag", bool, at):
        return RasRankState.FINALIZE
    init = _integer(status, "init_state", at, most=_MAX_CODE)
    return RasRankState.INIT if init else RasRankState.RUNNING


def _counts(rank: dict[str, Any], at: str) -> dict[str, int]:
    """Return a rank's counts by operation; unknown operations count together."""
    counts: dict[str, int] = {}
    table = _field(rank, "collective_counts", dict, at)
    for name in table:
        known = name if name in OPERATIONS else OTHER
        count = _integer(table, name, f"{at}.collective_counts", most=_MAX_COUNT)
        counts[known] = counts.get(known, 0) + count
    return counts


def _behind(
    counts: dict[int, tuple[dict[str, int], RankLocation]], broken: set[int]
) -> tuple[Lag, ...]:
    most: dict[str, int] = {}
    for operations, _ in counts.values():
        for name, count in operations.items():
            most[name] = max(count, most.get(name, 0))
    return first_lags(
        Lag(rank, name, most[name] - count, place)
        for rank, (operations, place) in counts.items()
        for name, count in operations.items()
        if count < most[name] and rank not in broken
    )


def _absence(rank: dict[str, Any], at: str) -> RasRankState:
    status = _field(rank, "status", dict, at)
    unresponsive, dead = (
        _field(status, "unresponsive", bool, at),
        _field(status, "considered_dead", bool, at),
    )
    return (
        RasRankState.DEAD
        if dead
        else RasRankState.UNRESPONSIVE
        if unresponsive
        else RasRankState.NOT_MEMBER
    )


def _place(rank: dict[str, Any], at: str) -> RankLocation:
    return RankLocation(
        canonical_address(_field(rank, "host", str, at)),
        _integer(rank, "pid", at, least=-1, most=_MAX_PID),
        _integer(rank, "nvml_dev", at, least=-1, most=_MAX_GPU),
    )


def _numbers(document: dict[str, Any]) -> dict[RankLocation, int]:
    """Return the numbers of the largest communicator's ranks in a checked document, by place."""
    nothing: dict[str, Any] = {"ranks": [], "missing_ranks": []}
    largest = max(document["communicators"], key=lambda entry: int(entry["size"]), default=nothing)
    return {
        _place(rank, ""): rank["rank"] for rank in (*largest["ranks"], *largest["missing_ranks"])
    }


def _table(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        message = f"{at} is not an object"
        raise MalformedAnswer(message)
    return value


def _field(table: dict[str, Any], key: str, kind: type[T], at: str) -> T:
    """Return a value that must be of this kind."""
    if not isinstance(value := table.get(key), kind):
        message = f"{at}.{key} is not {_KINDS[kind]}"
        raise MalformedAnswer(message)
    return value


def _integer(table: dict[str, Any], key: str, at: str, *, most: int, least: int = 0) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        message = f"{at}.{key[:40]} is not an integer of at least {least} and at most {most}"
        raise MalformedAnswer(message)
    return value
