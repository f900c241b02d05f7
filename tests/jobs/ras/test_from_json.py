"""The JSON form of RAS answers: what is taken from it, the repair of the malformed releases, and
whatever else may arrive.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.jobs.ras.from_json import parse_json, repair
from dshealthd.jobs.ras.status import Lag, MalformedAnswer, RankLocation, RasRankState, Trouble
from tests.jobs.ras.server import COUNTS, Communicator, Rank, document

FOUR = [Rank(number, pid=4000 + number, gpu=number) for number in range(4)]
GONE = Rank(4, pid=4004, host="192.0.2.2", gpu=0, flags=("unresponsive", "considered_dead"))
SILENT = Rank(5, pid=4005, host="192.0.2.2", gpu=1, flags=("unresponsive",))
LEFT = Rank(6, pid=4006, host="192.0.2.2", gpu=2)


def test_healthy_job() -> None:
    """All ranks of a job that is well are running, their counts agree, and nothing is behind or in
    trouble.
    """
    status = parse_json(document(Communicator(FOUR)))
    (communicator,) = status.communicators
    assert status.version == "2.29.7"
    assert (communicator.name, communicator.size, communicator.states) == (
        "0000000001f00ba4 0x1:0x2",
        4,
        {RasRankState.RUNNING: 4},
    )
    assert (communicator.behind, communicator.troubles) == ((), ())
    assert communicator.marks == dict.fromkeys(range(4), sum(COUNTS.values()))
    assert status.ranks[RankLocation("192.0.2.1", 4002, 2)] == 2


@pytest.mark.parametrize("version", ["2.28.7", "2.28.9", "2.29.7"])
def test_missing_ranks(version: str) -> None:
    """Ranks that are dead, silent or no members are told apart, in releases that forget the comma
    as in others.
    """
    data = document(Communicator(FOUR, [GONE, SILENT, LEFT]), version=version)
    if version.startswith("2.28"):
        with pytest.raises(json.JSONDecodeError):
            json.loads(data)
    status = parse_json(data)
    (communicator,) = status.communicators
    assert communicator.states == {
        RasRankState.RUNNING: 4,
        RasRankState.DEAD: 1,
        RasRankState.UNRESPONSIVE: 1,
        RasRankState.NOT_MEMBER: 1,
    }
    assert communicator.troubles == (
        Trouble(4, "dead", RankLocation("192.0.2.2", 4004, 0)),
        Trouble(5, "unresponsive", RankLocation("192.0.2.2", 4005, 1)),
    )


def test_rank_behind() -> None:
    """Ranks that have launched fewer operations are named with the operation."""
    ranks = [
        *FOUR[:2],
        Rank(2, gpu=2, counts={"AllReduce": 990}),
        Rank(3, gpu=3, counts={"AllReduce": 998, "AllGather": 39}),
    ]
    (communicator,) = parse_json(document(Communicator(ranks))).communicators
    place = RankLocation("192.0.2.1", 4000, 3)
    assert communicator.behind == (
        Lag(2, "AllReduce", 10, RankLocation("192.0.2.1", 4000, 2)),
        Lag(3, "AllGather", 1, place),
        Lag(3, "AllReduce", 2, place),
    )


def test_rank_that_lost_its_connection_to_another() -> None:
    """Both are named, and who cannot launch any more for that is not behind."""
    ranks = [Rank(0, async_error=6, counts={"AllReduce": 999}), *FOUR[1:3]]
    gone = Rank(3, pid=4003, gpu=3, flags=("unresponsive",))
    (communicator,) = parse_json(document(Communicator(ranks, [gone]))).communicators
    assert {(trouble.rank, trouble.what) for trouble in communicator.troubles} == {
        (3, "unresponsive"),
        (0, "remote_error"),
    }
    assert communicator.behind == ()
    lagging = [Rank(0, async_error=1, counts={"AllReduce": 999}), *FOUR[1:]]
    (communicator,) = parse_json(document(Communicator(lagging))).communicators
    assert [lag.rank for lag in communicator.behind] == [0]


def test_states_and_errors() -> None:
    """States follow NCCL's own rules: abort goes before finalize, and that before init."""
    ranks = [
        Rank(0, init_state=7),
        Rank(1, flags=("finalize_called",)),
        Rank(2, flags=("destroy_flag", "abort_flag")),
        Rank(3, async_error=6),
        Rank(4, async_error=7),
        Rank(5, init_state=2),
        Rank(6, async_error=77),
    ]
    (communicator,) = parse_json(document(Communicator(ranks))).communicators
    assert communicator.states == {
        RasRankState.INIT: 2,
        RasRankState.FINALIZE: 1,
        RasRankState.ABORT: 1,
        RasRankState.RUNNING: 3,
    }
    assert {(trouble.rank, trouble.what) for trouble in communicator.troubles} == {
        (3, "remote_error"),
        (5, "system_error"),
        (6, "other"),
    }


def test_host_that_is_no_address() -> None:
    """What stands in place of an address comes into no label."""
    (communicator,) = parse_json(
        document(Communicator([], [Rank(0, host="unknown", pid=-1, flags=("unresponsive",))]))
    ).communicators
    assert communicator.troubles == (Trouble(0, "unresponsive", RankLocation("", -1, 0)),)


def test_no_communicators() -> None:
    """A job that has none yet has none."""
    assert parse_json(document().replace(b"[]", b"[\n\n  ]")).communicators == ()


