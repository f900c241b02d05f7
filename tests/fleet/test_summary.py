"""What a node tells of itself fits the peer API, whatever it is made of."""

from __future__ import annotations

from typing import Any

from dshealthd.core import schema
from dshealthd.findings.finding import Finding, State, Verdict
from dshealthd.fleet.summary import SummaryCache, summary
from dshealthd.probe.peers.messages import METHODS
from tests import status_documents

ANSWER = METHODS["summary"].answer


def finding(**given: Any) -> Finding:
    """Return a finding."""
    told = status_documents.finding(detail="x" * 900, **given)
    return Finding(**told | {"severity": State(told["severity"])})


def work(rank: int) -> dict[str, Any]:
    """Return what a node tells of its ranks of a role."""
    id = {"over": "30s", "role": "data", "ranks": 8, "rank": rank, "step_seconds": 2.0}
    return id | {"slow": 1.5, "usual": 1.0, "between": 1e-4, "within": 1e-5}


def job(**given: Any) -> dict[str, Any]:
    """Return a job as the status document has it."""
    values: dict[str, Any] = {
        "job": "bert",
        "state": "hung",
        "ranks_here": 8,
        "loss": "not finite",
        "world_size": 64,
        "step": 10,
        "step_highest": 12,
        "steps_per_minute": None,
        "attempts": 3,
        "hang": {"cause": "process", "culprits": [{"rank": 9, "reason": "stopped"}]},
        "own_work": [work(11)],
    }
    return values | given


def test_a_few_hundred_bytes() -> None:
    """A GPU that is lost and a hung job are a message of a few hundred bytes."""
    body = schema.dumps(summary(Verdict((finding(),)), [job()]), ANSWER)
    told = schema.loads(body, ANSWER)
    assert len(body) < 700
    assert (told["verdict"], told["problems"], told["unreadable"]) == ("critical", 1, 0)
    assert told["findings"][0]["part"] == "GPU 3"
    assert told["jobs"][0]["culprits"] == (9,)
    assert told["jobs"][0]["attempts"] == 3


def test_a_sign_that_is_watched_is_told() -> None:
    """Others do not take a node for healthy on which something may be about to be found."""
    told = summary(Verdict((), (finding(),)), [])
    assert (told["verdict"], told["watched"]) == ("ok", 1)
    assert schema.loads(schema.dumps(told, ANSWER), ANSWER)["watched"] == 1
    assert "watched" not in summary(Verdict(()), [])


def test_a_pause_is_told_with_its_cause() -> None:
    """Others can tell a checkpoint from a hang, and no culprit comes with it."""
    stall = {"cause": "checkpoint", "says": "checkpoint"}
    (told,) = summary(Verdict(()), [job(state="paused", hang=None, stall=stall)])["jobs"]
    assert (told["state"], told["cause"]) == ("paused", "checkpoint")
    assert "culprits" not in told


def test_whatever_users_name_fits() -> None:
    """Long and strange names, absurd numbers and hundreds of findings make a valid message."""
    strange = job(
        job="\u202ejob\n\x1b[2J" * 100,
        world_size=10**12,
        step=2**60,
        hang={
            "cause": "c" * 99,
            "culprits": [{"rank": 10**9}, *({"rank": rank} for rank in range(50))],
        },
        work=[work(10**9)],
    )
    found = Verdict(tuple(finding(summary="\u2603" * 5000) for _ in range(300)))
    body = schema.dumps(summary(found, [strange] * 100), ANSWER)
    told = schema.loads(body, ANSWER)
    assert len(body) < 9000
    assert told["problems"] == 300
    assert "world_size" not in told["jobs"][0]
    assert told["jobs"][0]["culprits"] == (0, 1, 2, 3, 4, 5, 6, 7)
    assert told["jobs"][0]["cause"] == "c" * 99
    assert (len(told["findings"]), len(told["jobs"])) == (4, 16)


def test_it_is_kept_for_a_moment() -> None:
    """Members that ask often do not have it made each time."""
    made, now = [], [100.0]

    def verdict() -> Verdict:
        made.append(now[0])
        return Verdict(())

    tell = SummaryCache(verdict, list, lambda: ".wC? " + "." * 19, lambda: now[0])
    for _ in range(50):
        assert tell()["verdict"] == "ok"
    told = schema.loads(schema.dumps(tell(), ANSWER), ANSWER)
    assert told["hours"] == ".wC? ..................."
    for now[0] in (101.9, 102.0):
        tell()
    assert made == [100.0, 102.0]


def test_job_that_cannot_be_told_costs_itself() -> None:
    """A job with more ranks than any node is left out, and said to be; the others are told."""
    verdict, jobs = (
        Verdict(()),
        [job(job="well"), job(job="odd", ranks_here=10**8), job(job="last")],
    )
    told = schema.loads(schema.dumps(summary(verdict, jobs), ANSWER), ANSWER)
    assert [one["job"] for one in told["jobs"]] == ["well", "last"]
    (why,) = told["left_out"]
    assert why.startswith("job odd: SchemaError: body.ranks is not an integer from 0 to 10000000")


def test_work_that_cannot_be_told_costs_itself() -> None:
    """Figures beyond those of a step are left out; the other role of the job is told."""
    odd = work(1) | {"usual": 5e-324, "role": "odd"}
    (told,) = summary(Verdict(()), [job(own_work=[odd, *map(work, range(20))])])["jobs"]
    assert [(one["role"], one["rank"]) for one in told["own_work"]] == [
        ("data", rank) for rank in range(16)
    ]


def test_jobs_beyond_the_first_sixteen_are_told_to_be_left_out() -> None:
    """A node may have a hundred: others do not take its first ones for all."""
    for count, more in ((16, ()), (17, ("1 job: a summary",)), (19, ("3 jobs: a summary",))):
        told = summary(Verdict(()), [job(job=f"run-{number}") for number in range(count)])
        whole = schema.loads(schema.dumps(told, ANSWER), ANSWER)
        assert len(whole["jobs"]) == 16
        left_out = whole.get("left_out", ())
        assert [one[: len(begin)] for one, begin in zip(left_out, more, strict=True)] == [*more]
    odd = [job(job=f"odd-{number}", ranks_here=10**8) for number in range(17)]
    whole = schema.loads(schema.dumps(summary(Verdict(()), odd), ANSWER), ANSWER)
    assert len(whole["left_out"]) == 16
