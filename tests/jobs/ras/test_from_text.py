"""The text form of RAS answers, in the words of NCCL 2.24 and of later releases, and whatever else
may arrive.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dshealthd.jobs.ras.from_text import parse_text
from dshealthd.jobs.ras.status import (
    ANY,
    Communicator,
    ImpossibleAnswer,
    Lag,
    MalformedAnswer,
    RankLocation,
    RasRankState,
    Spread,
    Status,
    Trouble,
)

HEAD = """\
NCCL version 2.27.7 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (0.02s)
=============

"""
TABLE = """\
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
BETWEEN = """
Errors
======

"""
WARNINGS = """\
Warnings
========

"""


def answer(table: str, errors: str = "", warnings: str = "") -> bytes:
    """Return a whole answer."""
    return (HEAD + TABLE + table + BETWEEN + errors + WARNINGS + warnings).encode()


def parsed(table: str, errors: str = "", warnings: str = "") -> tuple[Status, Communicator]:
    """Return the status, and the first communicator, of a whole answer."""
    status = parse_text(answer(table, errors, warnings))
    return status, status.communicators[0]


def test_healthy_job() -> None:
    """A table without sections is communicators whose states are known, and whose counts are not."""
    status, world = parsed(
        "    0         1         2         8        16        16   RUNNING      OK\n"
        "    1         8         2         1         2        16      INIT      OK\n"
    )
    pairs = status.communicators[1]
    assert (status.version, status.timeouts, status.processes) == (
        "2.27.7",
        0,
        {RasRankState.UNRESPONSIVE: 0, RasRankState.DEAD: 0},
    )
    assert (world.name, world.size, world.alike, world.states, world.operations) == (
        "",
        16,
        1,
        {RasRankState.RUNNING: 16},
        {},
    )
    assert (pairs.size, pairs.alike, pairs.states) == (2, 8, {RasRankState.INIT: 2})


def test_no_communicators() -> None:
    """A job that has none yet has none.

    In the words of 2.24, which prints the head of the table in any case.
    """
    assert parse_text(answer("No communicator data collected!\n")).communicators == ()


def test_counts_differ() -> None:
    """Counts that differ are known by operation, and of outliers, who they are.

    A single one has a line of its own form.
    """
    status, world = parsed(
        "    0         2         2         8        16        16   RUNNING  MISMATCH\n",
        warnings="""\
#0-1 (00ab79b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  13 ranks have launched up to operation 6650
  2 ranks have launched up to operation 6649
  Rank 3 -- GPU 3 managed by process 4003 on node 192.0.2.1
  Rank 9 -- GPU 0 (NVML 1) managed by process 5001 on node 2001:db8::2
  Rank 5 has launched up to operation 6600 -- GPU 5 managed by process 4005 on node 192.0.2.1

  Communicator ranks have different Reduce operation counts
  15 ranks have launched up to operation 1
  Rank 7 has not launched any operations -- [process information not found]

""",
    )
    assert world.name == "00ab79b828ff1a75"
    assert world.operations == {"AllReduce": Spread(6600, 6650), "Reduce": Spread(0, 1)}
    assert world.behind == (
        Lag(5, "AllReduce", 50, RankLocation("192.0.2.1", 4005, 5)),
        Lag(3, "AllReduce", 1, RankLocation("192.0.2.1", 4003, 3)),
        Lag(7, "Reduce", 1, None),
        Lag(9, "AllReduce", 1, RankLocation("2001:db8::2", 5001, 1)),
    )
    assert world.states == {RasRankState.RUNNING: 16}
    assert [
        (communicator.name, communicator.alike) for communicator in status.communicators[1:]
    ] == [("", 1)]


def test_counts_differ_in_2_24() -> None:
    """The first release counts all operations together."""
    _, world = parsed(
        "    0         1         1         4         4         4   RUNNING  MISMATCH\n",
        warnings="""\
#0-0 (00ab79b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 12
  Rank 1 has launched up to operation 11 -- GPU 1 managed by process 4001 on node 192.0.2.1

""",
    )
    assert world.operations == {ANY: Spread(11, 12)}
    assert world.behind == (Lag(1, ANY, 1, RankLocation("192.0.2.1", 4001, 1)),)


