"""`dshealthd jobs` against real servers: what it prints of jobs over all nodes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from dshealthd.collectors.gpu import ACTIVITY
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_activity import AWAITS, FILES, PROCESS
from dshealthd.collectors.job_environment import RANKS, WORLD_SIZE
from dshealthd.collectors.job_hang import BOUND, CULPRIT, HANG, OVERDUE, PATIENCE, PHASE_SECONDS
from dshealthd.collectors.job_logs import FAILURE
from dshealthd.collectors.nvlink import UP as LINK_UP
from dshealthd.collectors.training import HEARD, PHASE, STEP
from dshealthd.core.collector import Sample
from dshealthd.findings.idleness import IDLE
from dshealthd.status.jobs import job_lines, ranks
from dshealthd.status.paint import Paint
from dshealthd.status.query import AgentAnswer
from tests.singular import ONE_OF_MANY
from tests.status.nodes import HUNG, JOB, answering, run
from tests.status_documents import document, job, rank


def test_jobs(shown: Callable[..., str]) -> None:
    """A hung job is named with cause, culprit and its ranks; a job that moves with its pace."""
    said = shown("jobs", *HUNG, code=2)
    assert "run-1  hung  2 ranks here, steps 1245-1246, loss finite" in said
    why = "no progress, 90 s longer than expected; cause: work between steps, or I/O, of a rank"
    assert why in said
    assert (
        "rank 1 has not begun its next forward pass (data, logging, a barrier, or the like)" in said
    )
    said = shown("jobs", *JOB)
    assert "run-1  training  2 ranks here, steps 1245-1246, 12 steps/min" in said
    assert run("jobs", "127.0.0.1:1") == 3


def test_a_pause_is_no_hang_yet(shown: Callable[..., str]) -> None:
    """Ranks between two steps are neither hung nor training until the page would come."""
    silent = (*JOB, PATIENCE(600, "run-1"), *(BOUND(30, "run-1", rank) for rank in "01"))
    pause = (*silent, HANG(0, "run-1", "between_steps"), OVERDUE(15, "run-1", "0"))
    said = shown("jobs", *pause)
    assert "run-1  stalled  2 ranks here" in said
    assert "between two steps for 45 s; counts as hung in 10 min" in said
    assert "steps/min" not in said
    shown("status", *pause)
    over = (*silent, HANG(1, "run-1", "waiting"), OVERDUE(600, "run-1", "0"))
    assert "wait at the same place" in shown("status", *over, code=2)


@pytest.mark.parametrize(
    ("samples", "does"),
    [
        ((GPU(1, "run-1", "0", "0", "GPU-a"), ACTIVITY(0.3, "0", "GPU-a")), "its GPUs compute"),
        ((FILES(2e7, "run-1"),), "it reads or writes files"),
        ((), "its processes are at work"),
    ],
)
def test_a_job_at_work_is_no_hang(
    samples: tuple[Sample, ...], does: str, shown: Callable[..., str]
) -> None:
    """A pause says what shows that the job is at work, and never becomes a hang by itself."""
    pause = (*JOB, HANG(0, "run-1", "working"), BOUND(30, "run-1", "0"), OVERDUE(15, "run-1", "0"))
    for command in ("jobs", "status"):
        said = shown(command, *pause, *samples)
        assert "run-1  stalled  2 ranks here" in said
        assert f"no step, but {does} for 45 s\n" in said


def test_a_suspended_job_and_a_debugger(shown: Callable[..., str]) -> None:
    """A suspended job is no problem of the node; a rank in a debugger is a named warning."""
    suspended = (*JOB, HANG(0, "run-1", "suspended"))
    assert "run-1  suspended  2 ranks here" in shown("jobs", *suspended)
    shown("status", *suspended)
    held = (*JOB, HANG(0, "run-1", "debugger"), CULPRIT(1, "run-1", "1", "debugger", "traced"))
    assert "a rank is stopped in a debugger" in shown("jobs", *held)
    assert "rank 1 is stopped in a debugger" in shown("status", *held, code=1)


def test_a_marked_pause_is_the_headline(shown: Callable[..., str]) -> None:
    """A checkpoint is neither training nor a pace; one of a moment is not shown."""
    pause = (*JOB, PHASE(1, "run-1", "0", "checkpoint"))
    said = shown("jobs", *pause, PHASE_SECONDS(45, "run-1", "0"))
    assert "run-1  checkpoint for 45 s  2 ranks here, steps 1245-1246, loss finite\n" in said
    said = shown("jobs", *pause, PHASE_SECONDS(1, "run-1", "0"))
    assert "run-1  training  2 ranks here" in said


def test_a_job_has_a_script_and_no_false_calm(shown: Callable[..., str]) -> None:
    """A job is shown with what its owner knows of it, and how long no rank was heard."""
    first = PROCESS(1, "run-1", "train.py", "1000", "4242")
    silent = (
        *JOB,
        *(HEARD(time.time() - ago, "run-1", rank) for ago, rank in ((600, "0"), (60, "1"))),
        *(BOUND(bound, "run-1", rank) for bound, rank in ((100, "0"), (90, "1"))),
    )
    said = shown("jobs", *silent, first)
    assert re.search(
        r"run-1  no step for ([\d.]+ s|\d min), judged from 100 s on  "
        r"train.py of user 1000 \(pid 4242\), 2 ranks",
        said,
    )
    usual = (*JOB, HEARD(time.time() - 60, "run-1", "0"), BOUND(150, "run-1", "0"))
    assert "run-1  training  " in shown("jobs", *usual)


def test_a_job_without_heartbeats_that_does_nothing(shown: Callable[..., str]) -> None:
    """How long no rank used CPU or GPU is said, and is no problem by itself."""
    ranks = RANKS(2, "run-1", "run-1")
    idle = "\n    no rank here has used CPU or GPU for 12 min\n"
    said = shown("jobs", ranks, IDLE(720, "run-1"))
    assert "run-1  stalled  2 ranks here" in said
    assert idle in said
    prompt = AWAITS(1, "run-1", "0", "input from a terminal")
    said = shown("jobs", ranks, prompt, IDLE(720, "run-1"))
    assert (
        "no rank here has used CPU or GPU: rank 0 waits for input from a terminal for 12 min"
        in said
    )
    said = shown("jobs", ranks, IDLE(20, "run-1"))
    assert "run-1  no heartbeats  2 ranks here" in said
    assert "no rank here" not in said
    assert "own work" not in said  # a table without rows


def test_slow_ranks_of_all_nodes_that_were_queried(capsys: pytest.CaptureFixture[str]) -> None:
    """A node whose ranks are all slow is so beside another one; a slow stage of a pipeline that
    nobody waits for is told as that. Nodes may be given by their URL.
    """

    def own(role: str, usual: float) -> dict[str, Any]:
        figures = {"rank": 3, "slow": usual * 1.01, "usual": usual, "between": 1e-4, "within": 4e-6}
        return figures | {"over": "30s", "role": role, "ranks": 8, "step_seconds": 4.0}

    told = {
        "n1": job(own_work=[own("stage 0", 1.0), own("stage 1", 2.0)]),
        "n2": job(own_work=[own("stage 0", 1.5), own("stage 1", 2.6)]),
    }
    with answering(*(document(node=node, jobs=[one]) for node, one in told.items())) as agents:
        assert run("jobs", *(f"http://{agent}/" for agent in agents)) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert (
            "rank 3 on n2 (stage 0) takes 1.50 times as long as its peers; "
            "the job does not wait for it: other ranks have more to do" in lines
        )
        assert (
            "rank 3 on n2 (stage 1) takes 1.30 times as long as its peers; "
            "up to 15% of the job's throughput is lost" in lines
        )
        run("jobs", agents[1])
        assert "takes" not in capsys.readouterr().out


def test_one_headline_for_several_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """A job is one over all nodes: steps as a range, and no hang while other ranks pause."""
    steady = rank(work_seconds=1.99, wait_seconds=0.07, work_ratio=1.28, overdue_seconds=0.0)
    told = {
        "n1": job(world_size=2, step=154, step_highest=154, ranks=[steady | {"heartbeat": 995.0}]),
        "n2": job(
            world_size=2,
            step=156,
            step_highest=156,
            ranks=[rank(rank=1, step=156, overdue_seconds=90.0)],
        ),
    }

    def printed() -> tuple[int, str]:
        with answering(*(document(node=node, jobs=[one]) for node, one in told.items())) as agents:
            code = run("jobs", *agents)
        return code, capsys.readouterr().out

    code, said = printed()
    assert (code, said.splitlines()[0]) == (
        0,
        "run-1  training  2 of 2 ranks on 2 nodes, steps 154-156, 60 steps/min, loss finite",
    )
    heads, first, second = (line.strip() for line in said.splitlines()[1:])
    cells = [re.split(r"  +", line) for line in (heads, first, second)]
    assert cells[0][3:] == [
        *("age", "at", "process", "step time", "own work", "wait", "factor", "overdue")
    ]
    assert cells[1][3:] == ["5 s", "forward", "running", "1 s", "1.99 s", "0.07 s", "1.28", "-"]
    assert cells[2][3:] == ["-", "forward", "running", "1 s", "-", "-", "-", "90 s"]
    assert heads.index("overdue") == first.index("-", first.index("1.28")) == second.index("90 s")
    hang = {"cause": "waiting", "overdue_seconds": 60.0, "culprits": [], "says": "elsewhere"}
    stall = {"cause": "checkpoint", "says": "checkpoint", "silent_seconds": 120.0}
    told["n1"] |= {"state": "paused", "stall": stall | {"hung_in_seconds": None}}
    told["n2"] |= {"state": "hung", "hang": hang}
    code, said = printed()
    assert code == 0
    assert said.startswith("run-1  checkpoint for 2 min  2 of 2 ranks on 2 nodes")
    assert "n2: waits, 60 s longer than expected: elsewhere" in said
    told["n1"] |= {"state": "hung", "hang": hang | {"cause": "process"}, "stall": None}
    code, said = printed()
    assert code == 2
    assert said.startswith("run-1  hung  ")
    for one in told.values():  # all of them wait between two steps, for nobody
        stall = {"cause": "collective", "says": "in collectives", "silent_seconds": 120.0}
        stall |= {"hung_in_seconds": 540.0}
        one |= {"state": "stalled", "hang": None, "stall": stall, "step": 156, "ranks_here": 1}
        one |= {"step_highest": 156}
    code, said = printed()
    assert code == 2
    assert said.startswith("run-1  hung  ")
    assert "n1: in collectives for 2 min\n" in said
    told["n2"] |= {"stall": stall | {"cause": "between_steps"}}
    code, said = printed()
    assert code == 0
    assert said.startswith("run-1  stalled  ")
    assert "n1: in collectives for 2 min; counts as hung in 9 min\n" in said


def test_agent_that_has_just_started_knows_of_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    """That none is hung cannot be said by an agent that has not judged yet; a hung one can."""
    hang = {"cause": "process", "overdue_seconds": 60.0, "culprits": [], "says": "hung"}
    for jobs, code, text in (
        ([], 3, "n1  its agent has just started, and has not judged all sources yet\n"),
        ([job(state="hung", hang=hang)], 2, "run-1  hung  "),
    ):
        with answering(document(ready=False, jobs=jobs)) as agents:
            assert run("jobs", *agents) == code
        said = capsys.readouterr().out
        assert text in said
        assert "no training jobs" not in said
    with answering(document()) as agents:
        assert run("jobs", *agents, "127.0.0.1:1") == 3
    assert "no training jobs" in capsys.readouterr().out, "as far as agents answer"


def test_agent_that_may_not_see_all_processes(capsys: pytest.CaptureFixture[str]) -> None:
    """As with unprivileged.conf: jobs that it cannot see are not said to be none."""
    samples = [
        {"labels": {"reason": reason}, "value": value}
        for reason, value in (("permission_denied", 53), ("deferred", 2))
    ]
    family = {"type": "gauge", "help": "", "samples": samples}
    with answering(document(metrics={"dshealthd_processes_unseen": family})) as agents:
        assert run("jobs", *agents) == 0
    assert capsys.readouterr().out == (
        "n1  53 processes could not be inspected: permission denied\nno training jobs seen\n"
    )


def test_one_job_of_two_is_hung(capsys: pytest.CaptureFixture[str]) -> None:
    """It makes the exit status, which is unknown where one agent of two has not judged yet."""
    hang = {"cause": "process", "overdue_seconds": 60.0, "culprits": [], "says": "hung"}
    hung, well = job(state="hung", hang=hang), job(job="run-2")
    for first, code in ((document(jobs=[well, hung]), 2), (document(ready=False), 3)):
        with answering(first, document(jobs=[well])) as agents:
            assert run("jobs", *agents) == code
        said = capsys.readouterr().out
        assert said.index("run-2  training") >= said.find("run-1  hung")
        assert (code == 2) is ("run-1  hung" in said)


def test_what_an_agent_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that could not be shown may be hung: none is said to be well."""
    lacking = [{"part": "job \x1b[2J", "reason": "ValueError: odd"}]
    for command, code in (("status", 0), ("jobs", 3)):
        with answering(document(left_out=lacking)) as agents:
            assert run(command, *agents) == code
            assert r"job \u001b[2J: ValueError: odd" in capsys.readouterr().out
            assert run(command, *agents, "--json") == code
        (node,) = json.loads(capsys.readouterr().out)["nodes"]
        assert (node["left_out"], node["ready"]) == (lacking, True)


