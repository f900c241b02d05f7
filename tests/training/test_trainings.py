"""Real trainings and a real agent.

What `/metrics` says agrees with what the training itself prints.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.agents import RunningAgent, Scrape, running
from tests.training.trainings import TrainingRun, training

# Its import here would take seconds, and in each worker of the tests.
if importlib.util.find_spec("torch") is None:
    pytest.skip("takes torch", allow_module_level=True)
pytestmark = pytest.mark.timeout(600)

CONFIG = """
[collectors.training]
interval = "250ms"

[collectors.open_files]
interval = "1s"
"""
SUCCESS = "dshealthd_collector_last_success_timestamp_seconds"
FOREVER = "1000000"
"""Steps of a training that goes on until the test ends it."""
ROUNDED = 1e-5
"""Seconds by which what the log and `/metrics` say is rounded, with room."""


def deepspeed_config(**more: object) -> str:
    """Return a DeepSpeed configuration for two ranks; two micro-steps a step."""
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 16,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 1000,
    }
    return json.dumps(
        {**config, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, **more}
    )


def told(scrape: Scrape, name: str) -> dict[str, float]:
    """Return the values of a job metric by rank."""
    return {
        dict(labels)["rank"]: value
        for labels, value in scrape.series.get(f"dshealthd_job_{name}", {}).items()
    }


def reached(scrape: Scrape, step: int, ranks: int = 2) -> bool:
    """Tell whether all ranks have come to a step."""
    steps = told(scrape, "step")
    return len(steps) == ranks and min(steps.values()) >= step


def stages(scrape: Scrape) -> dict[str, str]:
    """Return the stage of each rank."""
    return {
        dict(labels)["rank"]: dict(labels)["stage"]
        for labels in scrape.series.get("dshealthd_job_stage", {})
    }


def check_agreement(agent: RunningAgent, run: TrainingRun) -> None:
    """Require that the times of steps and of their input on `/metrics` are those of the log.

    They lie between what the training's own clock said just before and just after the heartbeat, of
    which steps of them is not known: not all are measured.
    """
    scrape = agent.scrape()
    run.wait_for(int(max(told(scrape, "step").values())))
    logged = run.steps()
    seconds, inputs = told(scrape, "step_seconds"), told(scrape, "input_seconds")
    assert seconds.keys() == inputs.keys() == {str(rank) for rank in logged}
    for rank, steps in logged.items():
        # The first step's duration is not known to a heartbeat.
        least = min(step.least for step in steps[1:])
        most = max(step.most for step in steps[1:])
        assert least - ROUNDED <= seconds[str(rank)] <= most + ROUNDED
        waited = [step.input_most for step in steps if step.input_most is not None]
        assert 0.039 <= inputs[str(rank)] <= max(waited) + ROUNDED  # 40 ms or 2 x 20 ms
        assert inputs[str(rank)] < seconds[str(rank)]


def test_torchrun(tmp_path: Path) -> None:
    """A DDP training of two ranks: steps, step times, loss and job are on `/metrics`. An agent that
    is stopped, ends or starts later does not disturb it; of ranks that wait for one that stopped in
    its input it is known where each is.
    """
    stop = tmp_path / "stop"
    with contextlib.ExitStack() as trains:
        run = trains.enter_context(
            training(tmp_path, "script_ddp.py", FOREVER, variables={"STOP": str(stop)})
        )
        run.wait_for(5)  # no agent runs yet
        with running(tmp_path, CONFIG) as agent:
            agent.job = run.job()
            scrape = agent.wait(lambda scrape: reached(scrape, 5))
            ((info, value),) = scrape.series["dshealthd_job_info"].items()
            labels = dict(info)
            assert (labels["launcher"], labels["world_size"], value) == ("torchrun", "2", 1)
            os.kill(agent.pid, signal.SIGSTOP)
            before = made(run)
            run.wait_for(before + 40)  # one that waits for the agent makes none
            os.kill(agent.pid, signal.SIGCONT)
            agent.wait(lambda scrape: reached(scrape, before + 40))
            check_agreement(agent, run)
        at = made(run)
        with running(tmp_path, CONFIG) as successor:
            successor.job = run.job()
            successor.wait(lambda scrape: reached(scrape, at))
            successor.wait(lambda scrape: "dshealthd_open_files" in scrape.series)
            stop.touch()
            stopped = {"0": "backward", "1": "input"}
            rank = psutil.Process(run.pids()[1])
            successor.wait(lambda _: rank.status() == psutil.STATUS_STOPPED, 240.0)
            since = time.time()
            scrape = successor.wait(
                lambda scrape: (
                    stages(scrape) == stopped
                    and len(set(told(scrape, "step").values())) == 1
                    and (scrape.value(SUCCESS, collector="training") or 0.0) > since
                ),
                240.0,
            )
            heard = told(scrape, "heartbeat_timestamp_seconds")
            time.sleep(1.0)
            scrape = successor.scrape()
            assert stages(scrape) == stopped
            assert told(scrape, "heartbeat_timestamp_seconds") == pytest.approx(heard, abs=0.001)
            last = made(run)
            assert told(scrape, "step") == {"0": last, "1": last}
            assert told(scrape, "loss_finite") == {"0": 1, "1": 1}
            rank.resume()
            successor.wait(lambda scrape: reached(scrape, last + 2))
            trains.close()
            successor.wait(lambda scrape: "dshealthd_job_step" not in scrape.series)


def made(run: TrainingRun) -> int:
    """Return how many steps every rank of a training has made."""
    return min(map(len, run.steps().values()))


def checkpoint(scrape: Scrape, name: str) -> dict[str, float]:
    """Return the values of a metric of the job's checkpoints, by problem."""
    return {
        dict(labels).get("problem", ""): value
        for labels, value in scrape.series.get(f"dshealthd_job_checkpoint_{name}", {}).items()
    }