@pytest.mark.parametrize(
    ("lines", "behind", "unclear"),
    [
        # One is ahead: who is behind are the others, and no name is told.
        (["3 ranks have", "Rank 0 has"], (), {ANY}),
        # Half and half.
        (["2 ranks have", "2 ranks have"], (), {ANY}),
    ],
)
def test_who_is_behind_is_unclear(
    lines: list[str], behind: tuple[Lag, ...], unclear: set[str]
) -> None:
    """Where those that are behind are not named, nobody is accused."""
    place = " -- GPU 0 managed by process 4000 on node 192.0.2.1"
    text = "".join(
        f"  {who} launched up to operation {count}{place if who.startswith('Rank') else ''}\n"
        for who, count in zip(lines, (8, 11), strict=True)
    )
    _, world = parsed(
        "    0         1         1         4         4         4   RUNNING  MISMATCH\n",
        warnings="#0-0 (00ab79b828ff1a75) MISMATCH\n"
        f"  Communicator ranks have different collective operation counts\n{text}\n",
    )
    assert (world.behind, world.unclear) == (behind, frozenset(unclear))
    assert world.operations == {ANY: Spread(8, 11)}


def test_named_rank_is_ahead_of_those_behind() -> None:
    """A rank that is named is not accused where others, not named, have launched less."""
    _, world = parsed(
        "    0         1         1         4         4         4   RUNNING  MISMATCH\n",
        warnings="""\
#0-0 (00ab79b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  2 ranks have launched up to operation 10
  Rank 1 has launched up to operation 11 -- GPU 1 managed by process 4001 on node 192.0.2.1
  Rank 0 has launched up to operation 13 -- GPU 0 managed by process 4000 on node 192.0.2.1

""",
    )
    assert (world.behind, world.unclear) == ((), frozenset({ANY}))


def test_named_rank_is_behind_those_not_named() -> None:
    """A rank that is named and has launched the least is accused, whoever else is behind."""
    _, world = parsed(
        "    0         1         1         5         5         5   RUNNING  MISMATCH\n",
        warnings="""\
#0-0 (00ab79b828ff1a75) MISMATCH
  Communicator ranks have different collective operation counts
  3 ranks have launched up to operation 11
  Rank 1 has launched up to operation 9 -- GPU 1 managed by process 4001 on node 192.0.2.1
  Rank 0 has launched up to operation 13 -- GPU 0 managed by process 4000 on node 192.0.2.1

""",
    )
    assert world.behind == (Lag(1, ANY, 4, RankLocation("192.0.2.1", 4001, 1)),)
    assert world.unclear == {ANY}


@pytest.mark.parametrize("unknown", ["NOCOMM", "UNKNOWN"])
def test_states_differ(unknown: str) -> None:
    """The states of a communicator that is torn down are as listed, whatever the release calls
    those who left.
    """
    _, world = parsed(
        "    0         1         2         8        16        16  FINALIZE  MISMATCH\n",
        warnings=f"""\
#0-0 (9e17999afaa87dbb) MISMATCH
  Communicator ranks have different status
  13 ranks have status {unknown}
  2 ranks have status RUNNING
  Rank 0 -- GPU 0 managed by process 4000 on node 192.0.2.1
  Rank 8 -- GPU 0 managed by process 5000 on node 192.0.2.2
  Rank 4 has status FINALIZE -- GPU 4 managed by process 4004 on node 192.0.2.1

""",
    )
    assert world.states == {
        RasRankState.NOT_MEMBER: 13,
        RasRankState.RUNNING: 2,
        RasRankState.FINALIZE: 1,
    }
    assert (world.behind, world.troubles) == ((), ())


