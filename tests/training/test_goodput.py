"""Where the time of real trainings went, by the agent, against a clock that they keep."""

from __future__ import annotations

import importlib.util
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.agents import RunningAgent, running
from tests.training.test_trainings import CONFIG
from tests.training.trainings import training

# Its import here would take seconds, and in each worker of the tests.
if importlib.util.find_spec("torch") is None:
    pytest.skip("takes torch", allow_module_level=True)
pytestmark = pytest.mark.timeout(600)

SPENT = re.compile(r"rank (\d) attempt (\d) spent (\{.*\})")


def attempts(agent: RunningAgent, run: str) -> list[dict[str, Any]]:
    """Return the attempts of a run that have ended."""
    with urllib.request.urlopen(f"http://127.0.0.1:{agent.port}/api/v1/history") as answer:
        found = json.loads(answer.read())["runs"]
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


def test_ddp_that_torchrun_restarts(tmp_path: Path) -> None:
    """The shares of each attempt are those of the training's clock, within 3 points; the restart is
    counted, the rank that failed is named, and steps that were lost are made again. Rank 0 prints
    its own part.
    """
    socket = tmp_path / "heartbeat.sock"
    asked = {
        "DSHEALTHD_HEARTBEAT_SOCKET": str(socket),
        "DSHEALTHD_REPORT": "1",
        "DSHEALTHD_RUN": "ddp-of-the-test",
    }
    with (
        running(tmp_path, CONFIG.format(socket=socket)) as agent,
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
