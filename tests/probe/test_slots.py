"""When a node's rounds begin, how often they are tried, and what happens beside them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd import __version__
from dshealthd.collectors.job_environment import RANKS
from dshealthd.core.options import Duration
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.probe import slots
from dshealthd.probe.members.schedule import jitter, root_order
from dshealthd.probe.node import ThisNode
from dshealthd.probe.observation import (
    ON_DEMAND,
    Backend,
    Observation,
    Outcome,
    Part,
    RoundKind,
    RoundPlan,
    Stage,
    Suspect,
    Timing,
)
from dshealthd.probe.options import PolicyOptions, ProbeOptions
from dshealthd.probe.peers.protocol import PeerError, Refusal
from dshealthd.probe.policy import GpuOccupancy, Policy
from dshealthd.probe.rounds.active_round import RoundReport
from dshealthd.probe.rounds.plan import local_job
from dshealthd.probe.slots import Renamed, SlotRunner
from dshealthd.probe.verdicts.planner import Confirmation
from dshealthd.probe.workers.job import RankResult
from dshealthd.probe.workers.store import LocalStore
from tests.probe.peering import Time, at_once
from tests.probe.services import snapshot

ME, OTHER, THIRD, GONE = "a", "b", "c", "gone"
EPOCH = 1000
PAIR = Confirmation((ME, OTHER), RoundKind.PAIR)
CALL = Confirmation((OTHER, THIRD), RoundKind.LIGHT)


class Played(SlotRunner):
    """Slots on a clock of their own, whose rounds and calls come to what is set."""

    def __init__(self, period: float = 10.0) -> None:
        self.now, self.had, self.sleeps = EPOCH * period, Counter[str](), list[float]()
        self.kinds: list[RoundKind | None] = []
        self.call_fails: list[str] = []
        self.deadlines: list[float] = []
        self.reason = ""
        """Of the rounds that are led; None of them is where it is empty."""
        self.really = False
        """Whether a round is planned, and not only counted."""
        self._requested, self._restored = set(), True
        self._me, self._names, self._recent, self._saved = ME, (ME, OTHER), deque(), 0.0
        self.detector: Any = SimpleNamespace(withdraw=lambda _: self.had.update(["withdrawn"]))
        self.credentials: Any = SimpleNamespace(off=False)
        self.baselines: Any = SimpleNamespace(changed=True, document=lambda: "all")
        self.rounds: Any = SimpleNamespace(takes_part_in=lambda *_: False, busy=False)
        self.node: Any = SimpleNamespace(epoch=lambda: int(self.now // period))
        self.client: Any = SimpleNamespace(call=self.call)
        self._timetable: Any = SimpleNamespace(group_of=lambda *_: ())
        self._state: Any = SimpleNamespace(
            options=ProbeOptions(period=Duration(period)),
            wall=lambda: self.now,
            monotonic=lambda: self.now,
            absences=SimpleNamespace(own_end=lambda: 0.0, absent=lambda name: name == GONE),
            gpus=SimpleNamespace(count=lambda: 8),
            metrics=SimpleNamespace(skip=lambda reason: self.had.update([f"skip {reason}"])),
            file=SimpleNamespace(save=lambda content: self.had.update([f"saved {content}"])),
        )

    async def call(self, *given: Any) -> dict[str, Any]:
        """Fail as is set, once each."""
        self.deadlines.append(given[-1])
        if self.call_fails:
            raise PeerError(Outcome.DECLINED, self.call_fails.pop(0))
        return {"observation": observed(RoundKind.LIGHT)}

    async def _lead(self, epoch: int, members: Any, *given: Any, **more: Any) -> Any:
        if self.really:
            return await super()._lead(epoch, members, *given, **more)
        self.kinds.append(given[0] if given else None)
        return (
            SimpleNamespace(observation=SimpleNamespace(reason=self.reason))
            if self.reason
            else None
        )

    async def _local(self, _epoch: int) -> None:
        self.had["local"] += 1


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Slots whose sleeps move their clock."""
    made = Played()

    async def sleep(seconds: float) -> None:
        made.sleeps.append(seconds)
        made.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    made._observe = lambda *_, **__: made.had.update(["observed"])  # type: ignore[method-assign]
    return made


