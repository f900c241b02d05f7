"""Who is at fault when collectives hang, from what watchdogs and flight recorders say."""

from __future__ import annotations

import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dshealthd.explain import answer, command
from dshealthd.explain.events import Place
from dshealthd.explain.facts import Recognized
from dshealthd.explain.flight_recorder import digest
from dshealthd.explain.group_verdicts import (
    GroupVerdict,
    disagreement,
    is_part_of_job,
    judge_dumps,
)
from dshealthd.explain.input import InputError
from tests.evidence.test_dump import dump, entry
from tests.explain.explaining import explained, explained_paths, explained_text
from tests.explain.test_layers import CAUGHT
from tests.explain.watchdogs import Group, Rank, printed

CASES = 20


@pytest.mark.parametrize("release", ["2.4", "2.5", "2.7", "2.9"])
def test_a_victim_in_another_group_is_cleared(release: str) -> None:
    """A rank that waits for its partner is not blamed by its other group."""
    right = 0
    for seed in range(CASES):
        chance = random.Random(seed)
        world = 8
        culprit = chance.randrange(world)
        partner = culprit ^ 1
        pair = Group(5 + culprit // 2, f"tp{culprit // 2}")
        pair.ranks = [Rank(partner, partner % 2, 50, 50, 49)]
        groups = [pair]
        for column in range(2):
            group = Group(20 + column, f"dp{column}")
            for row in range(world // 2):
                rank = row * 2 + column
                if rank not in {culprit, partner}:
                    group.ranks.append(Rank(rank, row, 70, 70, 69))
            groups.append(group)
        timed = sorted(line for group in groups for line in printed(release, group, chance))
        steps = (f"[rank{rank}]: step 10 | loss 2.1" for rank in range(world))
        finding = explained(*steps, *(text for *_, text in timed))
        right += finding.slug == "nccl-timeout" and partner not in finding.ranks
    assert right == CASES


def dump_of(world: int, *, number: int, behind: bool) -> bytes:
    """Return the dump of a rank that has entered a collective, or the one before it."""
    last = number - behind
    return dump(
        *(
            entry(step, state="completed" if step < number else "scheduled")
            for step in range(max(1, number - 5), last + 1)
        ),
        pg_config={"0": {"name": "0", "ranks": str(list(range(world)))}},
    )


def test_flight_recorders_beside_the_logs_name_the_rank(tmp_path: Path) -> None:
    """The log tells only that a collective timed out; the dumps tell who never entered it."""
    line = (
        "[rank0]:[E1122 04:44:58.1 ProcessGroupNCCL.cpp:683] [Rank 0] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=42, OpType=ALLREDUCE, NumelIn=1024, NumelOut=1024, "
        "Timeout(ms)=600000) ran for 600001 milliseconds before timing out.\n"
    )
    (tmp_path / "job.out").write_text(line)
    assert explained_paths(tmp_path).ranks == ()
    for rank in range(4):
        data = dump_of(4, number=42, behind=rank == 2)
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(data)
    finding = explained_paths(tmp_path)
    assert finding.ranks == (2,)
    assert "never entered all_reduce #42" in finding.statement


def test_flight_recorders_alone_are_answered_too(tmp_path: Path) -> None:
    """Without a log the answer says what is missing."""
    for rank in range(4):
        data = dump_of(4, number=42, behind=rank == 1)
        (tmp_path / f"_dump_{rank}").write_bytes(data)
    finding = explained_paths(tmp_path)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (1,))
    assert "logs of the ranks" in finding.missing[0]
    assert "(rank 1)" in answer.text(finding, Recognized(), [])


def test_a_dump_without_a_rank_is_said_to_be_unread(tmp_path: Path) -> None:
    """A log beside it still has an answer; alone, it is no run that went well."""
    (tmp_path / "trace.pickle").write_bytes(dump_of(4, number=42, behind=False))
    with pytest.raises(InputError, match="must end with its rank"):
        command.read([str(tmp_path)])
    (tmp_path / "job.out").write_text("step 1\n")
    assert "must end with its rank" in command.read([str(tmp_path)])[1][0]


def test_a_dump_that_names_a_class_is_not_loaded(tmp_path: Path) -> None:
    """A pickle runs nothing of what it asks for, and the answer says that it was not read."""

    class Harm:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return open, (str(tmp_path / "harmed"), "w")  # type: ignore[return-value]

    (tmp_path / "job.out").write_text("CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(Harm(), protocol=2))
    recognizer, unread = command.read([str(tmp_path)])
    assert command.conclude(recognizer).slug == "cuda-oom"
    assert "it imports" in unread[0]
    assert not (tmp_path / "harmed").exists()


DONE, AT = entry(1, state="completed"), "(called at /home/user/train.py:55 forward)"
GATHER = "nccl:all_gather"


@pytest.mark.parametrize(
    ("dumps", "says"),
    [
        pytest.param(
            [dump(DONE, entry(2)), dump(DONE)],
            [f"rank 1 never entered all_reduce #2 of the default_pg {AT}; last enqueued: #1 {AT}"],
            id="behind",
        ),
        pytest.param(
            [dump(entry(5, state="started"))] * 2,
            [f"all 2 ranks entered all_reduce #5 of the default_pg {AT} and none completed it"],
            id="nobody behind",
        ),
        pytest.param(
            [dump(entry(5)), dump(entry(5, GATHER)), dump(entry(5)), dump(entry(5))],
            [
                (
                    "rank 1 ran all_gather of 4096x1024 elements where others ran all_reduce of "
                    "4096x1024 elements as #5 of the default_pg"
                )
            ],
            id="another operation",
        ),
        pytest.param(
            [dump(entry(5)), dump(entry(5, input_sizes=[[8]])), dump(entry(5))],
            [
                (
                    "rank 1 ran all_reduce of 8 elements where others ran all_reduce of 4096x1024 "
                    "elements as #5 of the default_pg"
                )
            ],
            id="another size",
        ),
        pytest.param(
            [dump(entry(5, GATHER)), dump(entry(5, GATHER, input_sizes=[[8]]))],
            [f"all 2 ranks entered all_gather #5 of the default_pg {AT} and none completed it"],
            id="shards of other sizes",
        ),
        pytest.param(
            [dump(entry(5))],
            [
                (
                    f"it is unclear which rank did not enter all_reduce #5 of the default_pg {AT}: "
                    "rank 1 has no dump here"
                )
            ],
            id="a rank elsewhere",
        ),
        pytest.param(
            [dump(DONE, entry(2))] * 2 + [dump(entry(7, state="completed"), entry(8))],
            [f"all_reduce #2 of the default_pg {AT} is pending on 3 ranks"],
            id="more stuck than gone on",
        ),
        pytest.param([dump(DONE)] * 2, [], id="nothing pending"),
    ],
)
def test_dumps_are_judged_without_logs(dumps: list[bytes], says: list[str]) -> None:
    """What the evidence of a hang says of its ranks: the verdicts of `explain`."""
    found = judge_dumps({rank: digest(data) for rank, data in enumerate(dumps)})
    assert [verdict.text for verdict in found] == says


def test_a_digest_is_bounded() -> None:
    """Whatever a dump holds: it is a user's, and the digests of all ranks are read together."""
    tiny = {"state": "scheduled", "process_group": ("tiny", ""), "collective_seq_id": 1}
    for number in (20_000, 20_001):
        found = digest(dump({**tiny, "process_group": ("first", "")}, *[tiny] * (number - 1)))
        assert ("first " in [group["name"] for group in found["groups"]]) == (number == 20_000)
    groups = [{**tiny, "process_group": (str(number), "")} for number in range(65)]
    assert len(digest(dump(*groups))["groups"]) == 64
    own, library = {"filename": "/a/train.py"}, {"filename": "/env/torch/a.py"}
    shapes = [[1] * 9] * 5
    for frames, at in ((63, "/a/train.py:? "), (64, "/env/torch/a.py:? ")):
        operation = entry(1, "x" * 201, input_sizes=shapes, frames=[*[library] * frames, own])
        (group,) = digest(dump(*[{**operation, "collective_seq_id": n} for n in range(9)]))[
            "groups"
        ]
        assert (len(group["pending"]), len(group["last"])) == (8, 8)
        told = group["last"][0]
        assert (told["at"], told["name"]) == (at, "x" * 200)
        assert told["sizes"] == " ".join(["x".join("11111111")] * 4)
    for size, is_kept in ((1 << 20, True), ((1 << 20) + 1, False)):
        ranks = ",".join(["1"] * (size // 2)) + "1" * (1 + size % 2)
        config = {"0": {"name": "0", "ranks": ranks}}
        assert bool(digest(dump(entry(1), pg_config=config))["groups"][0]["ranks"]) == is_kept
    largest = digest(dump(entry(1 << 53), entry((1 << 53) + 1)))["groups"][0]["last"]
    assert [one["number"] for one in largest] == [1 << 53]


def group_dump(groups: dict[str, tuple[list[int], int, int]]) -> bytes:
    """Return the dump of a rank in several groups of one name: members, last entered, completed."""
    return dump(
        *(
            entry(step, pg_id=int(name), process_group=(name, "DP" if name == "3" else "TP"))
            for name, (_, entered, completed) in groups.items()
            for step in range(completed + 1, entered + 1)
        ),
        pg_config={
            name: {"name": name, "ranks": str(ranks)} for name, (ranks, _, _) in groups.items()
        },
        pg_status={
            name: {"last_completed_collective": completed}
            for name, (_, _, completed) in groups.items()
        },
    )


def test_ranks_that_entered_nothing_more_are_named(tmp_path: Path) -> None:
    """They hold the GIL, say: their recorder is empty, while each group that they are in waits."""
    for rank in range(8):
        first = rank // 4 * 4
        members = list(range(first, first + 4))
        data = group_dump({str(10 + first): (members, 30, 29), "3": (list(range(8)), 7, 6)})
        (tmp_path / f"_dump_{rank}").write_bytes(dump() if rank in {1, 6} else data)
    finding = explained_paths(tmp_path)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (1, 6))
    assert "had nothing pending" in finding.statement


def test_groups_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    """Ranks 5 and 7 are stuck at what the others have left, each in a group of its own."""
    for rank in range(8):
        pair = rank // 2 * 2
        is_stuck = rank in {5, 7}
        at, of_all = ((39, 38), (7, 6)) if is_stuck else ((42, 41), (9, 8))
        groups = {str(20 + pair): ([pair, pair + 1], *at), "3": (list(range(8)), *of_all)}
        (tmp_path / f"_dump_{rank}").write_bytes(group_dump(groups))
    assert explained_paths(tmp_path).ranks == (5, 7)


def test_a_verdict_shows_three_ranks_of_each_side() -> None:
    """Their lines, their numbers and their collectives: examples, whatever the job's size."""
    config = {"0": {"name": "0", "ranks": str(list(range(12)))}}

    def judged(first: Callable[[int], list[dict[str, Any]]]) -> GroupVerdict:
        waits = [entry(8, state="completed"), entry(9)]
        dumps = [dump(*first(rank), pg_config=config) for rank in range(4)]
        dumps += [dump(*waits, pg_config=config)] * 8
        (verdict,) = judge_dumps({rank: digest(data) for rank, data in enumerate(dumps)})
        assert verdict.culprits == (0, 1, 2, 3)
        assert [place.file for place in verdict.proof] == [f"rank {n}" for n in (0, 1, 2, 4, 5, 6)]
        return verdict

    behind = judged(lambda rank: [entry(rank + 1, state="completed")])
    assert re.findall(r"#\d", behind.text.partition("last")[2]) == ["#1", "#2", "#3"]
    assert judged(lambda _: []).kind == "missing"
    place = Place("job.out", 1, "")
    runs = {rank: (f"op {rank}", place._replace(line=rank)) for rank in range(4)}
    differ = disagreement(runs)
    assert (differ.culprits, re.findall(r"op \d", differ.says)) == ((), ["op 0", "op 1", "op 2"])
    assert len(differ.proof) == 3
    told = disagreement({**runs, **dict.fromkeys(range(4, 9), ("most", place))})
    assert told.text == "ranks 0, 1, 2, 3 ran op 0; op 1; op 2 where others ran most"


def wrapper(one: int, sizes: dict[int, int], other: int) -> str:
    """Return what torch's wrapper raises in a rank that compares itself with another."""
    runs = {
        rank: (
            f"CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE, TensorShape=[{size}], "
            "TensorDtypes=Float)"
        )
        for rank, size in sizes.items()
    }
    return (
        f"[rank{one}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {one} is "
        f"running collective: {runs[one]}, but Rank {other} is running collective: {runs[other]}.\n"
    )


def test_the_rank_that_tells_of_a_mismatch_is_not_the_culprit_for_that(tmp_path: Path) -> None:
    """Most ranks decide; where two alone compare themselves, nobody knows which is wrong."""
    sizes = {0: 8, 1: 8, 2: 9, 3: 8}
    several = "".join(wrapper(one, sizes, 2) for one in (0, 1, 3)) + wrapper(2, sizes, 0)
    for text, wanted in ((several, (2,)), (wrapper(0, sizes, 2), ())):
        finding = explained_text(tmp_path, text)
        assert (finding.slug, finding.ranks) == ("nccl-timeout", wanted), finding.statement
        assert "OpType=ALLREDUCE" in finding.statement
        assert "another operation" in str(finding.step)
        assert finding.missing == ()


def test_ranks_in_different_collectives_do_not_merely_take_long(tmp_path: Path) -> None:
    """In backward too: what helps is why they differ, not a longer time-out for gradients."""
    text = "".join(
        f"[rank{one}]: Traceback (most recent call last):\n"
        f'[rank{one}]:   File "/srv/torch/autograd/graph.py", line 825, in _engine_run_backward\n'
        f"[rank{one}]:     return Variable._execution_engine.run_backward(\n"
        + wrapper(one, {0: 8, 1: 9}, other)
        for one, other in ((0, 1), (1, 0))
    )
    finding = explained_text(tmp_path, text)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", ())
    assert "another operation" in str(finding.step)


def test_barriers_that_differ_by_their_number_alone_are_told_apart(tmp_path: Path) -> None:
    """One rank has called one collective more than the other, which the names do not show."""
    runs = {0: "SequenceNumber=7OpType=BARRIER", 1: "SequenceNumber=8OpType=BARRIER"}
    (tmp_path / "job.out").write_text(
        "[rank0]: RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running "
        f"collective: CollectiveFingerPrint({runs[0]}), but Rank 1 is running collective: "
        f"CollectiveFingerPrint({runs[1]}).Collectives differ in the following aspects: Sequence "
        "number: 7vs 8\n"
    )
    statement = explained_paths(tmp_path / "job.out").statement
    assert "OpType=BARRIER #7" in statement
    assert "OpType=BARRIER #8" in statement


@pytest.mark.parametrize("group", ["[PG 0 (default_pg) Rank {}]", "[PG ID 0 PG GUID  Rank {}]"])
def test_groups_as_torch_2_4_and_2_6_write_them(tmp_path: Path, group: str) -> None:
    """A blank before the name, and a group without a name."""
    text = "".join(
        f"[rank{rank}]:[E816 01:45:40.1 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught "
        f"collective operation timeout: WorkNCCL(SeqNum=8, OpType={name}, NumelIn={size}, "
        f"NumelOut={size}, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.\n"
        f"[rank{rank}]:[E816 01:45:40.2 ProcessGroupNCCL.cpp:1664] {group.format(rank)} Exception "
        "(either an error or timeout) detected by watchdog at work: 8, last enqueued NCCL work: 8, "
        "last completed NCCL work: 7.\n"
        for rank, name, size in ((0, "ALLREDUCE", 99), (1, "BROADCAST", 5), (2, "ALLREDUCE", 99))
    )
    finding = explained_text(tmp_path, text)
    assert (finding.slug, finding.ranks) == ("nccl-timeout", (1,)), finding.statement


@pytest.mark.parametrize(("size", "is_judged"), [(200_000, True), (200_001, False)])
def test_a_job_of_more_ranks_than_any_has_is_not_judged(size: int, *, is_judged: bool) -> None:
    """Its size is a number of something else, and a list of its ranks would take memory."""
    reports = [CAUGHT.format(rank) for rank in range(3)]
    finding = explained(f"world_size={size}", *reports)
    assert ("it is unclear which rank did not enter" in finding.statement) == is_judged
    assert finding.ranks == ()


def test_nobody_is_accused_of_silence_in_a_job_of_unknown_size(tmp_path: Path) -> None:
    """Of a log that was cut, the ranks that it does not hold may have told anything."""
    text = (
        "step 1/8 | loss 0.02\n[rank1]: Traceback (most recent call last):\n"
        '[rank1]:   File "/srv/train.py", line 131, in train\n'
        "[rank1]: RuntimeError: [../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting "
        "8000ms for recv operation to complete\n[rank0]: Traceback (most recent call last):\n"
    )
    for head, wanted in (("", ()), ("world_size=2\n", (0,))):
        (tmp_path / "job.out").write_text(head + text)
        assert explained_paths(tmp_path / "job.out").ranks == wanted


@pytest.mark.parametrize(("size", "ranks"), [(8, ()), (9, (0, 1, 2, 3))])
def test_ranks_that_are_silent_together_are_fewer_than_the_others(
    size: int, ranks: tuple[int, ...]
) -> None:
    """Of two halves, either may have lost the other."""
    lost = "[rank{}]: RuntimeError: NCCL error: remote process exited or there was a network error"
    said = [f"[rank{rank}]: up" for rank in range(size)]
    said += [lost.format(rank) for rank in range(4, size)]
    assert explained(f"world_size={size}", *said).ranks == ranks


@pytest.mark.parametrize(
    ("first", "count", "is_part"),
    [(5, 1, True), (4, 2, False), (8, 4, True), (8, 8, True), (16, 16, True), (32, 32, False),
     (12, 8, False)],
)  # fmt: skip
def test_ranks_that_are_silent_together_are_a_whole_node(
    first: int, count: int, *, is_part: bool
) -> None:
    """Nodes have 4, 8 or 16 GPUs, and begin with a multiple of that."""
    assert is_part_of_job(list(range(first, first + count))) == is_part
