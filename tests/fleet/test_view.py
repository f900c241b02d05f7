"""The view of all members: who is asked, what is kept, what is said of those who do not answer."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dshealthd.fleet.jobs import merge_jobs, shown_jobs
from dshealthd.fleet.view import Fleet, period
from dshealthd.probe.members.membership import Member, Membership
from dshealthd.probe.observation import Outcome
from dshealthd.probe.peers.protocol import PeerError
from tests.status_documents import NOT_JSON
from tests.waiting import eventually

WELL: dict[str, Any] = {
    "version": "1",
    "verdict": "ok",
    "problems": 0,
    "unreadable": 0,
    "findings": (),
    "jobs": (),
}
PART = {"job": "bert", "state": "training", "ranks": 8, "loss": "finite", "world_size": 16}


class Cluster:
    """Members that answer as they are made to."""

    def __init__(self, count: int) -> None:
        self.names = tuple(f"n{number:04}" for number in range(count))
        self.now = 1000.0
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, Mapping[str, Any] | Exception] = {}
        self.silent: dict[str, asyncio.Event] = {}
        self.at_once = self.most = 0
        self.leaves = {name: f"leaf-{index // 2}" for index, name in enumerate(self.names)}
        self.fleet = Fleet(
            lambda: Membership(tuple(map(Member, self.names)), self.leaves, "test"),
            lambda: (self.names[0], WELL),
            lambda: [{"kind": "link", "component": "n0000--n0001", "reason": "slow"}],
            self.ask,
            lambda: self.now,
            lambda: self.now,
            self.pause,
        )
        self.paused = 0.0

    async def pause(self, seconds: float) -> None:
        """Let no time pass, but note it."""
        self.paused += seconds

    async def ask(self, name: str, deadline: float) -> Mapping[str, Any]:
        """Answer, a moment later."""
        assert deadline == 4.0
        self.asked[name] += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        await asyncio.sleep(0)
        if name in self.silent:
            await self.silent[name].wait()
        self.at_once -= 1
        answer = self.answers.get(name, WELL)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def view(self) -> dict[str, Any]:
        """Return the document."""
        return dict(json.loads(self.fleet.document()))

    async def settled(self) -> dict[str, Any]:
        """Return the document after a round."""
        self.view()
        await self.fleet.settled()
        self.now += 2  # the document is kept for a moment
        return self.view()


async def test_states() -> None:
    """A node is shown as what it says; one that does not answer is unreachable, with the reason."""
    cluster = Cluster(6)
    lost = {"slug": "gpu-lost", "severity": "critical", "part": "GPU 3", "summary": "lost"}
    cluster.answers = {
        "n0001": WELL | {"verdict": "critical", "problems": 1, "findings": (lost,)},
        "n0002": PeerError(Outcome.UNREACHABLE, "timed_out"),
        "n0003": WELL | {"verdict": "splendid"},
        "n0004": LookupError("probes are starting"),
        "n0005": PeerError(Outcome.REFUSED, "refused"),
    }
    before = cluster.view()
    assert [node["state"] for node in before["nodes"]] == ["ok", *["not asked yet"] * 5]
    view = await cluster.settled()
    states = {node["name"]: node["state"] for node in view["nodes"]}
    assert list(states.values()) == [
        *("ok", "critical", "unreachable", "unknown", "unreachable", "unreachable")
    ]
    assert (before["asking"], view["asking"]) == (True, False)
    assert [leaf["leaf"] for leaf in view["leaves"]] == ["leaf-0", "leaf-1", "leaf-2"]
    assert view["nodes"][1]["findings"] == [lost]
    assert view["nodes"][2]["problem"] == "unreachable: timed_out"
    assert view["nodes"][5]["problem"] == "refused"  # once
    assert view["nodes"][3]["leaf"] == "leaf-1"
    assert view["suspects"][0]["component"] == "n0000--n0001"
    await cluster.fleet.close()


async def test_what_cannot_be_shown_is_told() -> None:
    """A job that no JSON holds costs itself; what a member left out is told with its name."""
    cluster = Cluster(2)
    odd = PART | {"job": "odd", "steps_per_minute": math.inf}
    lacking = ("job huge: SchemaError: too many ranks", "job other: ValueError: x")
    cluster.answers = {"n0001": WELL | {"jobs": (PART, odd), "left_out": lacking}}
    await cluster.settled()
    view = await cluster.settled()
    assert [job["job"] for job in view["jobs"]] == ["bert"]
    why = {one["part"]: one["reason"] for one in view["left_out"]}
    assert why == {
        "n0001, job huge": "SchemaError: too many ranks",
        "n0001, job other": "ValueError: x",
        "job odd": NOT_JSON,
    }
    await cluster.fleet.close()


async def test_the_first_picture_has_all_answers() -> None:
    """Whoever looks first, or after a pause, waits for the members; a member that is slow to answer
    is waited for once, and not by who looks again.
    """
    cluster = Cluster(3)
    view = json.loads(await cluster.fleet.picture())
    assert view["states"] == {"ok": 3}
    cluster.now += 1000.0
    cluster.answers["n0001"] = WELL | {"verdict": "critical"}
    assert json.loads(await cluster.fleet.picture())["states"] == {"ok": 2, "critical": 1}
    assert set(cluster.asked.values()) == {2}
    cluster.now += 1000.0
    silent = cluster.silent["n0002"] = asyncio.Event()
    looks = asyncio.create_task(cluster.fleet.picture())
    await asyncio.sleep(0.01)
    assert not looks.done()
    cluster.now += 4.4
    again = asyncio.create_task(cluster.fleet.picture())
    await asyncio.sleep(0.01)
    assert not again.done()
    cluster.now += 0.1
    states = json.loads(await cluster.fleet.picture())["states"]
    assert states == {"ok": 1, "critical": 1, "out of date": 1}
    silent.set()
    for one in (looks, again):
        assert json.loads(await one)["states"] == {"ok": 2, "critical": 1}


async def test_a_round_that_fails_by_a_defect(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next one begins in its turn; one that the agent's end cuts off is no
    defect.
    """
    cluster = Cluster(2)
    cluster.answers["n0001"] = RuntimeError("x")
    await cluster.settled()
    assert "a round of queries failed because of a bug: RuntimeError('x')" in caplog.text
    caplog.clear()
    cluster.now += 10
    cluster.silent["n0001"] = asyncio.Event()
    cluster.view()
    await eventually(lambda: cluster.asked["n0001"] == 2)
    await cluster.fleet.close()
    assert caplog.text == ""


