"""Users with large environments keep nobody's evidence from being taken."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dshealthd.core.host import read_bytes
from dshealthd.evidence import members
from dshealthd.jobs import processes
from dshealthd.jobs.environment import ALLOWED
from dshealthd.linux.forked import Function, Pool
from tests.jobs.machines import TORCH, Machine, environ

MAX_VALUE = 4096
ENVIRON_LIMIT = 2 << 20
SWEEP_LIMIT = 32 << 20
MAX_ANSWER = 4 << 20

LONG = dict.fromkeys(ALLOWED, "x" * MAX_VALUE) | TORCH


def test_environments_of_the_greatest_length(tmp_path: Path) -> None:
    """More than one sweep reads is read in several, and all ranks are told of."""
    machine = Machine(tmp_path / "proc")
    crowd = SWEEP_LIMIT // ENVIRON_LIMIT + 4
    filler = b"X=" + b"x" * (ENVIRON_LIMIT - 1000) + b"\0"
    for number in range(crowd):
        machine.process(100 + number, environ({**TORCH, "RANK": str(number)}) + filler)
    machine.process(900, {**TORCH, "SLURM_JOB_ID": "7"})
    found = members.find(lambda *_: None, machine.context().host, "")
    assert found["unseen"] == {}
    assert len(found["ranks"]) == crowd + 1


def test_long_variables_of_a_crowd(tmp_path: Path) -> None:
    """The answer fits however long the variables are, and a user's ranks are not crowded out."""
    machine = Machine(tmp_path / "proc")
    for number in range(300):
        place = machine.process(100 + number, {**LONG, "RANK": str(number)}, start=100 + number)
        (place / "status").write_text("Name:\tx\nUid:\t666\t666\t666\t666\n")
    place = machine.process(900, {**TORCH, "SLURM_JOB_ID": "7"}, start=900)
    (place / "status").write_text("Name:\tx\nUid:\t1000\t1000\t1000\t1000\n")
    found = members.find(lambda *_: None, machine.context().host, "")
    assert len(json.dumps(found)) < MAX_ANSWER
    assert (len(found["ranks"]), found["more"]) == (64, 237)
    assert 900 in {rank["pid"] for rank in found["ranks"]}


def test_a_process_that_cannot_be_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose environment is locked by a rank that waits in a driver is counted, and left out; not
    one at which the search has no CPU for as long. Each attempt has eight seconds.
    """
    limits, start = [], Pool.start

    def limited(pool: Pool, name: str, function: Function, seconds: float, *more: Any) -> None:
        limits.append(seconds)
        start(pool, name, function, 60.0, *more)

    monkeypatch.setattr(Pool, "start", limited)
    machine = Machine(tmp_path / "proc")
    for pid in (100, 101, 102):
        machine.process(pid, {**TORCH, "SLURM_JOB_ID": "7", "RANK": str(pid)})

    def locked(path: str, *limit: int) -> bytes:
        began = time.monotonic()
        if path.endswith(("/100/environ", "/102/environ")):
            time.sleep(60)
        while path.endswith("/101/environ") and time.monotonic() < began + 1.5:
            pass
        return read_bytes(path, *limit)

    monkeypatch.setattr(processes, "read_bytes", locked)
    step = members.search(machine.context().host, "slurm-7")
    assert step.problem == ""
    assert [rank["pid"] for rank in step.value["ranks"]] == [101]
    assert step.value["unseen"] == {"blocked": 2}
    assert {*limits} == {8.0}


def test_a_node_where_nothing_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends, however many processes it would have to leave out."""
    machine = Machine(tmp_path / "proc")
    for pid in range(100, 120):
        machine.process(pid, TORCH)

    def locked(path: str, *limit: int) -> bytes:
        if path.endswith("/environ"):
            time.sleep(60)
        return read_bytes(path, *limit)

    monkeypatch.setattr(processes, "read_bytes", locked)
    monkeypatch.setattr(members, "DEADLINE", 60.0)
    clock = SimpleNamespace(monotonic=itertools.count(0.0, 15.0).__next__, time=time.time)
    monkeypatch.setattr(members, "time", clock)
    monkeypatch.setattr(members, "computes", lambda _pid: False)  # as it may before it sleeps
    assert members.search(machine.context().host, "").problem == "hangs at 2 processes"