@pytest.mark.parametrize(("period", "later"), [(10.0, 2.0), (20.0, 2.0), (5.0, 1.0)])
async def test_who_comes_second_waits(played: Played, period: float, later: float) -> None:
    """It leads after two seconds of silence, or a fifth of a short period."""
    played._state.options = ProbeOptions(period=Duration(period))
    pair, played.reason = (ME, OTHER), "well"
    for place in (0, 1):
        epoch = next(e for e in range(EPOCH, EPOCH + 99) if root_order(pair, e)[place] == ME)
        played.now = epoch * period
        await played._in_pair(epoch, pair)
        assert played.sleeps.pop() == pytest.approx(jitter(epoch, pair, period) + place * later)
        played.now += period
        await played._in_pair(epoch, pair)
        assert played.sleeps.pop() == 0.0, "it is late"


async def test_a_round_is_tried_for_an_epoch(played: Played) -> None:
    """Eight times while another is in progress; from the middle on an echo will do."""
    await played._in_pair(EPOCH, (ME, OTHER))
    assert played.kinds == [None] * 4 + [RoundKind.LIGHT] * 4
    assert played.sleeps[1:] == [10.0 / 8] * 8
    assert played.had == {"skip already_testing": 1}


async def test_what_is_due_beside_the_rounds(played: Played) -> None:
    """A local round in one epoch of sixty, and a save of the baselines every five minutes."""
    for epoch in range(EPOCH, EPOCH + 120):
        await played._epoch(epoch)
    assert (played.had["local"], played.had["skip resting"]) == (2, 120)
    played.had.clear()
    for since, changed in ((300.0, True), (301.0, False), (301.0, True)):
        played._saved, played.baselines.changed = played.now - since, changed
        await played._epoch(EPOCH)
        assert played.had["saved all"] == (since > 300.0 and changed)


@pytest.mark.parametrize("reason", ["deadline", "no_python", "no_torch", "writable"])
async def test_baselines_wait_until_torch_is_known(played: Played, reason: str) -> None:
    """As long as torch's version is not known, because its import takes too long or its file system
    is not mounted yet, the saved baselines are neither read as another software's nor replaced.
    """
    read: list[object] = []

    async def load() -> object:
        return "document"

    async def prepare(seconds: float) -> str:
        assert (seconds, played._restored) == (60.0, False)
        return "" if len(played.sleeps) == 8 else reason

    played._restored = False
    played._state.file.load = load
    played._state.worker_pool = SimpleNamespace(
        prepare=prepare, about={"torch": "2.9", "cuda": "13"}
    )
    played.baselines.restore = read.append
    await played._restore()
    stamp = f"dshealthd {__version__} torch 2.9 cuda 13"
    assert (played.baselines.stamp, read, played._restored) == (stamp, ["document"], True)
    assert played.sleeps == [60, 120, 240, 480, 960, 1920, 3600, 3600]


async def test_an_extra_round_waits_for_another(played: Played) -> None:
    """Four times for a second and a half; then the detector is told that it is not run."""
    assert not await played._confirm(PAIR)
    assert played.sleeps == [1.5] * 4
    assert played.had == {"withdrawn": 1}
    played.reason = "well"
    assert await played._confirm(PAIR)


@pytest.mark.parametrize(
    ("fails", "calls", "run"),
    [([], 1, True), (["already_testing"], 2, True), (["maintenance"], 1, False)],
)
async def test_a_member_that_is_asked_to_call(
    played: Played, fails: list[str], calls: int, *, run: bool
) -> None:
    """It has six seconds, and is asked again while it is in a round."""
    played.call_fails = fails
    assert await played._confirm(CALL) is run
    assert played.deadlines == [6.0] * calls
    assert played.had == ({"observed": 1} if run else {"withdrawn": 1})