async def test_nobody_is_asked_while_nobody_looks() -> None:
    """However many look, each member is asked once in ten seconds, and a bounded number at a
    time.
    """
    cluster = Cluster(200)
    await asyncio.sleep(0)
    assert not cluster.asked
    for _ in range(20):
        cluster.view()
        await asyncio.sleep(0)
    await cluster.fleet.settled()
    assert set(cluster.asked.values()) == {1}
    assert len(cluster.asked) == 199  # not itself
    assert cluster.most == 64
    for seconds, asked in ((9.9, 1), (0.1, 2)):
        cluster.now += seconds
        cluster.view()
        await cluster.fleet.settled()
        assert max(cluster.asked.values()) == asked


async def test_silent_members_are_asked_last() -> None:
    """Members that did not answer do not keep those waiting that do, nor those not asked yet."""
    cluster = Cluster(6)
    cluster.answers = {"n0001": PeerError(Outcome.UNREACHABLE, "timed_out")}
    await cluster.settled()
    cluster.asked.clear()
    cluster.names = (*cluster.names, "n0009")
    cluster.now += 10
    await cluster.settled()
    assert list(cluster.asked) == ["n0009", "n0002", "n0003", "n0004", "n0005", "n0001"]


async def test_a_member_that_leaves_is_forgotten() -> None:
    """Who is no member any more is not shown."""
    cluster = Cluster(4)
    await cluster.settled()
    cluster.names = cluster.names[:2]
    for seconds, members in ((0.9, 4), (0.2, 2)):  # the document is kept for a second
        cluster.now += seconds
        assert cluster.view()["members"] == members
    cluster.now += 10
    view = await cluster.settled()
    assert [node["name"] for node in view["nodes"]] == ["n0000", "n0001"]
    assert len(cluster.fleet._answers) == 2