@pytest.mark.parametrize(("state", "color"), [
    ("training", "\x1b[1;32m"), ("paused", "\x1b[1;32m"), ("stalled", "\x1b[1;33m"),
    ("hung", "\x1b[1;31m"), ("silent", ""), ("no heartbeats", ""), ("of a later release", ""),
])  # fmt: skip
def test_what_is_unknown_is_not_green(state: str, color: str) -> None:
    """A job of which nothing is heard has no color, as on the page."""
    answer = AgentAnswer("n1", document={"time": 1000.0})
    (line, *_) = job_lines("run-1", [(answer, job(state=state))], Paint(color=True))
    assert line.startswith(f"run-1  {color}{state}")


def test_what_ranks_without_heartbeats_do_is_unknown(shown: Callable[..., str]) -> None:
    """Beside a rank that waits in a collective, one that reports nothing may be at work."""
    waits = (WORLD_SIZE(4, "run-1", "run-1"), HANG(0, "run-1", "collective"))
    assert "in collectives between two steps" in shown("jobs", *JOB, *waits)
    said = shown("jobs", *JOB, *waits, RANKS(3, "run-1", "run-1"))
    assert "in collectives" not in said
    assert "between two steps" in said


def test_a_node_says_what_it_does_not_see(shown: Callable[..., str]) -> None:
    """Without ranks on other nodes none is named: `status` and `jobs` say so in the same words."""
    apart = WORLD_SIZE(4, "run-1", "0"), HANG(1, "run-1", "desync"), OVERDUE(1, "run-1", "0")
    for command in ("jobs", "status"):
        said = " ".join(shown(command, *JOB, *apart, code=2).split())
        assert "ranks on other nodes are not seen from this node, so none is named" in said
        assert not re.search(r"rank \d", said)


