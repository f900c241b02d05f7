"""Evidence of real trainings: taken by a running agent when a rank is stopped, and by hand where a
rank has not entered a collective.
"""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from tests.agents import running
from tests.command_line import dshealthd
from tests.training.trainings import training
from tests.waiting import until

HERE = os.path.dirname(__file__)
CONFIG = """
[collectors.training]
interval = "200ms"
[collectors.job_hang]
interval = "200ms"
floor = "2s"
[evidence]
after = "1s"
min_free_bytes = 0
"""


def test_a_rank_that_is_stopped_is_named_by_its_bundle(tmp_path: Path) -> None:
    """One bundle appears, whose summary names the stopped rank, with the stacks of both."""
    (tmp_path / "training").mkdir()
    with (
        running(tmp_path, CONFIG) as agent,
        training(tmp_path / "training", "script_ddp.py", "100000", variables={}) as run,
    ):
        run.wait_for(30)
        agent.job = run.job()
        agent.wait(lambda scrape: len(scrape.all("dshealthd_job_step")) == 2)
        pids = run.pids()
        os.kill(pids[1], signal.SIGSTOP)
        scrape = agent.wait(
            lambda scrape: scrape.series.get("dshealthd_evidence_bundle_info"), 60.0
        )
        (info,) = scrape.series["dshealthd_evidence_bundle_info"]
        name = dict(info)["bundle"]
        assert name in agent.status()["evidence"]["bundles"]
        bundle = tmp_path / "state/evidence" / name
        summary = (bundle / "summary.txt").read_text(encoding="utf-8")
        assert "hung, cause: process" in summary
        assert re.search(
            r"What shows the cause\n  cause: a rank's process .*\n  rank 1 is stopped ", summary
        ), summary
        assert re.search(
            rf"\n  rank 1, \S+, pid {pids[1]}, step \d+, training\S*, heartbeat \d+ s ago, stopped",
            summary,
        ), summary
        assert re.search(
            (
                rf"\n  rank 0, \S+, pid {pids[0]}, step \d+, training\S*, heartbeat \d+ s ago, "
                r"sleeping"
            ),
            summary,
        ), summary
        assert "metrics that changed within 10 s" in summary
        assert len(re.findall(r"Python at \S+script_ddp.py:", summary)) == 2, summary
        for rank in (0, 1):
            assert "script_ddp.py" in (bundle / f"rank-{rank}-{pids[rank]}.stacks.txt").read_text(
                encoding="utf-8"
            )
        done = dshealthd(
            *("evidence", "--job", dict(info)["training_job"], "--evidence.min-free-bytes", "0"),
            *("--path.state", str(tmp_path / "state")),
            *("--web.listen-address", f"127.0.0.1:{agent.port}"),
        )
        assert done.returncode == 0, done.stderr
        assert "unreachable" not in done.stderr, done.stderr
        assert "requested by hand" in done.stdout
        assert re.search(
            rf"\n  rank 1, \S+, pid {pids[1]}, step \d+, training\S*, heartbeat \d+ s ago, stopped",
            done.stdout,
        ), done.stdout
        assert "agent unreachable" not in done.stderr
        assert "metrics: no data from the agent" not in done.stdout
        (by_hand,) = set(bundle.parent.iterdir()) - {bundle}
        before, after = (by_hand / f"metrics-{when}.prom" for when in ("before", "after"))
        assert before.read_text() != after.read_text()  # its own requests are counted in them


def test_evidence_by_hand_names_the_rank_that_has_not_entered(tmp_path: Path) -> None:
    """Without an agent the flight recorders alone tell which rank is behind, and where."""
    state = tmp_path / "state"
    state.mkdir()
    prefixes = {
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/fr_",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/dump_",
    }
    number = f"99{os.getpid()}"  # of no other training on this machine
    variables = {"SLURM_JOB_ID": number, "TORCH_FR_BUFFER_SIZE": "100", **prefixes}
    command = "evidence", "--path.state", str(state), "--web.listen-address", "127.0.0.1:1"
    with training(tmp_path, f"{HERE}/script_hang.py", variables=variables) as run:
        until(lambda: not (run.text().count("hangs") < 2), run.text)
        unknown = dshealthd(*command, "--job", "slurm-none")
        assert unknown.returncode == 1
        assert re.match(
            rf"no job slurm-none on this node; jobs here: .*\bslurm-{number}\b", unknown.stderr
        ), unknown.stderr
        done = dshealthd(*command, "--job", f"slurm-{number}")
        assert run.process.poll() is None
    assert done.returncode == 0, done.stderr
    assert (
        "agent unreachable: http://127.0.0.1:1 does not answer: Connection refused" in done.stderr
    )
    assert re.search(
        (
            r"rank 1 never entered all_reduce #4 of the default_pg \(called at "
            r"\S+script_hang.py:\d+ <module>\); last enqueued: #3"
        ),
        done.stdout,
    ), done.stdout
    assert re.search(r"rank 1, .* Python at \S+script_hang.py:\d+ wait_for_input", done.stdout), (
        done.stdout
    )
    (bundle,) = (state / "evidence").iterdir()
    assert done.stdout.endswith(f"complete: {bundle}\n")
    digest = json.loads(
        next(bundle.glob("rank-1-*.flight-recorder.json")).read_text(encoding="utf-8")
    )
    assert digest["groups"][0]["entered"] == 3


def test_evidence_of_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    """On a node without trainings no bundle is made."""
    (tmp_path / "proc").mkdir()
    own = "--path.state", str(tmp_path), "--path.procfs", str(tmp_path / "proc")
    done = dshealthd("evidence", *own)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("no training process on this node")
    assert not (tmp_path / "evidence").exists()