@pytest.mark.parametrize(("seconds", "state"), [(29.9, "ok"), (30.1, "out of date")])
async def test_an_answer_counts_until_the_next_round_has_had_its_time(
    seconds: float, state: str
) -> None:
    """The next round begins after 10 s, and may take 20 s."""
    cluster = Cluster(2)
    await cluster.settled()
    cluster.silent["n0001"] = asyncio.Event()
    cluster.now = 1000 + seconds
    assert [node["state"] for node in cluster.view()["nodes"]] == ["ok", state]
    await cluster.fleet.close()


@pytest.mark.parametrize(("members", "listed", "paused"), [(1000, 1000, 0.0), (1001, 0, 500.0)])
async def test_a_thousand_members_are_listed_at_once(
    members: int, listed: int, paused: float
) -> None:
    """A larger fleet is queried at 128 members a second, and of it only those in trouble."""
    cluster = Cluster(members)
    assert len((await cluster.settled())["nodes"]) == listed
    assert cluster.paused == paused


@pytest.mark.parametrize(("members", "seconds"), [(2, 10), (200, 10), (201, 10.05), (10_000, 500)])
def test_a_large_fleet_is_queried_less_often(members: int, seconds: float) -> None:
    """A member is queried 20 times a second if somebody looks at all agents of the fleet."""
    assert period(members) == seconds


async def test_old_answers_are_not_current() -> None:
    """After a pause in which nobody looked, the first answer shows no old state as the present one:
    neither a fault that may be mended nor a job that may have ended.
    """
    cluster = Cluster(3)
    lost = {"slug": "gpu-lost", "severity": "critical", "part": "GPU 3", "summary": "lost"}
    hung = {"state": "hung", "cause": "input", "culprits": (9,)}
    pace = {"steps_per_minute": 61.8, "step": 9, "step_highest": 9}
    cluster.answers = {
        "n0001": WELL
        | {
            "verdict": "critical",
            "problems": 1,
            "findings": (lost,),
            "jobs": (PART | hung, PART | pace | {"job": "other"}),
        },
        "n0002": PeerError(Outcome.UNREACHABLE, "refused"),
    }
    view = await cluster.settled()
    asked_at = view["nodes"][1]["time"]
    assert [job["state"] for job in view["jobs"]] == ["hung", "training"]
    cluster.now += 540
    view = cluster.view()
    assert [node["state"] for node in view["nodes"]] == ["ok", "out of date", "out of date"]
    assert view["nodes"][1] == {
        "name": "n0001",
        "leaf": "leaf-0",
        "state": "out of date",
        "time": asked_at,
        "last": "critical",
    }
    assert view["nodes"][2]["last"] == "unreachable"
    assert {job["state"] for job in view["jobs"]} == {"out of date"}
    assert all(job["steps_per_minute"] is None for job in view["jobs"])
    assert all(job["culprits"] == [] for job in view["jobs"])
    await cluster.fleet.settled()
    cluster.answers["n0001"] = WELL
    cluster.now += 10
    view = await cluster.settled()
    assert [node["state"] for node in view["nodes"]] == ["ok", "ok", "unreachable"]
    assert view["jobs"] == []


