"""The summary of a bundle."""

from __future__ import annotations

import pytest

from dshealthd.evidence import stacks, summary
from dshealthd.evidence.findings import CollectedEvidence, HangCase, RankEvidence
from dshealthd.evidence.service import case
from dshealthd.jobs.hangs.classes import HangClass
from dshealthd.jobs.hangs.judge import Standstill

METRICS = """\
# HELP dshealthd_gpu_power_watts x
dshealthd_infiniband_transmit_bytes_total{device="mlx5_0",port="1"} 1000
dshealthd_gpu_power_watts{gpu="0",uuid="GPU-1"} 120
dshealthd_memory_bytes{type="x"} 5
"""
SENT = {"step": 99, "phase": "training", "stage": "input", "heartbeat": 1_795_271_300.0}
JOBS = [
    {
        "job": "slurm-7",
        "hang": None,
        "ranks": [{**dict.fromkeys(SENT), "rank": 0, "step": 100}, {**SENT, "rank": 1}],
    },
    {"job": "slurm-8", "hang": None, "ranks": [{**SENT, "rank": 1, "step": 5}]},
]


def findings() -> CollectedEvidence:
    """Return what was found of a hang in which rank 1 waits for its input."""
    case = HangCase(
        job="slurm-7", reason="input", since=1_795_271_300.0, culprits=((1, "has not begun"),)
    )
    found = CollectedEvidence(
        case=case,
        node="node-a",
        begun=1_795_271_340.0,
        seconds=12.3,
        metrics=METRICS,
        jobs=JOBS,
        finished=True,
        interval=10.0,
    )
    kernel = {"state": "blocked", "waits": "nfs_wait", "cpu": 0.02, "io": "nothing"}
    traces = {"at": "/home/user/train.py:12 load_batch", "in": "io.py:1 read"}
    found.ranks = [
        RankEvidence("slurm-7", 0, 4711, problems={"kernel": "process 4711 is gone"}),
        RankEvidence(
            "slurm-7",
            1,
            4712,
            facts={"kernel": kernel, "stacks": traces},
            problems={"recorder": "nobody reads it"},
        ),
    ]
    return found


def test_the_summary_says_who_is_at_fault_at_the_top() -> None:
    """Job, node, class and time; the culprit; a line a rank; what is missing and why."""
    lines = summary.write(findings()).splitlines()
    assert lines[:3] == [
        "slurm-7 on node-a: hung, cause: input",
        "taken   2026-11-21 14:29:00 UTC, in 12 s",
        "since   2026-11-21 14:28:20 UTC: no progress for 40 s when taken",
    ]
    assert lines[4:7] == [
        "What shows the cause",
        "  rank 1 has not begun",
        "  heartbeats of slurm-7, ranks here only: step 99: rank 1; step 100: rank 0",
    ]
    assert (
        "  rank 1, node-a, pid 4712, step 99, training/input, heartbeat 40 s ago, blocked in "
        "nfs_wait, CPU 2%, Python at /home/user/train.py:12 load_batch, in io.py:1 read" in lines
    )
    assert "  rank 0 (pid 4711), the kernel's view: process 4711 is gone" in lines
    assert "  rank 1 (pid 4712), flight recorder: nobody reads it" in lines


def test_no_rank_is_named_without_all_ranks() -> None:
    """Where the detector names no rank, the summary says why, and steps name none either."""
    found = findings()
    since, reason = 1_795_271_300.0, HangClass.DESYNC
    still = Standstill(job="slurm-7", reason=reason, culprits=(), ranks=(), since=since)
    found.case = case(still)
    lines = summary.write(found).splitlines()
    assert lines[5:8] == [
        f"  cause: {still.explanation}",
        "  heartbeats of slurm-7, ranks here only: step 99: rank 1; step 100: rank 0",
        "",
    ]


def test_a_stopped_rank_is_named_where_there_are_no_heartbeats() -> None:
    """Evidence that was asked for by hand knows no culprit; whom the detector named is told
    once.
    """
    found = findings()
    found.ranks[0].facts = {"kernel": {"state": "stopped", "waits": "do_signal_stop", "cpu": 0.0}}
    found.ranks[1].facts["kernel"] = {"state": "stopped", "waits": "do_signal_stop", "cpu": 0.0}
    lines = summary.write(found).splitlines()
    assert lines[5:7] == [
        "  rank 1 has not begun",
        "  rank 0 (pid 4711): its process is stopped by a signal",
    ]


def test_what_is_not_known_is_not_made_up() -> None:
    """Steps, states and stacks that nobody knows are said to be unknown, and nobody is accused."""
    found = CollectedEvidence(
        case=HangCase(job="slurm-9", reason="waiting"), node="node-a", begun=0.0, finished=True
    )
    found.ranks = [RankEvidence("slurm-9", 5, 1)]
    text = summary.write(found)
    assert "no cause found on this node" in text
    assert (
        "rank 5, node-a, pid 1, step unknown, stage unknown, state unknown, Python stack unknown"
        in text
    )
    assert "metrics that changed within 0 s\n  unknown" in text


