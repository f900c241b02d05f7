"""The JSON form of a RAS answer (NCCL 2.28.7 and later), parsed without trust.

Anything that NCCL would not write is a `MalformedAnswer`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from dshealthd.jobs.ras.status import (
    OPERATIONS,
    OTHER,
    REMOTE_ERROR,
    Communicator,
    Lag,
    MalformedAnswer,
    RankLocation,
    RasRankState,
    Spread,
    Status,
    Trouble,
    address,
    error_name,
    first_lags,
    first_troubles,
    version,
)

_MAX = 1 << 63
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
        for index, entry in enumerate(_list(document, "communicators", "the answer"))
    ]
    ras = _table(document.get("ras", {}), "ras")
    return Status(
        version=version(_text(document, "nccl_version", "the answer")),
        communicators=tuple(communicators),
        timeouts=_integer(ras, "timeouts_count", "ras") if "timeouts_count" in ras else None,
        processes=_processes(document),
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
    except ValueError as error:
        message = f"not JSON: {str(error)[:200]}"
        raise MalformedAnswer(message) from error
    except RecursionError as error:
        message = "JSON is nested too deeply"
        raise MalformedAnswer(message) from error


def _no_number(name: str) -> float:
    message = f"{name} is not a JSON number"
    raise ValueError(message)


def _communicator(entry: dict[str, Any], at: str) -> Communicator:
    match = _HASH.fullmatch(_text(entry, "hash", at))
    if match is None:
        message = f"{at}.hash is not a hexadecimal number"
        raise MalformedAnswer(message)
    states: Counter[RasRankState] = Counter()
    errors: Counter[tuple[str, str]] = Counter()
    troubles: list[Trouble] = []
    counts: dict[int, tuple[dict[str, int], RankLocation]] = {}
    for index, item in enumerate(_list(entry, "ranks", at)):
        where = f"{at}.ranks[{index}]"
        rank = _table(item, where)
        number, place, status = (
            _integer(rank, "rank", where),
            _place(rank, where),
            _table(rank.get("status"), f"{where}.status"),
        )
        states[_state(status, where)] += 1
        counts[number] = _counts(rank, where), place
        for kind, key in (("init", "init_state"), ("async", "async_error")):
            if (error := error_name(_integer(status, key, where))) is not None:
                errors[kind, error] += 1
                troubles.append(Trouble(number, error, place))
    for index, item in enumerate(_list(entry, "missing_ranks", at)):
        where = f"{at}.missing_ranks[{index}]"
        rank = _table(item, where)
        states[state := _absence(rank, where)] += 1
        trouble = Trouble(_integer(rank, "rank", where), state, _place(rank, where))
        if state is not RasRankState.NOT_MEMBER:
            troubles.append(trouble)
    spreads = _spreads(counts)
    # After such an error NCCL refuses a rank's launches, so its lag is a consequence.
    broken = {trouble.rank for trouble in troubles if trouble.what == REMOTE_ERROR}
    may_lag = {rank: counted for rank, counted in counts.items() if rank not in broken}
    return Communicator(
        name=f"{match[1]:0>16} {_text(entry, 'secondary_hash', at)[:40]}",
        size=_integer(entry, "size", at),
        states=dict(states),
        operations=spreads,
        marks={rank: sum(operations.values()) for rank, (operations, _) in counts.items()},
        errors=dict(errors),
        behind=_behind(may_lag, spreads),
        troubles=first_troubles(troubles),
    )


def _state(status: dict[str, Any], at: str) -> RasRankState:
    if _flag(status, "abort_flag", at):
        return RasRankState.ABORT
    if _flag(status, "finalize_called", at) or _flag(status, "destroy_flag", at):
        return RasRankState.FINALIZE
    return RasRankState.INIT if _integer(status, "init_state", at) else RasRankState.RUNNING


def _counts(rank: dict[str, Any], at: str) -> dict[str, int]:
    """Return a rank's counts by operation; unknown operations count together."""
    counts: dict[str, int] = {}
    table = _table(rank.get("collective_counts"), f"{at}.collective_counts")
    for name in table:
        known = name if name in OPERATIONS else OTHER
        counts[known] = counts.get(known, 0) + _integer(table, name, f"{at}.collective_counts")
    return counts


def _spreads(counts: dict[int, tuple[dict[str, int], RankLocation]]) -> dict[str, Spread]:
    spreads: dict[str, Spread] = {}
    for operations, _ in counts.values():
        for name, count in operations.items():
            spread = spreads.get(name)
            spreads[name] = (
                Spread(count, count)
                if spread is None
                else Spread(min(spread.least, count), max(spread.most, count))
            )
    return spreads


def _behind(
    counts: dict[int, tuple[dict[str, int], RankLocation]], spreads: dict[str, Spread]
) -> tuple[Lag, ...]:
    wide = {name: spread.most for name, spread in spreads.items() if spread.width}
    lags = (
        Lag(rank, name, most - operations[name], place)
        for name, most in wide.items()
        for rank, (operations, place) in counts.items()
        if operations.get(name, most) < most
    )
    return first_lags(lags)


def _absence(rank: dict[str, Any], at: str) -> RasRankState:
    status = _table(rank.get("status"), f"{at}.status")
    unresponsive, dead = _flag(status, "unresponsive", at), _flag(status, "considered_dead", at)
    return (
        RasRankState.DEAD
        if dead
        else RasRankState.UNRESPONSIVE
        if unresponsive
        else RasRankState.NOT_MEMBER
    )


def _place(rank: dict[str, Any], at: str) -> RankLocation:
    return RankLocation(
        address(_text(rank, "host", at)),
        _integer(rank, "pid", at, -1),
        _integer(rank, "nvml_dev", at, -1),
    )


def _processes(document: dict[str, Any]) -> dict[RasRankState, int]:
    """Return how many processes a checked document calls unresponsive and dead."""
    gone: dict[RasRankState, set[tuple[str, int]]] = {
        RasRankState.UNRESPONSIVE: set(),
        RasRankState.DEAD: set(),
    }
    for rank in (rank for entry in document["communicators"] for rank in entry["missing_ranks"]):
        if (state := _absence(rank, "")) in gone:
            gone[state].add((rank["host"], rank["pid"]))
    return {state: len(processes) for state, processes in gone.items()}


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


def _list(table: dict[str, Any], key: str, at: str) -> list[Any]:
    if not isinstance(value := table.get(key), list):
        message = f"{at}.{key} is not an array"
        raise MalformedAnswer(message)
    return value


def _text(table: dict[str, Any], key: str, at: str) -> str:
    if not isinstance(value := table.get(key), str):
        message = f"{at}.{key} is not a string"
        raise MalformedAnswer(message)
    return value


def _flag(table: dict[str, Any], key: str, at: str) -> bool:
    if not isinstance(value := table.get(key), bool):
        message = f"{at}.{key} is neither true nor false"
        raise MalformedAnswer(message)
    return value


def _integer(table: dict[str, Any], key: str, at: str, least: int = 0) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MAX:
        message = f"{at}.{key[:40]} is not an integer of at least {least}"
        raise MalformedAnswer(message)
    return value