def test_missing_ranks() -> None:
    """A rank whose process is listed as dead is dead, another is unresponsive.

    Processes are counted as told.
    """
    status, world = parsed(
        "    0         1         2       6-8        16        14   RUNNING  INCOMPLETE\n",
        errors="""\
INCOMPLETE
  Missing communicator data from 1 job process
  Process 5005 on node 192.0.2.2 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 5006 on node 192.0.2.2 managing GPU 6

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 2 ranks
  Rank 13 -- GPU 5 managed by process 5005 on node 192.0.2.2
  Rank 14 -- GPU 6 managed by process 5006 on node 192.0.2.2

""",
        warnings=(
            "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n\n"
        ),
    )
    assert (status.processes, status.timeouts) == (
        {RasRankState.UNRESPONSIVE: 1, RasRankState.DEAD: 1},
        2,
    )
    assert world.states == {
        RasRankState.RUNNING: 14,
        RasRankState.DEAD: 1,
        RasRankState.UNRESPONSIVE: 1,
    }
    assert world.troubles == (
        Trouble(14, "dead", RankLocation("192.0.2.2", 5006, 6)),
        Trouble(13, "unresponsive", RankLocation("192.0.2.2", 5005, 5)),
    )


def test_missing_rank_in_2_24() -> None:
    """The first release gives the numbers of missing ranks alone."""
    _, world = parsed(
        "    0         1         2       7-8        16        15   RUNNING  INCOMPLETE\n",
        errors=(
            "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n  The "
            "missing rank: 13\n\n"
        ),
    )
    assert world.states == {RasRankState.RUNNING: 15, RasRankState.UNRESPONSIVE: 1}
    assert world.troubles == (Trouble(13, "unresponsive", None),)


JOB_OF_16 = "      2          8            1         16       16\n"


@pytest.mark.parametrize(
    ("head", "what"),
    [
        ("INCOMPLETE\n  Missing communicator data from 1 job process\n", "unresponsive"),
        ("DEAD\n  1 job process is considered dead (unreachable via the RAS network)\n", "dead"),
    ],
)
def test_place_of_the_missing_rank_in_2_24(head: str, what: str) -> None:
    """Where the one process that is gone has one GPU, the rank that all GPUs' communicator lacks is
    its.
    """
    missing = "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    _, world = parsed(
        f"{JOB_OF_16}    0         1         2       7-8        16        15   RUNNING  "
        "INCOMPLETE\n",
        errors=f"{head}  Process 5005 on node 192.0.2.2 managing GPU 5 (NVML 6)\n\n"
        f"{missing}  The missing rank: 13\n\n",
    )
    assert world.troubles == (Trouble(13, what, RankLocation("192.0.2.2", 5005, 6)),)


def test_place_that_could_be_anothers_in_2_24() -> None:
    """A smaller communicator may lack a rank that has left it: no place is made up."""
    missing = "#0-0 (cf264af53edbe986) INCOMPLETE\n  Missing communicator data from 1 rank\n"
    _, world = parsed(
        f"{JOB_OF_16}    0         1         1         8         8         7   RUNNING  "
        "INCOMPLETE\n",
        errors="INCOMPLETE\n  Missing communicator data from 1 job process\n"
        f"  Process 5005 on node 192.0.2.2 managing GPU 5\n\n{missing}  The missing rank: 3\n\n",
    )
    assert world.troubles == (Trouble(3, "unresponsive", None),)