def test_one_of_each(shown: Callable[..., str]) -> None:
    """One collector, GPU, NVLink and rank are in the singular."""
    one = LINK_UP(1, "0", "GPU-a", "0"), STEP(7, "run-1", "0"), WORLD_SIZE(1, "run-1", "0")
    said = shown("status", *one)
    assert "healthy, 1 collector OK" in said
    assert "1/1 NVLink\n" in said
    assert "1 of 1 rank here, step 7" in said
    assert not ONE_OF_MANY.search(said), said


def test_a_job_that_failed(shown: Callable[..., str]) -> None:
    """What its log tells is the state of the job, though its ranks have gone."""
    told = (
        FAILURE(1, "run-3", "cuda-oom", "3", "n7", ""),
        FAILURE(1, "run-4", "nccl-timeout", "", "", ""),
    )
    said = shown("jobs", *told)
    assert "run-3  failed" in said
    assert "failure in its log: cuda-oom on rank 3 (n7)\n" in said
    assert "failure in its log: nccl-timeout\n" in said


def test_ranks_that_are_not_listed_are_told() -> None:
    """Of 200 ranks on a node, 64 are listed."""
    many = job(ranks=[rank(rank=number) for number in range(64)], followed={"heartbeat": 200})
    *_, last = ranks([(AgentAnswer("n1"), many), (AgentAnswer("n2"), job())])
    assert last == "    and 136 ranks more on n1"