async def test_a_light_round_for_a_hung_job(played: Played) -> None:
    """It is tried eight times, after waits that differ between nodes; not while calls are off or
    this node is in maintenance.
    """
    assert not await played._hold_light_round(OTHER)
    assert played.kinds == [RoundKind.LIGHT] * 8
    assert all(0.75 <= seconds < 2.25 for seconds in played.sleeps)
    played.reason = "well"
    assert await played._hold_light_round(OTHER)
    for off, end in ((True, 0.0), (False, 1.0)):
        played.credentials.off, played._state.absences.own_end = off, lambda end=end: end
        assert not await played._hold_light_round(OTHER)
    assert len(played.kinds) == 9


@pytest.mark.parametrize("way", ["had", "in one", "next epoch", "off", "maintenance"])
async def test_what_ends_the_tries(played: Played, way: str) -> None:
    """A round of the pair, which the other may have led, or the end of the epoch."""
    pair = (ME, GONE if way == "maintenance" else OTHER)
    seen = observed(RoundKind.LIGHT, members=pair, epoch=EPOCH)

    async def sleep(seconds: float) -> None:
        played.sleeps.append(seconds)
        if len(played.sleeps) == 2:
            played._recent.extend([seen] if way == "had" else [])
            played.now += 10.0 * (way == "next epoch")
            played.rounds.takes_part_in = lambda *_: way == "in one"

    played.credentials.off = way == "off"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", sleep)
        await played._in_pair(EPOCH, pair)
    assert len(played.kinds) == (way not in {"off", "maintenance"})
    skips = {"next epoch": "already_testing", "off": "switched_off", "maintenance": "maintenance"}
    assert played.had == ({f"skip {skips[way]}": 1} if way in skips else {})
    if way in {"had", "in one"}:
        await played._in_pair(EPOCH, pair)
        assert len(played.kinds) == 1, "it is known when the round is due"


@pytest.mark.parametrize(
    ("gpus", "kinds", "backend"),
    [
        (0, "pair pair pair pair pair", "gloo"),
        (1, "pair pair pair pair pair", "nccl"),
        (8, "pair pair rail rail pair", "nccl"),
    ],
)
async def test_the_kind_of_a_round(played: Played, gpus: int, kinds: str, backend: str) -> None:
    """By rails in two epochs of four, of which one is inside leaves; an echo where a round may not
    use the GPUs, with the reason.
    """
    led: list[tuple[RoundPlan, str]] = []

    async def lead(plan: RoundPlan, reason: str = "") -> None:
        led.append((plan, reason))

    played.really, played.rounds.lead = True, lead
    played._state.gpus.count = lambda: gpus
    played._state.local_membership = SimpleNamespace(membership=SimpleNamespace(digest="d"))

    async def obstacle(*, scheduled: bool) -> str:
        return "" if scheduled else objections[-1]

    objections = ["busy_gpu"]
    played.node.obstacle = obstacle
    for epoch in range(5):
        await played._lead(epoch, (ME, OTHER))
    assert " ".join(plan.kind for plan, _ in led) == kinds
    assert {(plan.backend, plan.ranks) for plan, _ in led} == {(backend, gpus or 1)}
    assert [len(plan.steps) for plan, _ in led] == [4, 4, 3, 3, 3], "a large one in two epochs"
    await played._lead(ON_DEMAND, (ME, OTHER))
    await played._lead(0, (ME, OTHER), RoundKind.LIGHT)
    assert [(plan.kind, reason) for plan, reason in led[5:]] == [
        (RoundKind.LIGHT, "busy_gpu"),
        (RoundKind.LIGHT, ""),
    ]
    objections.append("")
    await played._lead(ON_DEMAND, (ME, OTHER))
    assert len(led[-1][0].steps) == 4, "a suspicion is confirmed with all sizes"


def observed(kind: RoundKind, **given: Any) -> Observation:
    """Return a round of two nodes that hung, unless it is `given` otherwise."""
    usual: dict[str, Any] = {"epoch": ON_DEMAND, "backend": "nccl", "members": (ME, OTHER)}
    usual |= {"outcome": Outcome.HUNG, "stage": Stage.SIZES}
    return Observation(kind=kind, **(usual | given))


