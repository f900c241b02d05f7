"""Real trainings and a real agent.

What `/metrics` says agrees with what the training itself prints.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.agents import RunningAgent, Scrape, running
from tests.training.trainings import Step, TrainingRun, training

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


def check_agreement(agent: RunningAgent, logged: dict[int, list[Step]]) -> None:
    """Require that the times of steps and of their input on `/metrics` are those of the log.

    They lie between what the training's own clock said just before and just after the heartbeat, of
    which steps of them is not known: not all are measured.
    """
    scrape = agent.scrape()
    seconds, inputs = told(scrape, "step_seconds"), told(scrape, "input_seconds")
    assert seconds.keys() == inputs.keys() == {str(rank) for rank in logged}
    for rank, steps in logged.items():
        # The first step's duration is not known to a heartbeat.
        least = min(step.least for step in steps[1:])
        most = max(step.most for step in steps[1:])
        assert least - ROUNDED <= seconds[str(rank)] <= most + ROUNDED
        waited = [step.input_most for step in steps if step.input_most is not None]
        assert 0.039 <= inputs[str(rank)] <= max(waited) + ROUNDED  # 40 ms or 2 x 20 ms


def test_torchrun(tmp_path: Path) -> None:
    """A DDP training of two ranks: steps, step times, loss and job are on `/metrics`."""
    variables = {"LINGER": "600"}
    with running(tmp_path, CONFIG) as agent:
        with training(tmp_path, "script_ddp.py", "60", variables=variables) as run:
            run.wait_for(60)
            agent.job = run.job()
            scrape = agent.wait(lambda scrape: reached(scrape, 60))
            check_agreement(agent, run.steps())
            assert told(scrape, "step") == {"0": 60, "1": 60}
            assert told(scrape, "loss_finite") == {"0": 1, "1": 1}
            means, inputs = (told(scrape, name) for name in ("step_seconds", "input_seconds"))
            assert all(0 <= inputs[rank] < means[rank] for rank in ("0", "1"))
            assert stages(scrape) == {"0": "input", "1": "input"}
            ((info, value),) = scrape.series["dshealthd_job_info"].items()
            labels = dict(info)
            assert (labels["launcher"], labels["world_size"], value) == ("torchrun", "2", 1)
            agent.wait(lambda scrape: "dshealthd_open_files" in scrape.series)
        agent.wait(lambda scrape: "dshealthd_job_step" not in scrape.series)


def test_rank_that_stops(tmp_path: Path) -> None:
    """Of ranks that wait for one that was stopped in its input it is known where each is."""
    variables = {"STOP": "1:20"}
    with (
        running(tmp_path, CONFIG) as agent,
        training(tmp_path, "script_ddp.py", FOREVER, variables=variables) as run,
    ):
        run.wait_for(5)
        agent.job = run.job()
        scrape = agent.wait(
            lambda scrape: (
                reached(scrape, 20) and stages(scrape) == {"0": "backward", "1": "input"}
            ),
            240.0,
        )
        before = told(scrape, "heartbeat_timestamp_seconds")
        time.sleep(1.0)
        scrape = agent.scrape()
        assert stages(scrape) == {"0": "backward", "1": "input"}
        assert told(scrape, "heartbeat_timestamp_seconds") == pytest.approx(before, abs=0.001)
        os.kill(run.pids()[1], signal.SIGCONT)
        agent.wait(lambda scrape: reached(scrape, 22))


def test_agent_that_stops_and_ends(tmp_path: Path) -> None:
    """A stopped agent and one that ends do not disturb a training."""
    with training(tmp_path, "script_ddp.py", FOREVER, variables={}) as run:
        run.wait_for(5)  # no agent runs yet
        with running(tmp_path, CONFIG) as agent:
            agent.job = run.job()
            agent.wait(lambda scrape: reached(scrape, 5))
            os.kill(agent.pid, signal.SIGSTOP)
            before = made(run)
            run.wait_for(before + 40)  # one that waits for the agent makes none
            os.kill(agent.pid, signal.SIGCONT)
            agent.wait(lambda scrape: reached(scrape, before + 40))
        at = made(run)
        with running(tmp_path, CONFIG) as successor:
            successor.job = run.job()
            successor.wait(lambda scrape: reached(scrape, at))


def made(run: TrainingRun) -> int:
    """Return how many steps every rank of a training has made."""
    return min(map(len, run.steps().values()))


def checkpoint(scrape: Scrape, name: str) -> dict[str, float]:
    """Return the values of a metric of the job's checkpoints, by problem."""
    return {
        dict(labels).get("problem", ""): value
        for labels, value in scrape.series.get(f"dshealthd_job_checkpoint_{name}", {}).items()
    }


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed(tmp_path: Path, stage: int) -> None:
    """A DeepSpeed training: the engine's steps, their time, norm, skipped steps and time in
    collectives, and checkpoints as pauses, of which the last is found whole.
    """
    variables = {
        "DS_ACCELERATOR": "cpu",
        "CHECKPOINTS": str(tmp_path / "saved"),
        "LINGER": "600",
    }
    config = deepspeed_config(
        bf16={"enabled": True},
        zero_optimization={"stage": stage},
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
        check_agreement(agent, run.steps())
        assert told(scrape, "step") == {"0": 40, "1": 40}
        assert told(scrape, "skipped_steps_total") == {"0": 0, "1": 0}
        assert told(scrape, "loss_finite") == {"0": 1, "1": 1}
        assert all(norm > 0 for norm in told(scrape, "gradient_norm").values())
        total = sum(step.most for step in run.steps()[0])
        assert all(
            0 < seconds < total for seconds in told(scrape, "communication_seconds_total").values()
        )
        assert "dshealthd_job_loss_scale" not in scrape.series  # bf16 has none
