"""The supervisor against a real worker process that hangs, crashes, refuses to die and recovers."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collection import supervisor as supervisor_module
from dshealthd.collection import worker
from dshealthd.collection.supervisor import (
    QUARANTINED,
    REPLACED,
    STARTS,
    STUCK,
    UP,
    Supervisor,
    _Quarantine,
)
from dshealthd.collection.worker_process import Broken
from dshealthd.config import registry
from dshealthd.core import child
from dshealthd.core.collector import (
    Collector,
    Fault,
    Metric,
    News,
    Reason,
    process_part,
    read_by,
    shared_part,
    user_part,
)
from dshealthd.core.host import Host
from dshealthd.core.options import encode
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.timing import Backoff
from tests import frozen, workers
from tests.collectors.bench import reasons
from tests.waiting import eventually
from tests.workers import obstinate

WORKERS = str(Path(workers.__file__).parent)
DEADLINE = 0.4
"""Seconds of a part that hangs; more where the machine takes longer to start a worker."""
UNHURRIED = 60.0
"""Seconds, where no part hangs."""
LONG = Backoff(600, 600)
"""Is over when the scene says so."""
COMMAND = (sys.executable, "-m", "tests.workers", WORKERS)


class Bench:
    """A supervisor, the script its collector obeys, and what it has published."""

    def __init__(
        self, script: Path, backoff: Backoff, deadline: float, *others: str, **settings: Any
    ) -> None:
        """`others` are collectors beside the one of the script, `settings` the supervisor's."""
        self.script = script
        self.ahead = 0.0
        """Seconds by which the supervisor's clock is ahead."""
        self.news: list[News] = []
        self.hung: list[str] = []
        kinds: dict[str, type[Collector]] = {"obstinate": obstinate.Obstinate}
        kinds |= {name: registry.load(name) for name in others}
        options = {name: encode(kind.Options()) for name, kind in kinds.items()}
        options["obstinate"] = encode(obstinate.Options(script=str(script)))
        self.supervisor = Supervisor(
            "test",
            {"worker": "test", "host": encode(Host()), "collectors": options, "log_level": 50},
            dict.fromkeys(kinds, deadline),
            {name: registry.metrics(kind) for name, kind in kinds.items()},
            lambda: time.monotonic() + self.ahead,
            backoff,
            COMMAND,
            tell=self.news.append,
            **settings,
        )
        self.supervisor.on_hang = self.hung.append

    async def sweep(self) -> CollectionResult:
        """Collect once and return the one result."""
        results: list[CollectionResult] = []
        await self.supervisor.collect(["obstinate"], lambda _name, result: results.append(result))
        (result,) = results
        return result

    def end_back_off(self) -> None:
        """Have the supervisor find that all parts' back-off is over."""
        self.ahead += LONG.limit + 1

    def metric(self, metric: Metric, *labels: str) -> float:
        """Return one of the supervisor's own values; 0 for a counter that does not exist yet."""
        return {(s.metric, s.labels): s.value for s in self.supervisor.samples()}.get(
            (metric, ("test", *labels)), 0.0
        )


async def start_of_a_worker(path: Path) -> float:
    """Return the seconds that this machine takes at the moment to start a worker and read a
    part.
    """
    bench = Bench(path / "measured", LONG, UNHURRIED)
    bench.script.write_text("a value 1\n")
    started = time.monotonic()
    assert values(await bench.sweep()) == {"a": 1.0}
    took = time.monotonic() - started
    await bench.supervisor.close()
    return took


@contextlib.asynccontextmanager
async def on_bench(
    path: Path,
    *others: str,
    backoff: Backoff = Backoff(0.2, 0.4),  # noqa: B008
    hangs: bool = True,
    **settings: Any,
) -> AsyncIterator[Bench]:
    """Give a bench, and close it; where parts hang, with a deadline far beyond what others take."""
    deadline = max(DEADLINE, await start_of_a_worker(path)) if hangs else UNHURRIED
    bench = Bench(path / "script", backoff, deadline, *others, **settings)
    try:
        yield bench
    finally:
        await bench.supervisor.close()


def values(result: CollectionResult) -> dict[str, float]:
    """Return the values by part."""
    return {sample.labels[0]: sample.value for sample in result.samples}


