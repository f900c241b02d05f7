"""Who is behind whom, by what the flight recorders of several ranks say."""

from __future__ import annotations

from typing import Any

from dshealthd.evidence.collectives import compare
from dshealthd.explain.flight_recorder import digest
from tests.evidence.test_dump import dump, entry


def ranks(*dumps: bytes) -> dict[int, Any]:
    """Return what these dumps say, of ranks 0 on."""
    return {rank: digest(data) for rank, data in enumerate(dumps)}


def test_the_rank_that_has_not_entered_is_named() -> None:
    """The rank that is behind, what it has not entered, and where its last call was."""
    done = entry(1, state="completed")
    (line,) = compare(ranks(dump(done, entry(2)), dump(done, entry(2)), dump(done)))
    assert line == (
        "group 0 default_pg of ranks [0, 1]: rank 2 has not entered all_reduce 2 of "
        "4096x1024 (called at /home/user/train.py:55 forward), "
        "which ranks 0, 1 entered; its last is all_reduce 1 of 4096x1024, completed (called "
        "at /home/user/train.py:55 forward)"
    )


def test_ranks_that_all_wait_for_the_same_are_not_accused() -> None:
    """Where all have entered and none has completed, no rank is behind, and that is said."""
    (line,) = compare(ranks(dump(entry(5, state="started")), dump(entry(5, state="started"))))
    assert line.endswith("and did not complete it; none of these ranks is behind")
    assert "ranks 0, 1 entered all_reduce 5 of 4096x1024, started" in line


def test_ranks_that_call_different_things_are_told_apart() -> None:
    """One that calls another operation under the same number is out of step."""
    lines = compare(ranks(dump(entry(5)), dump(entry(5, "nccl:all_gather")), dump(entry(5))))
    assert (
        "group 0 default_pg of ranks [0, 1]: operation 5 differs between ranks: rank 1 "
        "all_gather, ranks 0, 2 all_reduce"
    ) in lines


def test_an_all_reduce_of_another_size_is_told() -> None:
    """Ranks whose models differ hang in NCCL without an error."""
    lines = compare(ranks(dump(entry(5)), dump(entry(5, input_sizes=[[8]]))))
    assert any(
        "operation 5 (all_reduce) differs in size between ranks: rank 0 4096x1024, rank 1 8" in line
        for line in lines
    )


def test_a_gather_of_other_sizes_is_no_finding() -> None:
    """Shards may differ where ranks contribute different parts."""
    lines = compare(
        ranks(
            dump(entry(5, "nccl:all_gather")), dump(entry(5, "nccl:all_gather", input_sizes=[[8]]))
        )
    )
    assert not any("size" in line for line in lines)


def test_groups_are_compared_each_by_itself() -> None:
    """Numbers of one process group say nothing about another's."""
    other = entry(90, process_group=("1", "tp"))
    (line,) = compare(
        ranks(dump(entry(5, state="completed"), other), dump(entry(5, state="completed")))
    )
    assert line == (
        "group 1 tp: rank 0 entered all_reduce 90 of 4096x1024 (called at "
        "/home/user/train.py:55 forward) and did not complete it; "
        "none of these ranks is behind"
    )


def test_a_job_that_runs_has_no_findings() -> None:
    """Nothing pending, nobody behind."""
    assert (
        compare(ranks(dump(entry(5, state="completed")), dump(entry(5, state="completed")))) == []
    )
    assert compare({}) == []
