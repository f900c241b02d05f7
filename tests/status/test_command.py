"""`dshealthd status` and `dshealthd jobs` against real servers, and what they print."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from dshealthd.cli import main as cli
from dshealthd.collectors.gpu import ACTIVITY, FAULT, UP, VISIBLE
from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.collectors.gpu_processes import RANK as GPU
from dshealthd.collectors.job_activity import AWAITS, FILES, PROCESS
from dshealthd.collectors.job_environment import RANKS, WORLD_SIZE
from dshealthd.collectors.job_hang import BOUND, CULPRIT, HANG, OVERDUE, PATIENCE, PHASE_SECONDS
from dshealthd.collectors.job_logs import FAILURE
from dshealthd.collectors.kernel import UPTIME
from dshealthd.collectors.memory import AVAILABLE, TOTAL
from dshealthd.collectors.nvlink import UP as LINK_UP
from dshealthd.collectors.pressure import STALLED_RATIO
from dshealthd.collectors.training import HEARD, LOSS_FINITE, PHASE, STEP, STEP_SECONDS
from dshealthd.core.collector import Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings.idleness import IDLE
from dshealthd.http import client
from dshealthd.http.client import Client
from dshealthd.http.exchange import Request
from dshealthd.status.query import query_agents
from dshealthd.status.text import _gpus
from tests.http import impostors
from tests.singular import ONE_OF_MANY
from tests.status_documents import document, finding, job, rank
from tests.waiting import PATIENT
from tests.web.certificates import authority, certificate
from tests.web.serving import serving

HEALTHY = (UP(1, "0", "GPU-a"), VISIBLE(1), EXPECTED(1), UPTIME(1e6))
JOB = (
    STEP(1246, "run-1", "0"),
    STEP(1245, "run-1", "1"),
    STEP_SECONDS(5.0, "run-1", "0"),
    STEP_SECONDS(5.0, "run-1", "1"),
    LOSS_FINITE(1, "run-1", "0"),
)
HUNG = (
    *JOB,
    HANG(1, "run-1", "input"),
    CULPRIT(1, "run-1", "1", "input", "input"),
    OVERDUE(90, "run-1", "0"),
    OVERDUE(120, "run-1", "1"),
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give agents the time to answer, on a busy machine too."""
    monkeypatch.setattr(client, "TIMEOUT", 60.0)


def snapshot(*samples: Sample) -> Snapshot:
    """Return what an agent has that collected these samples."""
    made = Snapshot(time.monotonic, time.time)
    made.expect("gpu", 3600)
    made.put("gpu", CollectionResult(CollectionOutcome.OK, samples))
    return made


def run(*arguments: str) -> int:
    """Run the command line."""
    return cli.main(list(arguments))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command on an agent with more samples, and returns its
    output.
    """

    def of(command: str, *samples: Sample, code: int = 0) -> str:
        with serving(snapshot(*HEALTHY, *samples)) as served:
            assert run(command, f"127.0.0.1:{served.port}") == code
        return capsys.readouterr().out

    return of


@pytest.mark.parametrize(
    ("samples", "code", "words"),
    [
        (HEALTHY, 0, "OK  healthy, 1 collector OK"),
        (
            (*HEALTHY, AVAILABLE(1e9), TOTAL(1e11), STALLED_RATIO(0.9, "memory", "some")),
            1,
            "WARNING  1 problem found",
        ),
        ((*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost")), 2, "CRITICAL  1 problem found"),
        ((*HEALTHY, *HUNG), 2, "CRITICAL  1 problem found"),
    ],
)
def test_exit_status_is_the_verdict(
    samples: tuple[Sample, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict is exit status and first line, asked on the configured address or by name."""
    with serving(snapshot(*samples)) as served:
        for arguments in (
            ("status", "--web.listen-address", f"127.0.0.1:{served.port}"),
            ("status", f"127.0.0.1:{served.port}"),
        ):
            assert run(*arguments) == code
            assert words in capsys.readouterr().out.splitlines()[0]