async def test_samples_cross_the_pipe(tmp_path: Path) -> None:
    """A healthy worker's samples arrive with metric, labels and value. One process serves all
    sweeps.
    """
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text("a value 54.5\nb value 1\n")
        for _ in range(3):
            result = await bench.sweep()
            assert result.outcome is CollectionOutcome.OK
            assert values(result) == {"a": 54.5, "b": 1.0}
        assert bench.metric(STARTS) == 1


async def test_worker_frees_cycles(tmp_path: Path) -> None:
    """Garbage in cycles of one request is gone before the next."""
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text("a cycle\n")
        for _ in range(3):
            assert values(await bench.sweep()) == {"a": 1.0}


async def test_what_a_collection_is_for_reaches_the_worker(tmp_path: Path) -> None:
    """News goes to the worker with the collection that it caused, and with no other."""
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text("- heard\n")
        results: list[CollectionResult] = []
        heard = frozenset({(News.HANG_SUSPECTED, "slurm-7"), (News.GPU_ERROR, "")})
        await bench.supervisor.collect(
            ["obstinate"], lambda _name, result: results.append(result), heard
        )
        assert values(results[0]) == {
            "hang_suspected of slurm-7": 1.0,
            "gpu_error of the node": 1.0,
        }
        assert values(await bench.sweep()) == {}


async def test_news_cross_the_pipe(tmp_path: Path) -> None:
    """What a worker's collectors tell arrives once, in the sweep in which they tell it."""
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text("- tell nvlink\n- tell nvlink\na tell gpu_memory\n")
        assert (await bench.sweep()).outcome is CollectionOutcome.OK
        assert sorted(bench.news) == [News.GPU_MEMORY, News.NVLINK]
        bench.script.write_text("a value 1\n")
        await bench.sweep()
        assert len(bench.news) == 2


async def test_a_part_that_hangs_is_told_once(tmp_path: Path) -> None:
    """The scheduler hears at once of a part that hangs, and nothing while it goes on to hang."""
    async with on_bench(tmp_path) as bench:
        bench.script.write_text("a value 1\nb hang\n")
        await bench.sweep()
        assert bench.hung == ["obstinate"]
        await asyncio.sleep(0.25)  # the back-off is over, and the part is tried again
        await bench.sweep()
        assert bench.metric(REPLACED, "timeout") == 2
        assert bench.hung == ["obstinate"]


@pytest.mark.parametrize("hung", [2, 8])
async def test_a_sweep_costs_at_most_one_deadline(tmp_path: Path, hung: int) -> None:
    """With k of 8 parts known to hang and all back-offs over, a sweep tries one; others are read.
    Each part has its turn, and one that answers again is shown after k sweeps at most.
    """
    async with on_bench(tmp_path, backoff=Backoff(0.001, 0.001)) as bench:
        well = {str(part): 1.0 for part in range(hung, 8)}
        script = [f"{part} {'hang' if part < hung else 'value 1'}" for part in range(8)]
        bench.script.write_text("\n".join(script))
        assert values(await bench.sweep()) == well
        assert bench.metric(REPLACED, "timeout") == hung
        for count in range(1, 3):
            assert values(await bench.sweep()) == well
            assert bench.metric(REPLACED, "timeout") == hung + count
        bench.script.write_text("\n".join(f"{part} value 1" for part in range(8)))
        for _ in range(hung):
            result = await bench.sweep()
        assert values(result) == {str(part): 1.0 for part in range(8)}


@pytest.mark.parametrize(("action", "reason", "starts", "said"), [
    ("hang", Reason.TIMEOUT, 2, "no answer within"),
    ("crash", Reason.CRASHED, 2, "SIGSEGV"),
    ("exit", Reason.CRASHED, 2, "status 3"),
    (f"hog {2 * child.MEMORY}", Reason.OUT_OF_MEMORY, 2, "memory"),
    # The kernel's OOM killer: the second time it is called a crash at the part.
    ("kill", Reason.CRASHED, 3, "SIGKILL"),
])  # fmt: skip
async def test_27_a_part_that_ends_a_worker_is_left_out(
    tmp_path: Path, action: str, reason: Reason, starts: int, said: str
) -> None:
    """A part that hangs, crashes or takes more memory than a worker may have is left out with that
    reason. The others are read in the same sweep, and no worker starts for it before its back-off.
    """
    async with on_bench(tmp_path, backoff=LONG, hangs=action == "hang") as bench:
        bench.script.write_text(f"a value 1\nb {action}\nc value 3\n")
        for _ in range(20):
            result = await bench.sweep()
            assert values(result) == {"a": 1.0, "c": 3.0}
            assert reasons(result) == {"b": reason}
            assert said in result.faults[0].detail
        assert bench.metric(STARTS) == starts
        assert bench.metric(REPLACED, reason) == starts - 1
        assert bench.hung == ["obstinate"]