async def test_a_member_is_asked_at_a_bounded_rate_however_large_the_fleet() -> None:
    """If somebody looks at every agent all the time, a member answers no more than 20 calls per
    second; and while somebody looks, its answer stays current from one round to the next.
    """
    cluster = Cluster(1000)
    for _ in range(200):
        cluster.view()
        await cluster.fleet.settled()
        cluster.now += 1.0
        view = cluster.view()
        await cluster.fleet.settled()
        assert {node["state"] for node in view["nodes"]} == {"ok"}
    later = max(cluster.asked.values()) - 1  # the first round is at once
    assert 0 < len(cluster.names) * later / 200 <= 20


async def test_ten_thousand_members() -> None:
    """Those that are not well are listed, the worst first, the others are counted by leaf; a round
    takes its time, begins with those that were not well, and costs each member one call.
    """
    cluster = Cluster(10_000)
    cluster.leaves = {name: f"leaf-{name[1:4]}" for name in cluster.names}
    sick = {"verdict": "critical", "problems": 1}
    cluster.answers = dict.fromkeys(cluster.names[77::5000], WELL | sick)
    cluster.answers["n1234"] = PeerError(Outcome.UNREACHABLE, "timed_out")
    cluster.answers["n0005"] = WELL | {"verdict": "warning", "problems": 1}
    view = await cluster.settled()
    assert view["members"] == 10_000
    assert view["states"] == {"ok": 9996, "critical": 2, "unreachable": 1, "warning": 1}
    assert [node["name"] for node in view["nodes"]] == ["n0077", "n5077", "n1234", "n0005"]
    assert sum(sum(leaf["states"].values()) for leaf in view["leaves"]) == 10_000
    (leaf,) = (leaf for leaf in view["leaves"] if leaf["leaf"] == "leaf-123")
    assert leaf["states"] == {"ok": 9, "unreachable": 1}
    assert len(json.dumps(view)) < 64 << 10
    assert set(cluster.asked.values()) == {1}
    order: list[str] = []
    asked = cluster.ask

    async def ask(name: str, deadline: float) -> Mapping[str, Any]:
        order.append(name)
        return await asked(name, deadline)

    cluster.fleet._ask = ask
    cluster.now += 500
    await cluster.settled()
    assert order[:3] == ["n0005", "n0077", "n5077"]
    assert order[-1] == "n1234"


async def test_no_more_members_are_listed_than_people_can_read() -> None:
    """Where half of a large fleet is down, the worst thousand are listed and all are counted."""
    cluster = Cluster(2500)
    bad = PeerError(Outcome.UNREACHABLE, "timed_out")
    cluster.answers = dict.fromkeys(cluster.names[1:1250], bad)
    cluster.answers["n2000"] = WELL | {"verdict": "critical"}
    view = await cluster.settled()
    assert len(view["nodes"]) == 1000
    assert view["nodes"][0]["name"] == "n2000"
    assert view["states"]["unreachable"] == 1249


def test_a_job_in_trouble_is_not_cut_off() -> None:
    """Of more jobs than are shown, those that hang, failed, stall or compute nonsense come first;
    how many are left out is told.
    """

    async def scene() -> None:
        cluster = Cluster(61)
        for number, name in enumerate(cluster.names[1:]):
            jobs = [PART | {"job": f"job-{number}-{each}"} for each in range(5)]
            jobs[3] |= {"state": "failed"} if number % 2 else {"loss": "not finite"}
            jobs[4] |= {"state": "hung"} if number == 59 else {}
            jobs[2] |= {"state": "stalled"} if number == 0 else {}
            cluster.answers[name] = WELL | {"jobs": jobs}
        view = await cluster.settled()
        states = [job["state"] for job in view["jobs"]]
        assert len(states) == 200
        assert states[:33] == ["hung", *["failed"] * 30, "stalled", "training"]
        assert [job["loss"] for job in view["jobs"][32:63]] == [*["not finite"] * 30, "finite"]
        assert view["jobs_left_out"] == 100

    asyncio.run(scene())
    failed = [
        (f"n{n}", WELL | {"jobs": [PART | {"job": f"{n}", "state": "failed"}]}) for n in range(1001)
    ]
    assert len(shown_jobs(merge_jobs(failed[:900], ()))) == 900
    assert len(shown_jobs(merge_jobs(failed, ()))) == 1000  # a member may invent some


