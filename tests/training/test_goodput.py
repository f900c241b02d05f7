"""Where the time of real trainings went, by the agent, against a clock that they keep."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.agents import RunningAgent, running
from tests.lab import Lab
from tests.training.test_trainings import CONFIG
from tests.training.trainings import training
from tests.waiting import until

# Its import here would take seconds, and in each worker of the tests.
if importlib.util.find_spec("torch") is None:
    pytest.skip("takes torch", allow_module_level=True)
# Played ranks show that shares, steps made again and restarts are reckoned rightly, in every run of
# the tests (tests/jobs/test_goodput.py, tests/findings/test_attempts.py).
pytestmark = [pytest.mark.lab, pytest.mark.timeout(600)]

SPENT = re.compile(r"rank (\d) attempt (\d) spent (\{.*\})")


def attempts(agent: RunningAgent, run: str) -> list[dict[str, Any]]:
    """Return the attempts of a run that have ended."""
    found = json.loads(agent.get("/api/v1/history"))["runs"]
    return [each for each in found if each["what"] == run and each["end"] is not None]


def clocks(text: str, attempt: int) -> dict[str, float]:
    """Return what the ranks of an attempt say of their time, together."""
    whole: dict[str, float] = {}
    for _, number, spent in SPENT.findall(text):
        for part, seconds in json.loads(spent).items() if int(number) == attempt else ():
            whole[part] = whole.get(part, 0.0) + seconds
    return whole


def shares(times: dict[str, float]) -> dict[str, float]:
    """Return the shares of all parts but those that a training's own clock does not know."""
    known = {part: seconds for part, seconds in times.items() if part != "unmeasured"}
    return {part: seconds / sum(known.values()) for part, seconds in known.items()}


@pytest.mark.parametrize(
    ("script", "arguments", "untouched"),
    [
        ("script_shares.py", ("ddp", "90"), True),
        ("script_shares.py", ("fsdp2", "70"), False),
        ("script_shares.py", ("zero3", "50"), False),
        ("script_shares.py", ("stages", "50"), False),
        ("script_trainer.py", ("90",), True),
        ("script_loaders.py", ("110",), False),
    ],
    ids=["DDP", "FSDP 2", "ZeRO 3", "pipeline", "as Trainer", "as Lightning"],
)
def test_ranks_on_two_nodes(
    tmp_path: Path, script: str, arguments: tuple[str, ...], *, untouched: bool
) -> None:
    """The shares of all ranks are those of their own clocks, within 3 points, and nothing else is
    left unmeasured; where no other training fits, as a stranger writes it.
    """
    run = "of-two-nodes"
    (tmp_path / "saved").mkdir()
    with (
        Lab(
            tmp_path / "lab",
            nodes=2,
            gpus=0,
            collectors=("heartbeat_pages", "training", "job_hang", "open_files"),
            config=lambda _: CONFIG,
        ) as lab,
        contextlib.ExitStack() as stack,
    ):
        started = []
        for node in lab.nodes:
            asked = {
                "CHECKPOINTS": str(tmp_path / "saved"),
                "DSHEALTHD_RUN": run,
                "DS_ACCELERATOR": "cpu",
            }
            (logs := node.directory / "logs").mkdir()
            trains = training(
                logs, script, *arguments, variables=asked, untouched=untouched, node=node
            )
            started.append(stack.enter_context(trains))
        ends = [trained.process.wait(400) for trained in started]
        text = "".join(trained.text() for trained in started)
        assert ends == [0, 0], text
        found = [until(partial(attempts, node.agent, run), lambda: text) for node in lab.nodes]
    cards = [one["card"] for (one,) in found]
    assert [(card["ranks"], card["first_step"]) for card in cards] == [(1, 0)] * 2
    times: dict[str, float] = {}
    for card in cards:
        for part, seconds in card["times"].items():
            times[part] = times.get(part, 0.0) + seconds
    del times["start"]
    assert times["unmeasured"] < 0.03 * sum(times.values()), times
    own, card = shares(clocks(text, 0)), shares(times)
    for part in own.keys() | card.keys():
        assert card.get(part, 0.0) == pytest.approx(own.get(part, 0.0), abs=0.03), (card, own)


def test_ddp_that_torchrun_restarts(tmp_path: Path) -> None:
    """The shares of each attempt are those of the training's clock, within 3 points; the restart is
    counted, the rank that failed is named, and steps that were lost are made again. Rank 0 prints
    its own part.
    """
    asked = {"DSHEALTHD_REPORT": "1", "DSHEALTHD_RUN": "ddp-of-the-test"}
    with (
        running(tmp_path, CONFIG) as agent,
        training(
            tmp_path, "script_goodput.py", "160", "80", variables=asked, restarts=1
        ) as trained,
    ):
        assert trained.process.wait(400) == 0, trained.text()
        agent.wait(lambda _: len(attempts(agent, "ddp-of-the-test")) == 2, 60)
        first, second = attempts(agent, "ddp-of-the-test")
        text = trained.text()
    assert (first["part"], first["reason"]) == ("rank 1", "failed")
    assert (second["reason"], second["card"]["again"]) == ("ended", True)
    # Its page may go with the last step unread.
    assert [first["value"], second["value"]] == pytest.approx([80, 160], abs=1)
    assert (first["card"]["first_step"], second["card"]["first_step"]) == (0, 40)
    own = shares(clocks(text, 0))
    for part, share in shares(first["card"]["times"]).items():
        assert share == pytest.approx(own.get(part, 0.0), abs=0.03), (part, text)
    # Of 120 steps, 39 and the time of their parts were made before; `start` counts from its launch.
    clock, times = clocks(text, 1), second["card"]["times"]
    steps = sum(clock[part] for part in ("work", "wait", "input"))
    again = 39 / 119 * steps
    whole = sum(clock.values())
    assert times["repeated"] / whole == pytest.approx(again / whole, abs=0.03)
    for part in ("work", "wait", "input"):
        assert times[part] / whole == pytest.approx(clock[part] * 80 / 119 / whole, abs=0.03), part
    for part in ("evaluation", "checkpoint"):
        assert times[part] / whole == pytest.approx(clock[part] / whole, abs=0.03), part
    assert times["restart"] >= clock["start"] - 1.0
    assert first["card"]["slowest"]["rank"] == second["card"]["slowest"]["rank"] == 1
    assert text.count("steps of rank 0 in") == 1
    assert "waiting for other ranks" in text