async def test_a_collector_that_fails_beside_others_is_left_out(tmp_path: Path) -> None:
    """One that crashes at what it alone reads of two parts waits for the next sweep, in which the
    two are left out: others do not wait for a new worker at each part.
    """
    async with on_bench(tmp_path, backoff=LONG, hangs=False) as bench:
        crash = "a,~read~by~obstinate crash\nb,~read~by~obstinate crash\n"
        bench.script.write_text(f"{crash}d value 4\n")
        result = await bench.sweep()
        assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, Reason.CRASHED)
        assert bench.metric(STARTS) == 2
        result = await bench.sweep()
        assert values(result) == {"d": 4.0}
        assert reasons(result) == {
            read_by(part, "obstinate"): Reason.CRASHED for part in ("a", "b")
        }


async def test_a_collector_that_is_left_out_is_not_surveyed(tmp_path: Path) -> None:
    """Where one collector hangs at what it alone reads of two parts, the next one is not collected
    to find out more: its readings would be thrown away.
    """
    names = ["obstinate", "memory"]
    async with on_bench(tmp_path, "memory", backoff=LONG, parallel=names) as bench:
        bench.script.write_text("a,~read~by~obstinate hang\nb,~read~by~obstinate hang\n")
        surveyed = []
        survey = bench.supervisor._survey

        async def seen(process: Any, names: Sequence[str], hung: str) -> None:
            surveyed.append(names[0])
            await survey(process, names, hung)

        bench.supervisor._survey = seen  # type: ignore[method-assign] # watches
        results: dict[str, CollectionResult] = {}
        await bench.supervisor.collect(names, results.__setitem__)
        assert results["obstinate"].reason is Reason.TIMEOUT
        assert results["memory"].outcome is CollectionOutcome.OK
        assert surveyed == ["obstinate"]


def test_no_second_worker_where_one_is_stuck() -> None:
    """While one collector's worker is stuck at its reading of a part, no other collector reads more
    of it than is needed to know whether it is up; other parts are read.
    """
    stuck, hung = read_by("gpu 3", "ecc"), read_by("gpu 4", "ecc")
    skipped = worker._blocked([(stuck, "stuck", "process 7"), (hung, "timeout", "no answer")])
    assert set(skipped) == {stuck, hung, read_by("gpu 3", "")}
    assert shared_part(stuck) == "gpu 3"
    assert shared_part("gpu 3") == ""


def test_whose_process_a_part_is() -> None:
    """Users name their jobs: what is only named like another user's process is not that user's."""
    assert user_part(process_part(7, 1000)) == "processes of user 1000"
    for part in (process_part(7, None), "job process 7 of user 0", "process 7 of user 0 of user 9"):
        assert user_part(part) == ""


async def test_a_user_whose_processes_hang(tmp_path: Path) -> None:
    """Past MOST_OF_USER of them the user's others are left out, and no one else's: each would cost
    all others a deadline. They are read again once these answer, or are gone.
    """
    many = [process_part(pid, 7) for pid in range(2 * worker.MOST_OF_USER)]
    other = process_part(99, 8)

    def write(action: str, parts: Sequence[str]) -> None:
        lines = [f"{part.replace(' ', '~')} {action}\n" for part in parts]
        bench.script.write_text("".join(lines) + f"{other.replace(' ', '~')} value 1\n")

    async with on_bench(tmp_path, backoff=LONG) as bench:
        write("hang", many)
        for _ in range(2):
            result = await bench.sweep()
            assert values(result) == {other: 1.0}
            assert set(reasons(result)) == set(many)
            assert "left out, as 8 other processes of its user" in result.faults[-1].detail
        assert bench.metric(REPLACED, "timeout") == worker.MOST_OF_USER
        write("value 1", many[1:])  # the first is gone
        bench.end_back_off()
        for _ in range(worker.MOST_OF_USER):
            result = await bench.sweep()
        assert values(result) == dict.fromkeys([*many[1:], other], 1.0)
        assert bench.metric(QUARANTINED) == 0
        assert bench.metric(STARTS) == worker.MOST_OF_USER + 1