def test_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    """An agent that has not looked yet, or does not answer, is unknown, with the reason."""
    made = Snapshot(time.monotonic, time.time)
    made.expect("gpu", 3600)
    with serving(made) as served:
        assert run("status", f"127.0.0.1:{served.port}") == 3
        assert "UNKNOWN  1 source not readable" in capsys.readouterr().out
    with impostors.nobody() as port:
        assert run("status", f"127.0.0.1:{port}") == 3
    said = capsys.readouterr().out
    assert f"UNKNOWN  http://127.0.0.1:{port} does not answer: " in said
    assert "refused" in said


def test_worst_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    """The worst node comes first and makes the exit status; no answer is worse than a well node."""
    with (
        serving(snapshot(*HEALTHY)) as well,
        serving(snapshot(*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost"))) as ill,
    ):
        names = [f"127.0.0.1:{served.port}" for served in (well, ill)]
        assert run("status", *names) == 2
        said = capsys.readouterr().out
        assert said.index("CRITICAL") < said.index("OK  healthy")
        assert run("status", names[0], "127.0.0.1:1") == 3


def test_a_finding_leads_on(capsys: pytest.CaptureFixture[str]) -> None:
    """A finding is printed with its part, its first step and a runbook that the agent serves."""
    with serving(snapshot(*HEALTHY, FAULT(1, "3", "GPU-d", "gpu_lost"))) as served:
        run("status", f"127.0.0.1:{served.port}")
        said = capsys.readouterr().out
        assert "GPU 3: A GPU is lost to the driver" in said
        assert "First step: drain n1 and reboot it" in said
        (runbook,) = (line.split()[1] for line in said.splitlines() if "Runbook: " in line)
        assert runbook == f"http://127.0.0.1:{served.port}/runbooks/gpu-lost"
        asked = Request(host="127.0.0.1", port=served.port, path="/")
        assert b"## Remedy" in Client(asked).get("/runbooks/gpu-lost")


def test_a_finding_with_its_trend(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside its age stands whether it rises; an agent of an earlier release says nothing of it."""
    now = time.time()
    hot = finding(severity="warning", since=now - 720)
    rising = hot | {"part": "GPU 4", "trend": "core temperature rising 3 K/min"}
    more = {"time": now, "verdict": "warning", "findings": [hot, rising]}
    with serving(snapshot(*HEALTHY), more=more) as served:
        assert run("status", f"127.0.0.1:{served.port}") == 1
    said = capsys.readouterr().out
    assert "GPU 3: A GPU fell off the bus (for 12 min)" in said
    assert "GPU 4: A GPU fell off the bus (for 12 min, core temperature rising 3 K/min)" in said


def test_a_sign_that_is_no_finding_yet_is_watched(capsys: pytest.CaptureFixture[str]) -> None:
    """A port that is down for 12 s of 30 is told with both, and leaves the exit status alone."""
    down = {"part": "mlx5_1/1", "summary": "A fabric port is down", "hold_seconds": 30.0}
    made = snapshot(*HEALTHY)
    now = time.time()
    watched = [finding(**{**down, "part": part}, since=now - 12) for part in ("mlx5_1/1", "")]
    more = {"time": now, "watched": watched}
    with serving(made, more=more) as served:
        assert run("status", f"127.0.0.1:{served.port}") == 0
        said = capsys.readouterr().out
        assert "OK  healthy so far, 1 collector OK" in said
        for part in ("mlx5_1/1", "this node"):
            sign = f"watched   {part}: A fabric port is down (for 12 s; a finding after 30 s)"
            assert sign in said
        assert run("status", "--json", f"127.0.0.1:{served.port}") == 0
    (node,) = json.loads(capsys.readouterr().out)["nodes"]
    assert (node["verdict"], node["watched"][0]["part"]) == ("ok", "mlx5_1/1")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` is one document with a version, and has the same exit status."""
    with serving(snapshot(*HEALTHY, *HUNG)) as served:
        assert run("status", "--json", f"127.0.0.1:{served.port}", "127.0.0.1:1") == 2
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (printed["schema"], printed["verdict"]) == (1, "critical")
    node, gone = printed["nodes"]
    assert [finding["alert"] for finding in node["findings"]] == ["DshealthdJobHang"]
    assert (gone["verdict"], gone["findings"]) == ("unknown", None)
    assert "refused" in gone["error"]


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
    assert "rank 1 of run-1" in shown("status", *held, code=1)


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
        *(HEARD(time.time() - 60, "run-1", rank) for rank in "01"),
        BOUND(100, "run-1", "0"),
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
    idle = "no rank here has used CPU or GPU for 12 min\n"
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
    with contextlib.ExitStack() as stack:
        ports = [
            stack.enter_context(
                impostors.serving(impostors.saying(json.dumps(document(node=node, jobs=[one]))))
            )
            for node, one in told.items()
        ]
        assert run("jobs", *(f"http://127.0.0.1:{port}/" for port in ports)) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        assert (
            "rank 3 on n2 (stage 0) takes 1.50 times as long as its peers; "
            "the job does not wait for it: other ranks have more to do" in lines
        )
        assert (
            "rank 3 on n2 (stage 1) takes 1.30 times as long as its peers; "
            "up to 15% of the job's throughput is lost" in lines
        )
        run("jobs", f"127.0.0.1:{ports[1]}")
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
        with contextlib.ExitStack() as stack:
            ports = [
                stack.enter_context(
                    impostors.serving(impostors.saying(json.dumps(document(node=node, jobs=[one]))))
                )
                for node, one in told.items()
            ]
            code = run("jobs", *(f"127.0.0.1:{port}" for port in ports))
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
        answer = impostors.saying(json.dumps(document(ready=False, jobs=jobs)))
        with impostors.serving(answer) as port:
            assert run("jobs", f"127.0.0.1:{port}") == code
        said = capsys.readouterr().out
        assert text in said
        assert "no training jobs" not in said


def test_one_job_of_two_is_hung(capsys: pytest.CaptureFixture[str]) -> None:
    """It makes the exit status, which is unknown where one agent of two has not judged yet."""
    hang = {"cause": "process", "overdue_seconds": 60.0, "culprits": [], "says": "hung"}
    hung, well = job(state="hung", hang=hang), job(job="run-2")
    for first, code in ((document(jobs=[well, hung]), 2), (document(ready=False), 3)):
        with (
            impostors.serving(impostors.saying(json.dumps(first))) as one,
            impostors.serving(impostors.saying(json.dumps(document(jobs=[well])))) as other,
        ):
            assert run("jobs", f"127.0.0.1:{one}", f"127.0.0.1:{other}") == code
        said = capsys.readouterr().out
        assert said.index("run-2  training") >= said.find("run-1  hung")
        assert (code == 2) is ("run-1  hung" in said)


def test_what_an_agent_left_out_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that could not be shown may be hung: none is said to be well."""
    lacking = [{"part": "job \x1b[2J", "reason": "ValueError: odd"}]
    for command, code in (("status", 0), ("jobs", 3)):
        answer = impostors.saying(json.dumps(document(left_out=lacking)))
        with impostors.serving(answer) as port:
            assert run(command, f"127.0.0.1:{port}") == code
        assert r"job \u001b[2J: ValueError: odd" in capsys.readouterr().out


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


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """What is no node, and a file that is not there, is said in one line."""
    assert run("status", "https://n1/") == 3  # without TLS here
    assert "UNKNOWN  https://n1/ is not a node: give NODE" in capsys.readouterr().out
    assert run("status", "--user", "x", "--password-file", "/nonexistent", "n1") == 3
    assert "/nonexistent" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "jobs"])
def test_terminals_are_not_commanded_by_an_answer(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text of an answer reaches the terminal as it is: an agent may be anybody's."""
    evil = "\x1b]0;owned\x07\x1b[2J"
    culprit = {"rank": 0, "reason": evil, "says": evil}
    hang = {"cause": evil, "says": evil, "overdue_seconds": 1, "culprits": [culprit]}
    failures = [{"slug": evil, "rank": 1, "node": evil}]
    ranks = [rank(phase=evil, stage=evil, process=evil, gpu=evil)]
    texts = dict.fromkeys(("job", "loss", "state", "evidence"), evil)
    found = finding(
        **dict.fromkeys(("part", "summary", "detail", "first_step", "runbook", "reason"), evil)
    )
    told = document(
        node=evil,
        verdict="critical",
        findings=[found],
        jobs=[job(hang=hang, failures=failures, ranks=ranks, **texts)],
    )
    with impostors.serving(impostors.saying(json.dumps(told))) as port:
        assert run(command, f"127.0.0.1:{port}") == 2
    said = capsys.readouterr()
    assert said.out.count("owned") > 5
    assert "\x1b" not in said.out + said.err


@pytest.mark.parametrize("command", ["status", "jobs"])
def test_60_a_wrong_agent_does_not_end_a_list(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Agents that answer nonsense or too slowly are unknown, status 3; the others are shown."""
    monkeypatch.setattr(client, "TIMEOUT", 10.0)

    def drip(connection: socket.socket, _: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.1)

    deep = b'{"schema":1,"x":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    answers = (
        impostors.saying(json.dumps(document(verdict="critical", findings=[{}]))),
        impostors.saying(json.dumps(document(jobs=None))),
        impostors.saying(deep),
        drip,
    )
    with contextlib.ExitStack() as stack:
        wrong = [stack.enter_context(impostors.serving(one)) for one in answers]
        good = impostors.saying(json.dumps(document(node="n9", jobs=[job()])))
        ports = [*wrong, stack.enter_context(impostors.serving(good))]
        assert run(command, "not/a/node", "n..x", *(f"127.0.0.1:{port}" for port in ports)) == 3
        for port in wrong:
            assert run(command, "--json", f"127.0.0.1:{port}") == 3
    said = capsys.readouterr().out
    assert "run-1  training" in said
    assert "not/a/node is not a node" in said
    assert all(f"127.0.0.1:{port}" in said for port in wrong)


def test_password_and_tls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An agent with TLS and a password is asked with both; what is missing is told."""
    authority(tmp_path, "ca")
    certificate(tmp_path, "server", "ca", "IP:127.0.0.1")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
    config = tmp_path / "web.yml"
    config.write_text(
        f"tls_server_config: {{cert_file: server.pem, key_file: server.key}}\n"
        f"basic_auth_users: {{prometheus: '{hashed}'}}\n"
    )
    password = tmp_path / "password"
    password.write_text("secret\n")
    known = ("--user", "prometheus", "--password-file", str(password))
    with serving(snapshot(*HEALTHY), config_file=config) as served:
        address = f"127.0.0.1:{served.port}"
        own = ("--web.listen-address", address, "--web.config-file", str(config))
        assert run("status", address, "--ca-file", str(tmp_path / "ca.pem"), *known) == 0
        assert run("status", *own, *known) == 0
        capsys.readouterr()
        assert run("status", *own) == 3
        assert "401 Unauthorized (--user and --password-file)" in capsys.readouterr().out
        assert run("status", address, "--tls", *known) == 3
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out


def test_members(capsys: pytest.CaptureFixture[str]) -> None:
    """`--members` asks all nodes that the agent probes; where it probes none, it says so."""
    made = snapshot(*HEALTHY, FAULT(1, "0", "GPU-a", "gpu_lost"))

    def both() -> bytes:
        return json.dumps([{"targets": [f"127.0.0.1:{served.port}", "127.0.0.1:1"]}]).encode()

    with serving(made, targets=both) as served:
        assert run("status", "--members", "--web.listen-address", f"127.0.0.1:{served.port}") == 2
    said = capsys.readouterr().out
    assert "CRITICAL" in said
    assert "127.0.0.1:1  UNKNOWN" in said
    with serving(snapshot(*HEALTHY)) as served:
        assert run("status", "--members", "--web.listen-address", f"127.0.0.1:{served.port}") == 3
    assert "/api/v1/targets: 404" in capsys.readouterr().err


@contextlib.contextmanager
def listing(*targets: str) -> Iterator[tuple[int, list[bytes]]]:
    """Run an agent that lists these members and itself is well; yield its port and requests."""
    requests: list[bytes] = []

    def talk(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        told: Any = document()
        if impostors.path(request) == "/api/v1/targets":
            told = [{"targets": targets}]
        impostors.saying(json.dumps(told))(connection, request)

    with impostors.serving(talk) as port:
        yield port, requests


def test_59_members_that_an_agent_lists_get_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An address that an answer names is asked without credentials; a bad one ends nothing."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    known = ("--user", "x", "--password-file", str(password))
    requests: list[bytes] = []

    def guarded(connection: socket.socket, request: bytes) -> None:
        requests.append(request)
        impostors.saying("", "401 Unauthorized")(connection, request)

    with (
        impostors.serving(guarded) as port,
        listing("a/b", "\x1b[2J", "n:99999999", f"127.0.0.1:{port}") as (own, asked),
    ):
        assert run("status", "--members", *known, "--web.listen-address", f"127.0.0.1:{own}") == 3
    said = capsys.readouterr().out
    assert "a/b is not a node" in said
    assert "401 Unauthorized (a password is not sent to members that only an agent names" in said
    assert "\x1b" not in said
    assert [b"Authorization" in one for one in (*asked, *requests)] == [True, False]


def test_members_of_the_configuration_get_the_password(tmp_path: Path) -> None:
    """Members that the configuration names are asked with it, and no agent is asked for a list."""
    password = tmp_path / "password"
    password.write_text("secret\n")
    with listing() as (port, requests):
        file = tmp_path / "dshealthd.toml"
        file.write_text(
            f'[web]\nlisten_address = ":{port}"\n[probe.members]\nnodes = ["127.0.0.1"]\n'
        )
        known = ("--user", "x", "--password-file", str(password))
        assert run("status", "--members", "--config.file", str(file), *known) == 0
    (request,) = requests
    assert b"Authorization" in request


def test_members_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A hostfile that is not there is said in one line."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(f'[probe.members]\nhostfile = "{tmp_path}/none"\n')
    assert run("status", "--members", "--config.file", str(file)) == 3
    assert f"{tmp_path}/none" in capsys.readouterr().err


def test_many_agents_are_queried_at_once() -> None:
    """Thirty-two, as each takes a thread that waits."""
    agents = [(f"n{number}", Client(Request(host="", port=1, path="/"))) for number in range(64)]
    waiting: list[Client] = []
    seen: list[int] = []
    all_wait = threading.Barrier(32)

    def get(agent: Client) -> Mapping[str, Any]:
        waiting.append(agent)
        all_wait.wait(PATIENT)
        seen.append(len(waiting))
        waiting.remove(agent)
        return {"node": ""}

    assert [one.name for one in query_agents(agents, get)] == [name for name, _ in agents]
    assert max(seen) == 32


def test_gpus_are_in_the_order_of_their_numbers() -> None:
    """Whatever an agent calls them."""
    labels = [{"gpu": gpu} for gpu in ("10", "9", "9" * 5000, "x", "2")]
    samples = [{"labels": of_gpu, "value": 0} for of_gpu in labels]
    lines = [*_gpus({"metrics": {"dshealthd_gpu_up": {"samples": samples}}})]
    assert [line.split()[1][:3] for line in lines] == ["2", "9", "x", "10", "999"]