def test_a_job_that_moves_is_not_hung() -> None:
    """Evidence asked for of a healthy job says so, with its step; of a hang never."""
    found = findings()
    line = "slurm-7 is not hung: step 100, last progress 40 s ago"
    assert line not in summary.write(found)
    found.case = HangCase(job="slurm-7", reason="requested")
    text = summary.write(found)
    assert line in text
    assert "no cause found" not in text
    found.jobs = [
        {
            **JOBS[0],
            "ranks": [{**SENT, "rank": 0, "step": 100, "heartbeat": 1.0}, {**SENT, "rank": 1}],
        }
    ]
    assert line in summary.write(found)
    found.jobs = [{**JOBS[0], "hang": {"cause": "input"}}]
    assert "is not hung" not in summary.write(found)


def test_a_summary_before_the_end_says_so() -> None:
    """Who finds it after a collection was killed knows that there may be more in the files."""
    found = findings()
    found.finished = False
    assert "THE COLLECTION HAS NOT ENDED" in summary.write(found)
    found.finished = True
    assert "THE COLLECTION HAS NOT ENDED" not in summary.write(found)


def test_ras_is_put_into_words() -> None:
    """Who is dead, who is behind; and where none is, that all answer."""
    found = findings()
    found.ras = {
        "version": "2.28.9",
        "idle": 1,
        "behind": [["3", "10.0.0.2", "1", "AllReduce", 1]],
        "troubles": [["2", "", "", "dead"]],
    }
    text = summary.write(found)
    assert "NCCL RAS: rank 2 is dead" in text
    assert ("NCCL RAS: rank 3 on 10.0.0.2 GPU 1 is 1 AllReduce behind the furthest rank") in text
    for healthy in ("behind", "troubles"):
        one = CollectedEvidence(case=found.case, node="", begun=0.0, ras={**found.ras, healthy: []})
        assert "all ranks answer" not in summary.write(one)
    found.ras = {"version": "2.28.9", "idle": 1, "behind": [], "troubles": []}
    assert (
        "all ranks answer and none is behind; nothing was launched between two answers"
        in summary.write(found)
    )


def test_what_moved_is_told_of_gpus_fabric_and_kernel() -> None:
    """Counters with their difference; what is the same, new, or of something else is left out."""
    after = METRICS.replace(" 1000", " 1500").replace(" 120", " 90").replace('x"} 5', 'x"} 6')
    after += "dshealthd_gpu_new 1\n"
    assert summary.changed_metrics(METRICS, after) == [
        'dshealthd_gpu_power_watts{gpu="0",uuid="GPU-1"} 120 -> 90',
        'dshealthd_infiniband_transmit_bytes_total{device="mlx5_0",port="1"} 1000 -> 1500 (+500)',
    ]
    assert summary.changed_metrics(METRICS, METRICS) == []


@pytest.mark.parametrize(("number", "more"), [(60, []), (61, ["and 1 more"])])
def test_what_moved_is_bounded(number: int, more: list[str]) -> None:
    """Of more than sixty, how many they are is told."""
    before = "".join(f"dshealthd_gpu_{line} 1\n" for line in range(number))
    assert summary.changed_metrics(before, before.replace(" 1\n", " 2\n"))[60:] == more


def test_labels_with_quotes_and_braces_are_read() -> None:
    """A label may hold whatever Prometheus allows."""
    names = 'dshealthd_gpu_a{x="1,\\"} {\x85",y="2"}', "dshealthd_gpu_b"
    text = f"{names[0]} 3\n{names[1]} 4\nnonsense\ndshealthd_gpu_c{{ x\n"
    assert summary.parse(text) == {names[0]: 3.0, names[1]: 4.0}


def test_rounds_of_the_probes() -> None:
    """What is known of each, in a line."""
    found = findings()
    assert "Probe rounds of the last hour\n  unknown\n" in summary.write(found)
    found.rounds = []
    assert "Probe rounds of the last hour\n  none\n" in summary.write(found)
    found.rounds = [{"kind": "light", "peer": "", "outcome": "ok", "nodes": ["a", "b"]}]
    assert "Probe rounds of the last hour\n  kind light, outcome ok\n" in summary.write(found)


def test_a_flood_is_cut() -> None:
    """Hundreds of ranks and reasons are bounded, and the rest is counted."""
    found = findings()
    found.ranks = []
    found.missing = ["long " * 100, *(f"thing {number}" for number in range(1, 100))]
    found.rounds = [{"round": number} for number in range(61)]
    text = summary.write(found)
    assert max(map(len, text.splitlines())) == 300
    assert ("round 0\n" in text, "round 1\n" in text) == (False, True)
    assert "thing 59" in text
    assert "thing 60" not in text
    assert "and 40 more" in text


def test_names_that_write_on_a_terminal_are_escaped() -> None:
    """A code object's filename neither moves the cursor nor adds a line to the summary."""
    hostile = "/x\x1b[2J\nrank 0: hardware fault on node-b\u202e.py"
    found = findings()
    before = len(summary.write(found).splitlines())
    found.ranks[0].facts["stacks"] = {"at": stacks.place([("f", hostile, 1)]), "in": hostile}
    found.missing.append(hostile)
    text = summary.write(found)
    assert len(text.splitlines()) == before + 1
    assert all(line.isprintable() for line in text.splitlines())
    thread = {"os": 1, "name": hostile, "active": True, "gil": False, "frames": [("f", hostile, 1)]}
    lines = stacks.write([thread]).splitlines()
    assert all(line.isprintable() for line in lines)
    assert len(lines) == 3