async def test_workers_that_cannot_be_killed_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past MOST_STUCK none is started: what is left to read fails with the reason, until one of
    those has ended.
    """
    monkeypatch.setattr(supervisor_module, "MOST_STUCK", 2)
    async with on_bench(tmp_path) as bench:
        with frozen.mounted(tmp_path) as mount:
            mount.freeze()
            bench.script.write_text(
                "".join(f"{part} dstate {mount.directory}/{part}\n" for part in "abc")
            )
            for _ in range(2):
                result = await bench.sweep()
                assert result.reason is Reason.STUCK
                assert "2 processes of worker test hang" in result.detail
            assert (bench.metric(STARTS), bench.metric(STUCK)) == (2, 2)
            mount.thaw()
            async with asyncio.timeout(60):
                while bench.metric(STUCK):
                    await asyncio.sleep(0.05)
            bench.script.write_text("a value 1\nb value 2\n")
            async with asyncio.timeout(60):
                while len(values(await bench.sweep())) < 2:
                    await asyncio.sleep(0.05)


@pytest.mark.parametrize(("part", "number"), [("b", signal.SIGKILL), ("-", signal.SIGTERM)])
async def test_27_worker_ended_by_somebody_else(tmp_path: Path, number: int, part: str) -> None:
    """One that is killed once says nothing of the part at which it was, nor of its collector: the
    same sweep reads both, again and again.
    """
    async with on_bench(tmp_path, backoff=LONG, hangs=False) as bench:
        for time_ in range(3):
            bench.script.write_text(
                f"a value 1\n{part} ended {tmp_path}/{time_} {number}\nc value 2\n"
            )
            result = await bench.sweep()
            assert not result.faults
            assert result.outcome is CollectionOutcome.OK
            assert {"a": 1.0, "c": 2.0}.items() <= values(result).items()
            assert bench.metric(REPLACED, "crashed") == time_ + 1
        assert not bench.hung


async def test_27_worker_killed_between_two_sweeps(tmp_path: Path) -> None:
    """Nothing of the node is down for it."""
    async with on_bench(tmp_path, backoff=LONG, hangs=False) as bench:
        bench.script.write_text("a pid\n")
        for _ in range(3):
            worker = int(values(await bench.sweep())["a"])
            os.kill(worker, signal.SIGKILL)
            result = await bench.sweep()
            assert not result.faults
            assert values(result)["a"] != worker


@pytest.mark.parametrize(("action", "reason"), [
    ("hang", Reason.TIMEOUT),
    (f"hog {2 * child.MEMORY}", Reason.OUT_OF_MEMORY),
    # Its library must be loaded afresh.
    ("replace", Reason.VERSION_MISMATCH),
])  # fmt: skip
async def test_27_failure_without_a_part(tmp_path: Path, action: str, reason: Reason) -> None:
    """A collector that ends its worker before it has named a part is down until the back-off is
    over, without being run, and then returns with a new worker.
    """
    async with on_bench(tmp_path, backoff=LONG, hangs=action == "hang") as bench:
        bench.script.write_text(f"- {action}\n")
        result = await bench.sweep()
        assert (result.outcome, result.samples) == (CollectionOutcome.ERROR, ())
        bench.script.write_text("a value 1\n")
        assert result.reason is (await bench.sweep()).reason is reason
        assert (bench.metric(UP), bench.metric(STARTS)) == (0, 1)
        bench.end_back_off()
        assert values(await bench.sweep()) == {"a": 1.0}
        assert bench.metric(STARTS) == 2


@pytest.mark.parametrize(("line", "outcome", "reason"), [
    ("- absent nothing", CollectionOutcome.NOT_AVAILABLE, None),
    ("- raise", CollectionOutcome.ERROR, Reason.INTERNAL),
    ("- denied /dev/x", CollectionOutcome.ERROR, Reason.PERMISSION_DENIED),
])  # fmt: skip
async def test_outcomes_cross_the_pipe(
    tmp_path: Path, line: str, outcome: CollectionOutcome, reason: Reason | None
) -> None:
    """Absence, a defect and a refused permission are told apart, and none of them costs the worker
    its life.
    """
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text(line)
        result = await bench.sweep()
        assert (result.outcome, result.reason) == (outcome, reason)
        assert bench.metric(UP) == 1


async def test_unkillable_worker(tmp_path: Path) -> None:
    """A worker in an uninterruptible sleep is counted, its part is left alone, the others are read;
    thawing ends the quarantine.
    """
    async with on_bench(tmp_path) as bench:
        with frozen.mounted(tmp_path) as mount:
            mount.freeze()
            bench.script.write_text(f"a value 1\nb dstate {mount.directory}/x\nc value 3\n")
            result = await bench.sweep()
            assert values(result) == {"a": 1.0, "c": 3.0}
            assert reasons(result) == {"b": Reason.STUCK}
            for _ in range(5):  # beyond the back-off: still no second process at that part
                await asyncio.sleep(0.15)
                assert reasons(await bench.sweep()) == {"b": Reason.STUCK}
            assert (bench.metric(STARTS), bench.metric(STUCK)) == (2, 1)
            mount.thaw()
            async with asyncio.timeout(60):
                while bench.metric(STUCK):
                    await asyncio.sleep(0.05)
            bench.script.write_text("a value 1\nb value 2\n")
            assert values(await bench.sweep()) == {"a": 1.0, "b": 2.0}


async def test_an_agent_stopped_while_it_kills_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hung is `timeout`, and is tried again: no process that has ended counts as
    unkillable.
    """
    kill = child.Child.kill

    def kill_and_be_stopped(process: child.Child) -> None:
        kill(process)
        loop = asyncio.get_running_loop()
        loop.call_soon(time.sleep, 1.5 * child.KILL_DEADLINE)

    async with on_bench(tmp_path) as bench:
        bench.script.write_text("a value 1\nb hang\n")
        monkeypatch.setattr(child.Child, "kill", kill_and_be_stopped)
        assert reasons(await bench.sweep()) == {"b": Reason.TIMEOUT}
        monkeypatch.undo()
        assert (bench.metric(REPLACED, "timeout"), bench.metric(STUCK)) == (1, 0)
        bench.script.write_text("a value 1\nb value 2\n")
        async with asyncio.timeout(60):
            while "b" not in values(await bench.sweep()):
                await asyncio.sleep(0.05)