def work(rank: int, slow: float, usual: float = 1.0, role: str = "data") -> dict[str, Any]:
    """Return what a node tells of its ranks of a role, as its summary has it."""
    id = {"over": "30s", "role": role, "ranks": 8, "rank": rank, "step_seconds": 2.0}
    return id | {"slow": slow, "usual": usual, "between": 1e-4, "within": 1e-5}


@pytest.mark.parametrize(
    ("ratio", "slow"),
    [(1.05, []), (1.2, []), (1.6, [{"rank": 8, "node": "b", "ratio": 1.6}])],
)
def test_a_slow_rank_is_what_the_judge_says(ratio: float, slow: list[dict[str, Any]]) -> None:
    """Beside ranks of its role on other nodes, from the limit of slow ranks on and not before; what
    only an old answer says is nothing.
    """
    parts = {"a": work(0, 1.01), "b": work(8, ratio), "c": work(16, 1.8, 1.8, "stage 1")}
    told = [(node, WELL | {"jobs": [PART | {"own_work": [one]}]}) for node, one in parts.items()]
    assert [job["slow"] for job in merge_jobs(told, ())] == [slow]
    assert [job["slow"] for job in merge_jobs((), told)] == [[]]


async def test_jobs_across_nodes() -> None:
    """A job of two nodes is one, with all its ranks and its culprit by node."""
    cluster = Cluster(3)
    hung = {"state": "hung", "cause": "input", "culprits": (9,), "step": 99, "step_highest": 99}
    slow: dict[str, Any] = {
        "step": 100,
        "step_highest": 100,
    }
    slow |= {"state": "hung", "cause": "waiting"}
    cluster.answers = {
        "n0001": WELL | {"jobs": (PART | slow, PART | {"job": "other", "loss": "not finite"})},
        "n0002": WELL | {"jobs": (PART | hung,)},
    }
    first, second = (await cluster.settled())["jobs"]
    assert (first["job"], first["state"], first["ranks"]) == ("bert", "hung", 16)
    assert first["nodes"] == ["n0001", "n0002"]
    assert (first["step"], first["step_highest"]) == (99, 100)
    assert first["culprits"] == [{"rank": 9, "node": "n0002", "cause": "input"}]
    assert (second["job"], second["loss"]) == ("other", "not finite")


@pytest.mark.parametrize(("cause", "shown"), [
    ("waiting", ("paused", [], "checkpoint")),
    ("process", ("hung", [9], None)),
])  # fmt: skip
def test_a_node_shows_why_others_wait(cause: str, shown: tuple[str, list[int], str | None]) -> None:
    """A job that looks hung on one node is in the checkpoint that another one shows, and then has
    no culprit; nobody waits for a checkpoint while a rank is stopped.
    """
    hung = {"state": "hung", "cause": cause, "culprits": (9,)}
    answers = [
        (name, WELL | {"jobs": (PART | part,)})
        for name, part in (("a", hung), ("b", {"state": "paused", "cause": "checkpoint"}))
    ]
    (job,) = merge_jobs(answers, ())
    assert (job["state"], [one["rank"] for one in job["culprits"]], job["pause"]) == shown


def test_the_fields_of_a_job_are_documented() -> None:
    """Each by its name, where the document of the fleet is described."""
    page = (Path(__file__).parents[2] / "docs" / "status-api.md").read_text(encoding="utf-8")
    section = page.partition("## The fleet")[2].partition("## The rest")[0]
    (whole,) = merge_jobs([("n1", {"jobs": (PART,)})], ())
    assert [field for field in whole if f"`{field}`" not in section] == []