def planned(seen: Observation, **given: Any) -> RoundPlan:
    """Return the plan of a round on GPUs."""
    backend, members = Backend.NCCL, seen.members
    return RoundPlan(
        epoch=seen.epoch, kind=seen.kind, backend=backend, members=members, digest="", **given
    )


TIMES = (Timing("all_reduce", 8, 0.5, 1.0),)


@pytest.mark.parametrize(
    ("given", "led", "charged"),
    [
        ({}, False, ["vain 7.0"]),
        ({}, True, []),
        ({"outcome": Outcome.DECLINED}, False, []),
        ({"late": (OTHER,)}, False, ["vain 7.0"]),
        ({"late": (GONE,)}, False, []),
        ({"backend": "gloo"}, False, []),
        ({"timings": TIMES, "outcome": Outcome.OK}, True, ["2.0 False"]),
        ({"timings": TIMES, "outcome": Outcome.OK, "epoch": 7}, True, ["2.0 True"]),
    ],
)
def test_what_a_round_is_charged(
    played: Played, given: dict[str, Any], charged: list[str], *, led: bool
) -> None:
    """Its own time on the GPUs, or all of it where another node's has hung or failed; nothing where
    a member in maintenance is to blame. Only a scheduled one is remembered.
    """
    seen = observed(RoundKind.PAIR, **given)
    spent: list[str] = []
    played._state.metrics.add = lambda *_: None
    played._state.policy = SimpleNamespace(
        spend=lambda seconds, *, scheduled: spent.append(f"{seconds} {scheduled}"),
        spend_in_vain=lambda seconds: spent.append(f"vain {seconds}"),
    )
    plan = planned(seen, steps=((8, 1),))
    played._ended(RoundReport(seen, plan, 7.0, led=led))
    assert spent == charged
    assert len(played._recent) == (seen.epoch == 7)


def with_gpus(played: Played, gpus: int, clock: Time) -> ThisNode:
    """Return the node of these slots, with idle GPUs."""
    state = played._state
    idle = dict.fromkeys(map(str, range(gpus)), 0.0) or None
    occupancy = GpuOccupancy(snapshot(idle), time.monotonic)
    state.gpus, state.policy = occupancy, Policy(PolicyOptions(), occupancy, clock)
    state.worker_pool = SimpleNamespace(ready=True, no_gpus=lambda _gpus: "")
    state.local_membership, state.waited = SimpleNamespace(me=ME), None
    state.metrics.add, state.monotonic = lambda *_: None, clock
    nobody: Any = None
    return ThisNode(state, nobody, ("127.0.0.1", "lo"), nobody)


@pytest.mark.parametrize(
    "ends", [{"timings": (Timing("all_reduce", 8, 0.01, 1.0),), "outcome": Outcome.OK}, {}]
)
async def test_a_member_that_orders_round_after_round(played: Played, ends: dict[str, Any]) -> None:
    """Whether they go well or hang, it gets a tenth of the time on idle GPUs. The share of the
    schedule is untouched, and so are this node's own confirmations.
    """
    clock = Time()
    node = with_gpus(played, 1, clock)
    seen = observed(RoundKind.PAIR, members=(OTHER, ME), **ends)
    plan = planned(seen, steps=((8, 997),))
    ran = 0
    for _ in range(200):
        clock.now += 10.0
        if (objection := await node.objection(plan)) == "":
            played._ended(RoundReport(seen, plan, 10.0, led=False))
            ran += 1
        assert objection in {"", "duty"}
        for scheduled in (True, False):
            assert await node.obstacle(scheduled=scheduled) == ""
    assert ran == 26, "what was saved in ten minutes, and a tenth of these 2,000 seconds"


@pytest.mark.parametrize(
    ("gpus", "ranks", "objection"),
    [(0, 1, ""), (0, 2, "gpus_differ"), (2, 2, ""), (2, 3, "gpus_differ")],
)
async def test_a_round_of_more_gpus_than_are_here(
    played: Played, gpus: int, ranks: int, objection: str
) -> None:
    """It is declined; a node without GPUs has one rank."""
    plan = planned(observed(RoundKind.PAIR, epoch=7, members=(OTHER, ME)), ranks=ranks)
    assert await with_gpus(played, gpus, Time()).objection(plan) == objection