@pytest.mark.parametrize(("old", "new", "said"), [
    (b'"size": 4', b'"size": "4"', r"communicators\[0\]\.size is not an integer from 0"),
    (b'"rank": 2', b'"rank": true', r"communicators\[0\]\.ranks\[2\]\.rank is not an integer"),
    (b'"pid": 4001', b'"pid": 1e5', r"ranks\[1\]\.pid is not an integer from -1"),
    (b'"AllReduce": 1000', b'"AllReduce": -1', r"collective_counts\.AllReduce is not an int"),
    (b'"abort_flag": false', b'"abort_flag": 0', "abort_flag is neither true nor false"),
    (b'"hash": "0x', b'"hash": "', "the hash '1f00ba4' is not a hexadecimal number"),
    (b'"missing_ranks": [', b'"others": [', r"communicators\[0\] lacks missing_ranks"),
    (b'"communicators_count": 1', b'"communicators_count": NaN', "has NaN or Infinity"),
    (b'"nccl_version"', b'"\xff"', "not JSON"),
])  # fmt: skip
def test_bad_value_is_named(old: bytes, new: bytes, said: str) -> None:
    """An answer that is JSON and not NCCL's is refused with the place of what is wrong."""
    data = document(Communicator(FOUR))
    assert old in data
    with pytest.raises(MalformedAnswer, match=said):
        parse_json(data.replace(old, new))


@pytest.mark.parametrize(
    "data", [b"", b"[" * 1_000_000, b"1" * 10_000, b"null", b"[]", b'{"nccl_version": 1}'], ids=len
)
def test_bombs(data: bytes) -> None:
    """Depth without end and numbers without end are refused as quickly as nonsense."""
    with pytest.raises(MalformedAnswer):
        parse_json(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.sampled_from(["nvml_dev", "status"]), inner)
    ),
    max_leaves=30,
)


@given(VALUES, st.sampled_from([None, 1, 2, 10]))
def test_repair_leaves_valid_json_alone(value: Any, indent: int | None) -> None:
    """No valid document is changed, however it is laid out."""
    data = json.dumps(value, indent=indent, ensure_ascii=False).encode(errors="replace")
    assert repair(data) == data


@pytest.mark.parametrize(
    "text",
    ['"nvml_dev": 1\n          "status": {', '\\"nvml_dev\\": 1\\n          \\"status\\": {'],
)
def test_repair_leaves_strings_alone(text: str) -> None:
    """A string that holds the flaw itself, as JSON has to write it, is not the flaw."""
    data = json.dumps({"host": text}, indent=2).encode()
    assert repair(data) == data


def test_repair_is_of_the_flaw_alone() -> None:
    """Repaired is what the releases get wrong, to exactly what later ones write."""
    good = document(Communicator(FOUR, [GONE, SILENT]), version="2.29.7")
    bad = document(Communicator(FOUR, [GONE, SILENT]), version="2.28.9")
    assert repair(bad).replace(b"2.28.9", b"2.29.7") == good
    assert repair(good) == good
    with pytest.raises(MalformedAnswer):
        parse_json(re.sub(rb'("pid": 4000),', rb"\1", good))


WHOLE = document(Communicator(FOUR, [GONE, SILENT]), version="2.28.9")


@settings(max_examples=200)
@given(
    st.integers(0, len(WHOLE)),
    st.integers(0, 40),
    st.binary(max_size=10) | st.sampled_from([b"null", b"-1", b"{}", b"[]", b"1e5"]),
)
def test_damaged_answers(start: int, length: int, instead: bytes) -> None:
    """An answer with a piece cut out or replaced is an answer or a named error."""
    try:
        parse_json(WHOLE[:start] + instead + WHOLE[start + length :])
    except MalformedAnswer as error:
        assert len(str(error)) < 500  # noqa: PT017 - it may be an answer, too


@given(VALUES)
def test_any_json(value: Any) -> None:
    """JSON of any shape in place of the communicators is an answer or a named error."""
    answer = {"nccl_version": "2.30.3", "communicators": value}
    try:
        parse_json(json.dumps(answer).encode())
    except MalformedAnswer:
        return
    assert value == []


@pytest.mark.parametrize(("path", "most"), [
    (("size",), 1 << 20),
    (("ranks", 0, "rank"), 1 << 20),
    (("missing_ranks", 0, "rank"), 1 << 20),
    (("ranks", 0, "pid"), 1 << 22),
    (("ranks", 0, "nvml_dev"), 1 << 10),
    (("ranks", 0, "collective_counts", "AllReduce"), 1 << 53),
    (("ranks", 0, "status", "init_state"), (1 << 31) - 1),
    (("ranks", 0, "status", "async_error"), (1 << 31) - 1),
])  # fmt: skip
def test_numbers_that_no_job_has_are_refused(path: tuple[Any, ...], most: int) -> None:
    """The largest plausible number is taken, the next one is named in the error."""
    for value, taken in ((most, True), (most + 1, False)):
        answer = json.loads(document(Communicator(FOUR, [SILENT])))
        entry = answer["communicators"][0]
        for key in path[:-1]:
            entry = entry[key]
        assert path[-1] in entry
        entry[path[-1]] = value
        if taken:
            parse_json(json.dumps(answer).encode())
        else:
            with pytest.raises(MalformedAnswer, match=rf"{path[-1]} is not an integer from"):
                parse_json(json.dumps(answer).encode())
