"""The report that rank 0 prints at its exit, and the parts of a rank's time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dshealthd.training import report
from dshealthd.training.heartbeat import Heartbeat
from dshealthd.training.message import DeviceMemory, Totals

ROOT = Path(__file__).parents[2]
CODE = """
import sys, time
sys.path.insert(0, sys.argv[1])
from dshealthd.training.heartbeat import Heartbeat
heartbeat = Heartbeat()
for step in range(20):
    time.sleep(0.02)
    heartbeat.step()
    if step == 10:
        with heartbeat.phase("evaluation"):
            time.sleep(0.4)
raise SystemExit(7)
"""


def shares(text: str) -> dict[str, float]:
    """Return the shares in a report, in percent."""
    rows = [line.rsplit(maxsplit=1) for line in text.splitlines() if line.endswith("%")]
    return {words.strip(): float(percent[:-1]) for words, percent in rows}


@pytest.mark.parametrize(("variables", "printed"), [
    ({"DSHEALTHD_REPORT": "1"}, True),
    ({"DSHEALTHD_REPORT": "1", "RANK": "0", "WORLD_SIZE": "1"}, True),
    ({"DSHEALTHD_REPORT": "1", "RANK": "1", "WORLD_SIZE": "2"}, False),
    ({"DSHEALTHD_REPORT": "1", "DSHEALTHD_HEARTBEAT": "0"}, False),
    ({"DSHEALTHD_REPORT": "0"}, False),
    ({}, False),
])  # fmt: skip
def test_printed_at_the_exit_if_asked(variables: dict[str, str], *, printed: bool) -> None:
    """By rank 0 alone, on standard error, and without an agent; the exit is that of the training.
    What it spent in a marked phase is no step's.
    """
    ended = subprocess.run(
        [sys.executable, "-c", CODE, str(ROOT)],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (7, "")
    assert ("20 steps of rank 0" in ended.stderr) is printed
    if printed:
        found = shares(ended.stderr)
        assert sum(found.values()) == pytest.approx(100.0, abs=0.3)
        assert {"own work", "evaluation"} <= found.keys()
        assert "input is within own work" in ended.stderr


def test_an_error_in_it_is_none_of_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed once, and fails without an exception."""
    heartbeat = Heartbeat(reports=True)
    heartbeat.step()
    heartbeat.close()
    heartbeat.close()
    assert capsys.readouterr().err.count("1 steps of rank 0") == 1
    heartbeat = Heartbeat(reports=True)
    monkeypatch.setattr(report, "age", lambda: 1 / 0)
    heartbeat.close()
    assert heartbeat.closed


def test_parts() -> None:
    """They add up to the time, whatever was measured of it; more is never told than there is."""
    totals = Totals(100, 50, 40.0, 20.0)
    found = report.divide_time(150.0, 100, totals, 0.1, alone=False)
    assert found == pytest.approx({"work": 70.0, "wait": 40.0, "input": 10.0, "unmeasured": 30.0})
    found = report.divide_time(90.0, 100, totals, None, alone=False)
    assert found == pytest.approx({"work": 60.0, "wait": 30.0, "unmeasured": 0.0})
    found = report.divide_time(90.0, 100, None, 0.1, alone=False)
    assert found == pytest.approx({"input": 10.0, "unmeasured": 80.0})
    found = report.divide_time(90.0, 100, None, 2.0, alone=True)
    assert found == pytest.approx({"work": 0.0, "input": 90.0, "unmeasured": 0.0})
    assert report.table_lines({}) == ["no time is known"]


def test_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """At its highest."""
    report.show({"work": 1.0}, 1, DeviceMemory(1, 2, 3 << 30))
    assert "memory at its highest: 3.0 GiB" in capsys.readouterr().err