@pytest.mark.parametrize(("there", "obstacle"), [(0, ""), (1, "busy_gpu")])
async def test_own_workers_that_are_gone_keep_no_round_away(
    played: Played, there: int, obstacle: str
) -> None:
    """What was seen during a round has its workers on the GPUs: before the next one it is read
    again, and who is still there is somebody else.
    """
    node, shot = with_gpus(played, 1, Time()), snapshot({"0": 1})

    def collect(names: Iterable[str]) -> None:
        assert "gpu_processes" in names
        shot.put("gpu_processes", snapshot({"0": there})["gpu_processes"].result)

    gpus = played._state.gpus = GpuOccupancy(shot, time.monotonic, collect)
    played._state.policy = Policy(PolicyOptions(), gpus, Time())
    assert await node.obstacle(scheduled=True) == obstacle


@pytest.mark.parametrize(
    ("processes", "ranks", "gpus", "ended"),
    [
        (1, 0, "idle", False),  # its own worker
        (2, 0, "idle", True),
        (1, 4, "idle", True),
        (1, 4, "always", False),
    ],
)
def test_a_round_ends_when_a_job_starts(
    played: Played, processes: int, ranks: int, gpus: str, *, ended: bool
) -> None:
    """Its workers leave the GPUs in two seconds, even if they hang, and nobody is accused of it."""
    node, shot, over = with_gpus(played, 1, Time()), snapshot({"0": 0}), asyncio.Event()
    shot.expect("job_environment", 1000.0)
    looks: list[Iterable[str]] = []

    def collect(names: Iterable[str]) -> None:
        looks.append(names)
        shot.put("gpu_processes", snapshot({"0": processes})["gpu_processes"].result)
        found = (RANKS(ranks, "run-1", "r"),) if ranks else ()
        shot.put("job_environment", CollectionResult(CollectionOutcome.OK, found))

    async def run(*_: object) -> list[RankResult]:
        async with asyncio.timeout(5.0):
            await over.wait()
        return []

    played._state.gpus = GpuOccupancy(shot, time.monotonic, collect)
    played._state.options = ProbeOptions(policy=PolicyOptions(gpus=gpus))  # type: ignore[arg-type]
    node.workers = SimpleNamespace(run=run)  # type: ignore[assignment]
    work = local_job(1, ((8, 1),), {})
    running = node.run(work, LocalStore(), lambda *_: None)
    if ended:
        (result,), seconds = at_once(running)
        assert (result.outcome, result.reason, seconds) == (Outcome.DECLINED, "busy_gpu", 2.0)
    else:
        with pytest.raises(TimeoutError):
            at_once(running)
    assert len(looks) == (0 if gpus == "always" else 1 if ended else 2)


@pytest.mark.parametrize(
    ("me", "differs", "ends", "applied"),
    [
        (ME, True, TimeoutError, ["no b", "leaves ac", "only ac", "only ac"]),
        (ME, False, TimeoutError, []),
        ("z", True, Renamed, []),
    ],
)
async def test_a_new_list_of_members(
    played: Played, me: str, ends: type[Exception], applied: list[str], *, differs: bool
) -> None:
    """All that know of members apply it, unless it gives this node another name."""
    state, done, lists = played._state, list[str](), [differs]

    async def refresh(*, again: bool) -> bool:
        assert again
        state.again.set()
        if not lists:
            raise TimeoutError
        return lists.pop()

    state.again = asyncio.Event()
    state.again.set()
    listed = SimpleNamespace(names=(ME, THIRD), leaves={ME: "", THIRD: ""})
    state.local_membership = SimpleNamespace(refresh=refresh, me=me, membership=listed)
    played.client.forget = lambda name: done.append(f"no {name}")
    played.detector.apply_members = lambda leaves: done.append(f"leaves {''.join(leaves)}")
    state.metrics.forget = state.absences.forget = lambda names: done.append(
        f"only {''.join(names)}"
    )
    with pytest.raises(ends):
        await played._follow_members()
    assert done == applied
    assert played._names == ((ME, THIRD) if applied else (ME, OTHER))
    if applied:
        assert {played._timetable.group_of(ME, epoch) for epoch in range(2)} == {(ME, THIRD)}