async def test_close_ends_the_worker_and_leaves_no_zombie(tmp_path: Path) -> None:
    """Closing ends the process through its channel. Nothing remains to be reaped, no descriptor
    stays open.
    """
    async with on_bench(tmp_path, hangs=False) as bench:
        bench.script.write_text("a pid\n")
        descriptors = len(os.listdir("/proc/self/fd"))
        pid = int(values(await bench.sweep())["a"])
        assert Path(f"/proc/{pid}").exists()
        await bench.supervisor.close()
        await eventually(lambda: not Path(f"/proc/{pid}").exists())
        await eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


@pytest.mark.parametrize(("deadline", "slow", "aside", "waits"), [
    (10.0, 0.0, 15, 3.0),
    (10.0, 0.0, 16, math.inf),  # on a node where everything hangs: each holds a process
    (10.0, 100.1, 0, math.inf),
    (3.0, 0.0, 0, math.inf),  # the others can wait for as long
])  # fmt: skip
def test_how_long_a_part_is_waited_for(
    deadline: float, slow: float, aside: int, waits: float
) -> None:
    """Three seconds before the others are read elsewhere; to its deadline where it is shorter, it
    has been slow lately, or many are waited for already.
    """
    supervisor = Supervisor("test", {}, {"paths": deadline}, {}, lambda: 100.0, parallel=["paths"])
    supervisor._slow["part"] = slow
    supervisor._aside.update(f"part {number}" for number in range(aside))
    assert supervisor._patience("paths", "part") == waits


def test_hung_parts_take_turns() -> None:
    """Of those whose back-off is over, the one is retried that has waited longest."""
    now = 100.0
    supervisor = Supervisor("test", {}, {"paths": 1.0}, {}, lambda: now)
    fault = Fault("", Reason.TIMEOUT, "no answer")
    for part, tried in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        supervisor._quarantine[part] = _Quarantine(fault, 1, 0.0, None, tried, "paths")
    turns = []
    for _ in range(4):
        now += 1
        turns.append(supervisor._due())
    assert turns == ["b", "c", "a", "b"]