def test_errors() -> None:
    """Errors are counted by kind and name, and the ranks that are named have them."""
    _, world = parsed(
        "    0         1         2         8        16        16   RUNNING  ERROR,MISMATCH\n",
        errors="""\
#0-0 (cf264af53edbe986) ERROR
  Initialization error on 1 rank
  Rank 2 reported System error -- GPU 2 managed by process 4002 on node 192.0.2.1
  Asynchronous errors on 3 ranks
  2 ranks reported Remote process error
  Rank 4 -- GPU 4 managed by process 4004 on node 192.0.2.1
  Rank 5 -- [process information not found]
  Rank 6 reported Unheard-of error -- GPU 6 managed by process 4006 on node 192.0.2.1

""",
    )
    assert world.errors == {
        ("init", "system_error"): 1,
        ("async", "remote_error"): 2,
        ("async", "other"): 1,
    }
    assert world.troubles == (
        Trouble(2, "system_error", RankLocation("192.0.2.1", 4002, 2)),
        Trouble(6, "other", RankLocation("192.0.2.1", 4006, 6)),
        Trouble(4, "remote_error", RankLocation("192.0.2.1", 4004, 4)),
        Trouble(5, "remote_error", None),
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "an incomplete one"),
        (answer("")[: -len(WARNINGS)], "an incomplete one"),
        (b"Warnings\n========\n", "Communicators and Warnings are missing"),
        (
            answer("    0         1         2         8        16        16   DANCING      OK\n"),
            "the status DANCING",
        ),
        (
            answer("", errors="#7-0 (cf264af53edbe986) ERROR\n"),
            "#7-0 belongs to a group that is not in the table",
        ),
    ],
)
def test_malformed(data: bytes, said: str) -> None:
    """What is cut off, or does not fit together, is refused with what is wrong."""
    with pytest.raises(MalformedAnswer, match=said):
        parse_text(data)


@given(st.binary())
def test_any_bytes(data: bytes) -> None:
    """Whatever arrives is a named error, as it is no whole answer."""
    with pytest.raises(MalformedAnswer):
        parse_text(data)


LINES = st.one_of(
    st.text(max_size=30),
    st.from_regex(
        r" {0,5}[0-9]{1,20} +[0-9]{1,20} +[0-9] +[0-9](-[0-9])? +[0-9]{1,20} +[0-9] +(RUNNING|INIT|NOCOMM) +OK",
        fullmatch=True,
    ),
    st.from_regex(r"#[0-9]-[0-9] \([0-9a-f]{16}\) (INCOMPLETE|ERROR|MISMATCH)", fullmatch=True),
    st.from_regex(
        r"  Rank [0-9]{1,20} (has|reported) (status INIT|launched up to operation [0-9]{1,20}|-- .{0,9})",
        fullmatch=True,
    ),
    st.from_regex(
        r"  [0-9]{1,20} (ranks have (launched up to operation [0-9]{1,20}|status [A-Z]{3})|job processes)",
        fullmatch=True,
    ),
    st.from_regex(
        r"  (The missing ranks: [0-9,]{0,30}|Missing communicator data from [0-9]{1,20} ranks?)",
        fullmatch=True,
    ),
    st.sampled_from(
        [
            "DEAD",
            "TIMEOUT",
            "INCOMPLETE",
            "  Communicator ranks have different AllReduce operation counts",
        ]
    ),
)


@settings(max_examples=200)
@given(st.lists(LINES))
def test_any_lines(lines: list[str]) -> None:
    """Lines like NCCL's in any order are an answer, in which no number is negative, or a named
    error.
    """
    try:
        status = parse_text(answer("\n".join([*lines, ""])))
    except MalformedAnswer:
        return
    assert all(
        ranks >= 0
        for communicator in status.communicators
        for ranks in communicator.states.values()
    )
    assert all(communicator.alike > 0 for communicator in status.communicators)


@pytest.mark.parametrize(
    "line",
    [
        "  Rank -1073741824 has status RUNNING",
        "  Rank 3 -- GPU 1 managed by process -12 on node 192.0.2.1",
        "  Rank 3 -- GPU -7 managed by process 12 on node 192.0.2.1",
    ],
)
def test_negative_number(line: str) -> None:
    """What an overrun inside NCCL writes ends the reading, instead of being passed over."""
    answer = "Communicators... (0.00s)\n=============\n\nWarnings\n========\n\n" + line + "\n"
    with pytest.raises(ImpossibleAnswer, match="an impossible number"):
        parse_text(answer.encode())
