"""Progress from answer to answer, and the summary that is shown: on answers in NCCL's form."""

from __future__ import annotations

from dshealthd.jobs.ras.evaluation import JobProgress, RankLabel, lags, troubles
from dshealthd.jobs.ras.from_json import parse_json
from tests.jobs.ras import server as ras_server
from tests.jobs.ras.server import Communicator, document


def ranks(*counts: int) -> list[ras_server.Rank]:
    """Return ranks that have launched so many all-reduces."""
    return [
        ras_server.Rank(number, pid=4000 + number, gpu=number, counts={"AllReduce": count})
        for number, count in enumerate(counts)
    ]


def fed(*answers: bytes) -> JobProgress:
    """Return what is remembered after these answers."""
    progress = JobProgress()
    for answer in answers:
        progress.update(parse_json(answer))
    return progress


def test_silence_is_no_progress() -> None:
    """A rank that falls silent or comes back does not look like a job that gets on."""
    whole, less = Communicator(ranks(5, 5, 5)), Communicator(ranks(5, 5), ranks(5, 5, 5)[2:])
    assert fed(document(whole), document(less), document(whole)).idle == 2


def test_new_communicator_is_no_progress() -> None:
    """A communicator that was not in the answer before is not compared."""
    first, second = Communicator(ranks(5, 5)), Communicator(ranks(9), name="b")
    assert fed(document(first), document(first, second)).idle == 1
    assert fed(document(first), document(second)).idle is None


def test_communicators_of_one_hash() -> None:
    """Two communicators whose hashes are the same by chance are two, by their second one."""
    one, other = (
        document(Communicator(ranks(5))),
        document(Communicator(ranks(9))).replace(b"0x1:0x2", b"0x1:0x3"),
    )
    assert fed(one, other).idle is None


def test_lagging_ranks_are_those_that_stand_still() -> None:
    """A rank that is behind while its communicator gets on is not named."""
    moving = (document(Communicator(ranks(5, 5, 4))), document(Communicator(ranks(7, 7, 6))))
    still = document(Communicator(ranks(7, 7, 6)), Communicator(ranks(0, 0, 2)[2:], name="b"))
    progress = fed(*moving)
    assert lags(parse_json(moving[1]), progress, 3) == {}
    progress.update(parse_json(still))
    assert lags(parse_json(still), progress, 3) == {
        (RankLabel("2", "192.0.2.1", "2"), "AllReduce"): 1
    }


def test_number_is_known_from_the_world_alone() -> None:
    """Without a communicator of WORLD_SIZE ranks, a rank is told by its host and GPU."""
    answer = document(Communicator(ranks(7, 6)))
    assert lags(parse_json(answer), fed(answer, answer), 8) == {
        (RankLabel("", "192.0.2.1", "1"), "AllReduce"): 1
    }
    assert lags(parse_json(answer), fed(answer, answer), None).keys() == {
        (RankLabel("", "192.0.2.1", "1"), "AllReduce")
    }


def test_small_communicator_names_the_number_in_the_world() -> None:
    """A rank behind in a group of two has the number that it has among all."""
    world, pair = (
        Communicator(ranks(3, 3, 3, 3)),
        Communicator(
            [
                ras_server.Rank(0, pid=4002, gpu=2),
                ras_server.Rank(1, pid=4003, gpu=3, counts={"AllGather": 39}),
            ],
            name="b",
        ),
    )
    answer = document(pair, world)
    assert lags(parse_json(answer), fed(answer, answer), 4) == {
        (RankLabel("3", "192.0.2.1", "3"), "AllGather"): 1
    }


def test_troubles_of_several_communicators() -> None:
    """A rank that is missing from several communicators is named once, the dead before the
    silent.
    """
    dead, silent = (
        ras_server.Rank(number, pid=4000 + number, gpu=number, flags=flags)
        for number, flags in ((2, ("unresponsive", "considered_dead")), (1, ("unresponsive",)))
    )
    pair = Communicator(
        [], [ras_server.Rank(0, pid=4001, gpu=1, flags=("unresponsive",))], name="b"
    )
    answer = parse_json(document(Communicator(ranks(1), [silent, dead]), pair))
    assert troubles(answer, 3) == [
        (RankLabel("2", "192.0.2.1", "2"), "dead"),
        (RankLabel("1", "192.0.2.1", "1"), "unresponsive"),
    ]