@pytest.mark.parametrize("early", [False, True])
def test_a_back_off_ends(*, early: bool) -> None:
    """A worker that could not be started is tried again once its back-off is over, not before."""
    supervisor = Supervisor("test", {}, {}, {}, lambda: 10.0)
    fault = Fault("test", Reason.CANNOT_START, "no process")
    supervisor._trouble = _Quarantine(fault, 1, 10.0 + early)
    with pytest.raises(Broken) if early else contextlib.nullcontext():
        supervisor._check_usable()


@pytest.mark.parametrize(
    ("reason", "collector", "known", "survey"),
    [
        (Reason.TIMEOUT, "paths", False, "part"),
        (Reason.TIMEOUT, "paths", True, ""),
        (Reason.CRASHED, "paths", False, ""),
        (Reason.TIMEOUT, "other", False, ""),
    ],
)
def test_when_the_other_parts_may_hang_too(
    reason: Reason, collector: str, survey: str, *, known: bool
) -> None:
    """One that has newly hung, of a collector whose parts several processes may read at once."""
    supervisor = Supervisor("test", {}, {}, {}, time.monotonic, parallel=["paths"])
    if known:
        supervisor._quarantine["part"] = _Quarantine(Fault("part", reason, ""), 1, 0.0)
    assert supervisor._news(Broken(reason, "", collector=collector, part="part")) == survey


@pytest.mark.parametrize(
    ("untried", "aside", "sent"), [(1, 0, 0), (2, 0, 2), (9, 0, 8), (9, 5, 3), (9, 8, 0), (9, 9, 0)]
)
async def test_eight_scouts_at_a_time(
    untried: int, aside: int, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that are still at other parts; none for one part, at which the worker is as
    fast.
    """
    supervisor = Supervisor("test", {}, {"paths": UNHURRIED}, {}, time.monotonic)
    supervisor._aside.update(f"aside {number}" for number in range(aside))
    scouts: list[str] = []

    class Process:
        """A worker that skips what it has not tried yet."""

        async def collect(self, *_: object, last: str) -> dict[str, list[str]]:
            """Answer up to the last part."""
            assert last == "hung"
            return {"untried": [f"part {number}" for number in range(untried)]}

    def scout(part: str, _collector: str) -> tuple[asyncio.Task[None], asyncio.Task[None]]:
        scouts.append(part)
        return asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(asyncio.sleep(0))

    monkeypatch.setattr(supervisor, "_send_scout", scout)
    process: Any = Process()
    await supervisor._survey(process, ["paths"], "hung")
    assert len(scouts) == sent


@pytest.mark.parametrize("is_started", [False, True])
async def test_a_scout_that_does_not_reach_its_part(
    monkeypatch: pytest.MonkeyPatch, *, is_started: bool
) -> None:
    """It does not start beside 24 that cannot be killed, or breaks at another part: then it is
    killed. Nothing is known of its part, which is tried again later.
    """
    supervisor = Supervisor("test", {}, {"paths": UNHURRIED}, {}, lambda: 10.0)
    supervisor._quarantine["part"] = _Quarantine(Fault("part", Reason.TIMEOUT, ""), 1, 0.0)
    killed: list[str] = []

    class Child:
        """Of a process that ends."""

        async def killed(self) -> bool:
            """End it."""
            killed.append("scout")
            return True

    class Process:
        """A scout that gets no further than another part."""

        child = Child()

        def let_go(self) -> None:
            """Close nothing."""

        async def collect(self, *_: object, **__: object) -> None:
            """Break there."""
            process: Any = self
            raise Broken(Reason.TIMEOUT, "", process, "paths", "other")

    async def opened() -> Process:
        return Process()

    if is_started:
        monkeypatch.setattr(supervisor, "_opened", opened)
    else:
        stuck: list[Any] = [Process()] * 24
        supervisor._stuck = stuck
    _, aside = supervisor._send_scout("part", "paths")
    await aside
    assert killed == ["scout"] * is_started
    assert supervisor._quarantine["part"].until > 10.0