def test_deepspeed(tmp_path: Path) -> None:
    """A DeepSpeed training: the engine's steps, their time, norm, skipped steps and time in
    collectives, and checkpoints as pauses, of which the last is found whole.
    """
    variables = {"DS_ACCELERATOR": "cpu", "CHECKPOINTS": str(tmp_path / "saved"), "LINGER": "600"}
    config = deepspeed_config(
        bf16={"enabled": True},
        zero_optimization={"stage": 2},
        comms_logger={"enabled": True, "prof_all": True},
    )
    quick = '\n[collectors.job_checkpoint]\ninterval = "1s"\n'
    with (
        running(tmp_path, CONFIG + quick) as agent,
        training(tmp_path, "script_deepspeed.py", "40", config, variables=variables) as run,
    ):
        run.wait_for(40)
        agent.job = run.job()
        scrape = agent.wait(
            lambda scrape: reached(scrape, 40) and "missing" in checkpoint(scrape, "problems")
        )
        problems = ("missing", "empty", "cut_off", "no_directory")
        assert checkpoint(scrape, "problems") == dict.fromkeys(problems, 0)
        (size,) = checkpoint(scrape, "next_bytes").values()
        files = (tmp_path / "saved/global_step11").iterdir()
        assert size == sum(file.stat().st_size for file in files)
        check_agreement(agent, run)
        assert told(scrape, "step") == {"0": 40, "1": 40}
        assert told(scrape, "skipped_steps_total") == {"0": 0, "1": 0}
        assert told(scrape, "loss_finite") == {"0": 1, "1": 1}
        assert all(norm > 0 for norm in told(scrape, "gradient_norm").values())
        total = sum(step.most for step in run.steps()[0])
        assert all(
            0 < seconds < total for seconds in told(scrape, "communication_seconds_total").values()
        )
        assert "dshealthd_job_loss_scale" not in scrape.series  # bf16 has none
