"""A real agent, a real process with Slurm's variables and simulated GPUs: who holds them unused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.agents import RunningAgent
from tests.web.node import node

JOB = f"{os.getpid()}"
HELD = {"SLURM_JOB_ID": JOB, "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_GPUS": "0,1"}
LIMITS = "".join(
    f'[collectors.{name}]\ninterval = "1s"\n' for name in ("job_environment", "job_activity")
)
LIMITS += '[findings.limits]\nunused_seconds = "5s"\n'


def until(agent: RunningAgent, condition: Callable[[Any], object]) -> Any:
    """Return the first status for which the condition holds."""
    return waiting.until(
        lambda: status if condition(status := agent.status()) else None,
        lambda: (agent.status()["findings"], agent.status()["watched"]),
    )


def told(status: Any) -> list[str]:
    """Return which jobs hold GPUs unused, by its findings."""
    alert = "DshealthdGpusUnused"
    return [one["part"] for one in status["findings"] if one["alert"] == alert]


def test_a_batch_job_that_sleeps_until_it_computes(tmp_path: Path) -> None:
    """The owner is told what it holds, and no more once a kernel runs."""
    job = f"slurm-{JOB}"
    with node(tmp_path) as made, made.agent(LIMITS) as agent:
        command = (sys.executable, "-c", "import time; time.sleep(3600)")
        with subprocess.Popen(
            command, env=HELD, stdin=subprocess.DEVNULL, start_new_session=True
        ) as process:
            try:
                status = until(agent, lambda status: job in told(status))
                (found,) = [one for one in status["findings"] if one["part"] == job]
                assert f"{job} holds 2 GPUs on " in found["detail"]
                assert "has no process on any of them" in found["detail"]
                assert (found["severity"], found["training_job"]) == ("warning", job)
                made.nvml.set(0, "processes", f"{process.pid}:1000000")
                made.train(0)
                until(agent, lambda status: job not in told(status))
            finally:
                process.kill()


def test_a_session_with_a_terminal(tmp_path: Path) -> None:
    """A job whose process has a terminal holds what it likes, beside one that does not."""
    setsid = shutil.which("setsid")
    if setsid is None:
        pytest.skip("takes setsid of util-linux")
    own, theirs = os.openpty()
    sleep = (sys.executable, "-c", "import time; time.sleep(3600)")
    with (
        node(tmp_path) as made,
        made.agent(LIMITS) as agent,
        subprocess.Popen(
            (setsid, "--ctty", *sleep),
            env=HELD,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        ) as session,
        subprocess.Popen(
            sleep,
            env=HELD | {"SLURM_JOB_ID": f"{JOB}0"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        ) as batch,
    ):
        try:
            status = until(agent, lambda status: f"slurm-{JOB}0" in told(status))
            jobs = {
                (sample["labels"]["training_job"], sample["labels"]["terminal"])
                for sample in status["metrics"]["dshealthd_job_held_gpus"]["samples"]
            }
            assert {(f"slurm-{JOB}", "true"), (f"slurm-{JOB}0", "false")} <= jobs
            assert f"slurm-{JOB}" not in told(status)
        finally:
            session.kill()
            batch.kill()
            os.close(own)
            os.close(theirs)