@pytest.mark.parametrize(("at", "wait"), [(0.0, 5.0), (4.9, 0.1), (5.0, 10.0), (9.0, 6.0)])
async def test_when_the_members_are_read(
    played: Played, monkeypatch: pytest.MonkeyPatch, at: float, wait: float
) -> None:
    """Half an epoch before their next rounds, as on all nodes."""

    async def happens(_event: object, seconds: float) -> bool:
        assert seconds == pytest.approx(wait)
        raise TimeoutError

    monkeypatch.setattr(slots, "happens", happens)
    played._state.again, played.now = None, EPOCH * 10.0 + at
    with pytest.raises(TimeoutError):
        await played._follow_members()


@pytest.mark.parametrize(
    ("end", "epoch", "done"),
    [
        (0.0, 7, [(OTHER, 0.0), (OTHER, 7)]),
        (1.0, 7, [(OTHER, 0.0)]),
        (1.0, ON_DEMAND, [(OTHER, ON_DEMAND)]),
    ],
)
async def test_an_invitation(played: Played, end: float, epoch: int, done: list[Any]) -> None:
    """In maintenance only one on demand is accepted. Who leads a round of the schedule is not in
    maintenance itself.
    """
    found: list[Any] = []

    async def invited(sender: str, body: dict[str, Any]) -> dict[str, Any]:
        found.append((sender, body["plan"].epoch))
        return {}

    played.rounds.invited, absences = invited, played._state.absences
    absences.own_end, absences.record = lambda: end, lambda *said: found.append(said)
    refused = bool(end) and epoch != ON_DEMAND
    with pytest.raises(Refusal, match="maintenance") if refused else nullcontext():
        await played._invited(OTHER, {"plan": SimpleNamespace(epoch=epoch)})
    assert found == done


@pytest.mark.parametrize(
    ("members", "kind", "refused"),
    [
        ((ME, THIRD), RoundKind.PAIR, ""),
        ((OTHER, THIRD), RoundKind.PAIR, "malformed"),
        ((ME, ME), RoundKind.PAIR, "malformed"),
        ((ME, THIRD), RoundKind.LOCAL, "malformed"),
        ((ME, "elsewhere"), RoundKind.PAIR, "members_differ"),
    ],
)
async def test_a_round_on_demand(
    played: Played, members: tuple[str, str], kind: RoundKind, refused: str
) -> None:
    """One that this node can lead, with a member; it says so while it is in another one."""
    body = {"members": members, "kind": kind, "steps": ((8, 1),)}
    led: list[Any] = []
    reports: list[Any] = [SimpleNamespace(observation="seen"), None]

    async def lead(*given: Any) -> Any:
        led.append((*given, {*played._requested}))
        return reports.pop(0)

    played._names, played._lead = (ME, THIRD), lead  # type: ignore[method-assign, assignment]
    if refused:
        with pytest.raises(Refusal, match=refused):
            await played._lead_on_demand(OTHER, body)
        assert led == []
        return
    assert await played._lead_on_demand(OTHER, body) == {"observation": "seen"}
    with pytest.raises(Refusal, match="already_testing"):
        await played._lead_on_demand(OTHER, body)
    assert led == [(ON_DEMAND, members, kind, ((8, 1),), {members})] * 2
    assert not played._requested


def test_who_is_left_out() -> None:
    """Who is accused as a node or is in maintenance; not the end of a link that is."""
    played = Played()
    accused = [(Part.NODE, OTHER), (Part.LINK, THIRD)]
    played.detector.suspects = lambda: [Suspect(part, name, "slow") for part, name in accused]
    assert [played._left_out(name) for name in (OTHER, THIRD, GONE)] == [True, False, True]
