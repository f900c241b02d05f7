"""The worker pool with real workers on real torch and gloo.

What each way of going wrong is called, and that nothing is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.core.timing import Backoff
from dshealthd.linux import starvation
from dshealthd.probe.metrics import CHECKSUM, RoundMetrics
from dshealthd.probe.observation import Outcome, Stage
from dshealthd.probe.workers import fork_server, session
from dshealthd.probe.workers.job import DeviceSteps, RankResult, RankSpec, WorkerJob, late
from dshealthd.probe.workers.store import LocalStore
from dshealthd.probe.workers.worker_pool import WorkerPool
from tests import frozen
from tests.processes import children, runs
from tests.stopwatch import Stopwatch
from tests.waiting import eventually

SHIPPED = fork_server.FORK_DEADLINE
SABOTEUR = str(Path(__file__).parents[1] / "saboteur.py")
ADDRESS = "127.0.0.2"
STAGES = [Stage.STORE, Stage.INIT, Stage.WARM_UP, Stage.SIZES, Stage.VERIFY]
DEADLINE = 1.5
LONG = {Stage.IMPORT: 150.0, **dict.fromkeys(STAGES, 60.0)}
SLOW = {**LONG, **dict.fromkeys(STAGES[2:], 4.0)}
STEPS = ((8, 5), (4096, 5))
ALONE = DeviceSteps(repetitions=3, order=64, bytes=1 << 16)
WAITED_IN_VAIN = {"deadline", "ended_early", "connection_lost"}
"""Reasons of ranks that wait for another: each has its own deadline, and which is over first is
chance; a rank that was ended at its deadline closes its connections to the others.
"""


class Scene:
    """A loop, and a pool of saboteurs that is kept, as importing torch takes seconds."""

    def __init__(self, runner: asyncio.Runner) -> None:
        """Nothing runs yet."""
        self.runner = runner
        self.worker_pool = WorkerPool(
            sys.executable, 60.0, time.monotonic, program=SABOTEUR, backoff=Backoff(0.01, 0.01)
        )
        self.seen: list[tuple[int, Stage]] = []
        self.since = 0.0
        """When a rank has come to a stage last."""

    @property
    def parent(self) -> int:
        """The pid of the fork server, which must run."""
        pid: int = self.worker_pool.about["ready"]
        return pid

    def play(self, *plans: str, **changes: object) -> list[RankResult]:
        """Run one round of as many ranks as there are plans."""
        return self.runner.run(self.round(*plans, **changes))

    async def begin(
        self, stage: Stage, *plans: str, **changes: object
    ) -> asyncio.Task[list[RankResult]]:
        """Start a round and return when its last rank has come to a stage."""
        self.seen.clear()
        task = asyncio.create_task(self.round(*plans, **changes))
        await eventually(lambda: (len(plans) - 1, stage) in self.seen)
        return task

    async def timed(
        self, stage: Stage, plan: str, deadlines: dict[Stage, float]
    ) -> tuple[list[RankResult], float]:
        """Run a round whose second rank goes wrong; return the results, and how soon they came."""
        watches: list[Stopwatch] = []

        def progress(rank: int, entered: Stage) -> None:
            if (rank, entered) == (1, stage):
                watches.append(Stopwatch())

        round_ = job("", f"stage:{stage}:{plan}", deadlines=deadlines)
        results = await self.worker_pool.run(round_, LocalStore(), progress)
        return results, watches[0].seconds()

    async def round(self, *plans: str, **changes: object) -> list[RankResult]:
        """Run one round in the loop."""
        self.seen.clear()
        return await self.worker_pool.run(job(*plans, **changes), LocalStore(), self.note)

    def note(self, rank: int, stage: Stage) -> None:
        """Take note of progress."""
        self.seen.append((rank, stage))
        self.since = time.monotonic()


def job(*plans: str, **changes: object) -> WorkerJob:
    """Return a job with a plan for each rank; an empty plan is honest work."""
    rank_specs = tuple(
        RankSpec(rank=rank, part=str(rank), adapter=plan) for rank, plan in enumerate(plans)
    )
    fields = {
        "backend": "gloo",
        "world_size": len(plans),
        "rank_specs": rank_specs,
        "address": ADDRESS,
        "steps": STEPS,
        "deadlines": LONG,
    }
    return WorkerJob(**{**fields, **changes})  # type: ignore[arg-type] # fields by name


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Give the module one pool; its fork server may not inherit this secret, nor this listener."""
    with (
        asyncio.Runner() as runner,
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        server.set_inheritable(True)
        patch.setenv("DSHEALTHD_TEST_SECRET", "hush")
        patch.setattr(fork_server, "FORK_DEADLINE", 60.0)
        patch.setattr(session, "LAST_MOMENT", 60.0)
        patch.setattr(starvation, "LAG", 60.0)
        scene = Scene(runner)
        yield scene
        runner.run(scene.worker_pool.close())


def alone(play: Callable[[WorkerPool], Coroutine[None, None, None]], **options: Any) -> None:
    """Run a scene with a pool of its own."""

    async def main() -> None:
        settings: dict[str, Any] = {
            "python": sys.executable,
            "idle_seconds": 60.0,
            "monotonic": time.monotonic,
            "program": SABOTEUR,
        }
        worker_pool = WorkerPool(**{**settings, **options})
        try:
            await play(worker_pool)
        finally:
            await worker_pool.close()

    asyncio.run(main())


def ignore(_rank: int, _stage: Stage) -> None:
    """Take no note of progress."""


def outcomes(results: list[RankResult]) -> list[tuple[Outcome, str]]:
    """Return outcome and reason of each rank."""
    return [(result.outcome, result.reason) for result in results]


def listeners(pids: list[int]) -> list[str]:
    """Return the addresses on which processes listen."""
    command = ["ss", "-Hltunp"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [line.split()[4] for line in lines if any(f"pid={pid}," in line for pid in pids)]


def test_healthy(scene: Scene) -> None:
    """Every rank goes through all stages, times every size, and gives nccl-tests' bandwidth."""
    world = 4
    results = scene.play(*[""] * world)
    assert outcomes(results) == [(Outcome.OK, "")] * world, results
    assert not late(results)
    assert scene.worker_pool.about["cuda"] != "None"
    for rank, result in enumerate(results):
        assert result.stage is Stage.DONE
        assert [stage for seen, stage in scene.seen if seen == rank] == [
            Stage.IMPORT,
            *STAGES[:3],
            Stage.SIZES,
            Stage.SIZES,
            Stage.VERIFY,
        ]
        assert [(timing.op, timing.size, timing.part) for timing in result.timings] == [
            ("all_reduce", size, str(rank)) for size, _ in STEPS
        ]
        for timing in result.timings:
            assert 0 < timing.seconds < 5
            assert math.isclose(
                timing.bus_bandwidth, timing.size / timing.seconds * 2 * (world - 1) / world
            )
        assert (result.entered, result.left) == (17, 17)


def test_bandwidth(scene: Scene) -> None:
    """64 MiB go around and are checked to the last element."""
    results = scene.play("", "", steps=((64 << 20, 1),), warm_up=0)
    assert outcomes(results) == [(Outcome.OK, "")] * 2, results
    assert results[0].timings[0].bus_bandwidth > 1e6


@pytest.mark.parametrize("ranks", [1, 2])
def test_devices(scene: Scene, ranks: int) -> None:
    """A local round also times what each device does alone; one that is alone has no all-reduce to
    time.
    """
    results = scene.play(*[""] * ranks, device_steps=ALONE)
    assert outcomes(results) == [(Outcome.OK, "")] * ranks, results
    assert {result.checksum for result in results} == {None}  # a CPU promises no equal bits
    assert [(timing.op, timing.size) for timing in results[-1].timings] == [
        *(("all_reduce", size) for size, _ in STEPS if ranks > 1),
        ("matrix_product", 64 * 64 * 4),
        ("device_copy", 1 << 16),
        ("host_to_device", 1 << 16),
    ]


def test_flipped_bit(scene: Scene) -> None:
    """A device that flips one bit in each product is the odd one out of three, which no rank could
    know of itself: the checksums of all are exported.
    """
    plans = ("checksum:none", "checksum:all", "checksum:none")
    results = scene.play(*plans, device_steps=ALONE)
    assert outcomes(results) == [(Outcome.OK, "")] * 3, results
    numbers = [result.checksum.number for result in results if result.checksum is not None]
    assert numbers[0] == numbers[2] != numbers[1]
    metrics = RoundMetrics()
    metrics.record_checksums(results)
    exported = [(one.labels[0], one.value) for one in metrics.samples(()) if one.metric is CHECKSUM]
    assert exported == [*zip("012", numbers, strict=True)]


def test_bit_that_flips_now_and_then(scene: Scene) -> None:
    """A device whose product has other bits when repeated is wrong by itself."""
    results = scene.play("checksum:none", "checksum:second", device_steps=ALONE)
    assert outcomes(results) == [(Outcome.OK, ""), (Outcome.CORRUPTED, "wrong_data")], results
    assert "other bits when repeated" in results[1].detail


def test_rails(scene: Scene) -> None:
    """Each rail is a group of its own, and a fault on one leaves the other's result whole."""
    store = LocalStore()

    def node(number: int, plan: str = "") -> WorkerJob:
        rank_specs = tuple(
            RankSpec(
                rank=2 * number + k,
                part=f"rail{k}",
                group=f"rail{k}",
                group_rank=number,
                group_size=2,
                adapter=plan if k == 1 else "",
            )
            for k in range(2)
        )
        return job("", world_size=4, rank_specs=rank_specs, address=f"127.0.0.{2 + number}")

    async def both(plan: str) -> list[list[RankResult]]:
        return await asyncio.gather(
            *(scene.worker_pool.run(one, store, ignore) for one in (node(0), node(1, plan)))
        )

    results = scene.runner.run(both("collective:11:bad_output"))
    assert [[result.rank for result in one] for one in results] == [[0, 1], [2, 3]]
    assert outcomes(results[0]) == [(Outcome.OK, "")] * 2, results
    assert outcomes(results[1]) == [(Outcome.OK, ""), (Outcome.CORRUPTED, "wrong_data")]
    assert math.isclose(
        results[0][0].timings[0].bus_bandwidth, 8 / results[0][0].timings[0].seconds
    )


def test_an_agent_that_is_stopped_for_a_deadline(scene: Scene) -> None:
    """What the ranks said meanwhile counts: no rank is hung because the agent was."""
    stopped: list[int] = []

    async def round_() -> list[RankResult]:
        loop = asyncio.get_running_loop()

        def progress(rank: int, stage: Stage) -> None:
            if (rank, stage) == (1, Stage.SIZES):
                stopped.append(rank)
                loop.call_soon(time.sleep, 2 * DEADLINE)

        deadlines = {**LONG, Stage.SIZES: DEADLINE}
        return await scene.worker_pool.run(job("", "", deadlines=deadlines), LocalStore(), progress)

    assert outcomes(scene.runner.run(round_())) == [(Outcome.OK, "")] * 2
    assert stopped


def test_stopped(scene: Scene) -> None:
    """A rank that is stopped in a stage is the late one, and not the rank that waits."""

    async def together() -> list[tuple[list[RankResult], float]]:
        return await asyncio.gather(
            *(scene.timed(stage, "stop", {**LONG, stage: DEADLINE}) for stage in STAGES)
        )

    rounds = scene.runner.run(together())
    for stage, (results, seconds) in zip(STAGES, rounds, strict=True):
        assert seconds < 3 * DEADLINE + 3
        assert outcomes(results)[1] == (Outcome.HUNG, "stopped"), results
        assert results[1].stage is stage, results
        assert results[0].reason in WAITED_IN_VAIN, results
        assert late(results) == (1,)


def test_killed(scene: Scene) -> None:
    """A killed rank is named with the signal, long before the deadline, and no other."""

    async def together() -> list[tuple[list[RankResult], float]]:
        return await asyncio.gather(*(scene.timed(stage, "kill", LONG) for stage in STAGES))

    for stage, (results, seconds) in zip(STAGES, scene.runner.run(together()), strict=True):
        assert seconds < 10
        assert outcomes(results)[1] == (Outcome.FAILED, "killed"), results
        assert results[1].stage is stage, results
        assert "SIGKILL" in results[1].detail
        assert results[0].reason in {"connection_lost", "ended_early", "timeout"}, results
        assert late(results) == (1,)


def test_a_rank_without_a_cpu_is_not_hung(scene: Scene) -> None:
    """A rank that could run and got no CPU until its deadline proves nothing, not even that it
    cannot be killed, which takes CPU too. The next round goes well.
    """
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    # Sessions of their own, between which kernels with autogroup share a CPU whatever their nice.
    hogs = [
        subprocess.Popen([sys.executable, "-I", "-S", "-c", code], start_new_session=True)
        for _ in range(5)
    ]
    try:
        results = scene.play("", f"collective:6:starve:{cpu}", deadlines=SLOW)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    assert outcomes(results)[1] == (Outcome.INCONCLUSIVE, "starved"), results
    assert "too busy to tell: " in results[1].detail
    scene.runner.run(eventually(lambda: not any(map(runs, children(scene.parent)))))
    busy = (Outcome.INCONCLUSIVE, "busy")
    while busy in (again := outcomes(scene.play("", ""))):
        time.sleep(0.1)  # the pool notices a moment later that the worker has ended
    assert again == [(Outcome.OK, "")] * 2


@pytest.mark.parametrize(
    ("plan", "reason", "words"),
    [
        ("stage:init:exit", "exited", "status 3: going home early"),
        ("stage:init:segv", "killed", "SIGSEGV"),
        ("stage:init:raise:a defect", "exited", "status 70: .*a defect"),
        ("stage:init:nonsense", "malformed", "4294967295 bytes"),
    ],
)
def test_failures(scene: Scene, plan: str, reason: str, words: str) -> None:
    """A worker that crashes, leaves or babbles is a failure with its last words."""
    results = scene.play("", plan)
    assert (results[1].outcome, results[1].reason) == (Outcome.FAILED, reason), results
    assert re.search(words, results[1].detail)
    assert late(results) == (1,)


@pytest.mark.parametrize(
    ("collective", "action", "index", "accused"),
    [
        (9, "bad_output", 7, (1,)),
        (16, "stale", 0, (1,)),
        (9, "swapped", 3, (1,)),
        (16, "bad_input", 5, (0, 1)),
    ],
)
def test_wrong_data(
    scene: Scene,
    collective: int,
    action: str,
    index: int,
    accused: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wrong, stale and swapped data are found, with the rank and the first wrong place."""
    monkeypatch.setattr(session, "GRACE", 60.0)  # all ranks check, the slow ones too
    results = scene.play("", f"collective:{collective}:{action}", steps=((64, 5), (4096, 5)))
    assert late(results) == accused, results
    for rank in accused:
        assert (results[rank].outcome, results[rank].reason) == (Outcome.CORRUPTED, "wrong_data")
        assert results[rank].stage is (Stage.SIZES if collective == 9 else Stage.VERIFY)
        assert f"rank {rank}: all_reduce" in results[rank].detail
        assert f"first at index {index}:" in results[rank].detail


def test_versions_differ(scene: Scene) -> None:
    """Ranks that do not run the same torch say so instead of measuring."""
    results = scene.play("", "versions")
    assert outcomes(results) == [(Outcome.FAILED, "versions_differ")] * 2, results
    assert "rank 1 gloo torch 1.0" in results[0].detail
    assert results[0].stage is Stage.STORE


def test_no_such_address(scene: Scene) -> None:
    """What fails before a rank has spoken to another is an import that failed, whatever the error
    is called, and its text is kept for a person.
    """
    own = scene.play("", address="192.0.2.1")
    assert own[0].outcome is Outcome.FAILED
    assert own[0].stage is Stage.IMPORT
    assert "192.0.2.1" in own[0].detail
    assert "192.0.2.1" in scene.worker_pool.problem(0)
    assert outcomes(scene.play("")) == [(Outcome.OK, "")]
    assert scene.worker_pool.problem(0) == ""


def test_cuda_that_does_not_start() -> None:
    """A driver that refuses, hangs or crashes leaves no GPU to use, with the text of what is wrong,
    and the fork server as it was.
    """
    done = subprocess.run(
        [sys.executable, SABOTEUR, "cuda"],
        capture_output=True,
        text=True,
        check=True,
        env=dict(fork_server.ENVIRONMENT),
    )
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"gpus": 0, "no_gpus": "The NVIDIA driver is too old"},
        {"gpus": 0, "no_gpus": "CUDA does not start within 1 s"},
        {"gpus": 0, "no_gpus": "starting CUDA ended the process: status -11"},
    ]


def test_listeners(scene: Scene) -> None:
    """Workers listen on the address given and nowhere else; the parent on nothing."""

    async def play() -> list[str]:
        task = await scene.begin(Stage.SIZES, "", "stage:sizes:stop")
        pids = [scene.parent, *children(scene.parent)]
        found = listeners(pids)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    ours = scene.runner.run(play())
    assert len(ours) == 2
    assert all(address.startswith(f"{ADDRESS}:") for address in ours)


def test_stranger(scene: Scene) -> None:
    """A stranger who talks nonsense to a worker's port harms no round under way."""

    async def play() -> list[RankResult]:
        deadlines = {**LONG, Stage.SIZES: 2 * DEADLINE}
        task = await scene.begin(Stage.SIZES, "", "", "collective:12:hang", deadlines=deadlines)
        ports = listeners(children(scene.parent))
        assert len(ports) == 3
        for port in ports:
            host, _, number = port.rpartition(":")
            with (
                socket.create_connection((host, int(number)), timeout=60) as stranger,
                contextlib.suppress(OSError),
            ):
                stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" * 10)
        results = await task
        assert time.monotonic() - scene.since > DEADLINE, results
        return results

    results = scene.runner.run(play())
    assert late(results) == (2,), results
    assert results[2].entered == 12
    reasons = {result.reason for result in results}
    # The first to be ended by its deadline takes the others' connections with it.
    assert "deadline" in reasons, results
    assert reasons <= WAITED_IN_VAIN, results


def test_nothing_inherited(scene: Scene) -> None:
    """The parent has nothing of the agent's environment and descriptors, and one thread. It gains
    no privileges, and has 16 GiB of memory at most. CUDA looks for an MPS daemon where none is.
    """
    scene.play("", "")
    process = Path(f"/proc/{scene.parent}")
    environment = (process / "environ").read_text(encoding="utf-8").split("\0")
    variables = dict(entry.split("=", 1) for entry in environment if entry)
    assert variables.keys() == fork_server.ENVIRONMENT.keys()
    assert not Path(variables["CUDA_MPS_PIPE_DIRECTORY"]).exists()
    links = [os.readlink(link) for link in (process / "fd").iterdir()]
    assert sum(link.startswith("socket:") for link in links) == 1  # to the agent
    assert len(os.listdir(process / "task")) == 1
    assert children(scene.parent) == []
    assert "NoNewPrivs:\t1\n" in (process / "status").read_text(encoding="ascii")
    limits = (process / "limits").read_text(encoding="ascii")
    assert re.search(rf"Max data size +{16 * 2**30} ", limits)


def test_threads_at_import() -> None:
    """Where importing torch leaves threads, workers are started afresh, and work. How many of the
    node's GPUs torch can use is known before a round chooses NCCL. The parent goes when no round
    has come for a while.
    """

    async def play(worker_pool: WorkerPool) -> None:
        assert await worker_pool.prepare(150.0) == ""
        assert worker_pool.ready
        assert worker_pool.no_gpus(4) == worker_pool.problem(0) == ""
        assert worker_pool.no_gpus(8) == worker_pool.problem(8) == "torch can use 4 of 8 GPUs"
        parent = worker_pool.about["ready"]
        assert len(os.listdir(f"/proc/{parent}/task")) == 2
        results = await worker_pool.run(job(""), LocalStore(), ignore)
        assert outcomes(results) == [(Outcome.OK, "")], results
        await eventually(lambda: not runs(parent))
        assert worker_pool.about == {}

    alone(play, idle_seconds=1.0, environment={"SABOTEUR": "threads"})


def test_whole_group_is_killed(scene: Scene, tmp_path: Path) -> None:
    """What a worker has started goes with it."""
    note = tmp_path / "child"
    scene.play(f"stage:init:child:{note}", deadlines={**LONG, Stage.INIT: 3 * DEADLINE})
    pid = int(note.read_text(encoding="ascii"))
    scene.runner.run(eventually(lambda: not runs(pid)))


def test_cancelled(scene: Scene) -> None:
    """When the round is called off, no worker outlives it."""

    async def play() -> None:
        task = await scene.begin(Stage.SIZES, "", "stage:sizes:stop")
        parent = scene.parent
        assert len(children(parent)) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await eventually(lambda: not children(parent))

    scene.runner.run(play())
    assert outcomes(scene.play("", "")) == [(Outcome.OK, "")] * 2


def test_parent_dies(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the parent is killed or stopped, that round fails for it and the next one works."""

    async def play(signal_number: int) -> list[RankResult]:
        task = await scene.begin(Stage.SIZES, "", "stage:sizes:hang")
        parent = scene.parent
        workers = children(parent)
        os.kill(parent, signal_number)
        results = await task
        await eventually(lambda: not any(map(runs, workers)))
        return results

    assert outcomes(scene.runner.run(play(signal.SIGKILL))) == [(Outcome.FAILED, "parent")] * 2
    assert outcomes(scene.play("", "")) == [(Outcome.OK, "")] * 2
    parent = scene.parent
    os.kill(parent, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(fork_server, "FORK_DEADLINE", SHIPPED)
        results = scene.play("", "")
    assert outcomes(results) == [(Outcome.FAILED, "parent")] * 2
    assert "did not answer within 3 s" in results[0].detail
    assert outcomes(scene.play("", "")) == [(Outcome.OK, "")] * 2


def test_agent_dies(tmp_path: Path) -> None:
    """When the agent is killed, its parent and workers are gone too."""
    script = tmp_path / "agent.py"
    script.write_text(
        "import asyncio, sys, time\nfrom dshealthd.probe.workers.store import LocalStore\nfrom "
        "dshealthd.probe.workers.worker_pool import WorkerPool\nfrom "
        "tests.probe.workers.test_worker_pool import job\n"
        f"pool = WorkerPool(sys.executable, 60.0, time.monotonic, program={SABOTEUR!r})\n"
        "progress = lambda rank, stage: print(pool.about.get('ready'), stage, flush=True)\n"
        "asyncio.run(pool.run(job('', 'stage:sizes:stop'), LocalStore(), progress))\n",
        encoding="utf-8",
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": root},
    ) as agent:
        assert agent.stdout is not None
        line = next(line for line in agent.stdout if "sizes" in line)
        pid = int(line.split()[0])
        processes = [pid, *children(pid)]
        assert len(processes) == 3
        agent.kill()
    asyncio.run(eventually(lambda: not any(map(runs, processes))))


def test_unkillable(scene: Scene, tmp_path: Path) -> None:
    """A worker that cannot be killed is counted, and keeps its device until it has ended."""
    with frozen.mounted(tmp_path) as mount:
        mount.freeze()
        deadlines = {**LONG, Stage.INIT: DEADLINE}
        (result,) = scene.play(f"stage:init:dstate:{mount.directory}/x", deadlines=deadlines)
        assert (result.outcome, result.reason) == (Outcome.HUNG, "unkillable")
        assert "cannot be killed" in result.detail
        watch = Stopwatch()
        assert outcomes(scene.play("", "")) == [(Outcome.INCONCLUSIVE, "busy")] * 2
        assert watch.seconds() < 1
        assert [
            sample.value
            for sample in scene.worker_pool.samples()
            if sample.metric.name == "dshealthd_probe_workers_stuck"
        ] == [1.0]
        mount.thaw()
        stuck = scene.worker_pool._stuck["cpu"]
        scene.runner.run(eventually(stuck.ended.is_set))
    assert outcomes(scene.play("", "")) == [(Outcome.OK, "")] * 2


def test_other_environment(tmp_path: Path) -> None:
    """The interpreter may be of another environment, unless others can write to that."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    venv.create(tmp_path / "env", symlinks=True)
    packages = next((tmp_path / "env").glob("lib/python3*/site-packages"))
    for entry in Path(spec.origin).parent.parent.iterdir():
        if not entry.name.endswith(".pth"):
            (packages / entry.name).symlink_to(entry)
    python = str(tmp_path / "env" / "bin" / "python")

    async def works(worker_pool: WorkerPool) -> None:
        results = await worker_pool.run(job("", ""), LocalStore(), ignore)
        assert outcomes(results) == [(Outcome.OK, "")] * 2, results
        assert os.path.realpath(f"/proc/{worker_pool.about['ready']}/exe") == os.path.realpath(
            python
        )

    async def refused(worker_pool: WorkerPool) -> None:
        results = await worker_pool.run(job("", ""), LocalStore(), ignore)
        assert outcomes(results) == [(Outcome.FAILED, "writable")] * 2, results
        assert f"{packages} is writable by everyone" in results[0].detail
        assert results[0].stage is Stage.IMPORT

    alone(works, python=python)
    packages.chmod(0o777)
    alone(refused, python=python)


@pytest.mark.parametrize(
    ("python", "reason", "words"),
    [
        ("/usr/bin/python3", "no_torch", "torch"),
        ("/nonexistent/python", "no_python", "No such file"),
    ],
)
def test_useless_interpreter(python: str, reason: str, words: str) -> None:
    """An interpreter without torch is named, and not tried again before the back-off."""

    async def play(worker_pool: WorkerPool) -> None:
        results = await worker_pool.run(job(""), LocalStore(), ignore)
        assert outcomes(results) == [(Outcome.FAILED, reason)]
        assert words in results[0].detail
        await worker_pool.run(job(""), LocalStore(), ignore)
        values = {sample.metric.name: sample.value for sample in worker_pool.samples()}
        assert worker_pool._trouble is not None
        assert worker_pool._trouble[1] == 1  # failures
        assert values["dshealthd_probe_parent_up"] == 0

    alone(play, python=python, backoff=Backoff(600.0))


def test_slow_is_not_hung(scene: Scene) -> None:
    """Collectives that go on, at a tenth of their usual speed, are timed beyond their deadline, for
    a few times as long; those that go on for ever are hung.
    """
    deadlines = {**LONG, Stage.SIZES: DEADLINE}
    drag = DEADLINE / 3
    results = scene.play("", f"drag:{drag}", steps=((8, 6),), warm_up=0, deadlines=deadlines)
    assert outcomes(results) == [(Outcome.OK, "")] * 2
    assert all(result.timings[0].seconds >= drag / 2 for result in results)
    results = scene.play("", f"drag:{drag}", steps=((8, 60),), warm_up=0, deadlines=deadlines)
    assert Outcome.HUNG in {result.outcome for result in results}
