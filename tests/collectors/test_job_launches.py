"""What the agent makes of the file of dshealthd-launches.service: what is refused is said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors.job_launches import AGE, BEHIND, LATE, LAUNCHES, UNCOUNTED
from dshealthd.core.collector import Reason
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.jobs.launches import SCHEMA
from dshealthd.jobs.launches.obstacle import Obstacle
from tests.collectors.bench import Bench

FRESH = 30.0
JOB = "slurm-1"


def communicator(name: str, collectives: int, behind: int | None, late: float | None) -> Any:
    """Return what the service writes of a communicator."""
    counts = {"collectives": collectives, "sends": 2, "last": 990.0}
    return {"name": name, "size": 2, "rank": 0, **counts, "behind": behind, "late": late}


def rank(number: int, *communicators: Any, refused: str | None = None) -> dict[str, Any]:
    """Return what the service writes of a rank."""
    who = {"job": JOB, "run": "run-1", "rank": number, "pid": 100 + number}
    return {**who, "refused": refused, "detail": "", "communicators": list(communicators)}


def collect(directory: Path, *ranks: dict[str, Any], **changes: Any) -> CollectionResult:
    """Return what is collected of a file that is as old as may be, at time 1000."""
    file = directory / "launches.json"
    document = {
        "schema": SCHEMA,
        "at": 1000.0 - FRESH,
        "refused": None,
        "detail": "",
        "ranks": ranks,
    }
    file.write_text(json.dumps({**document, **changes}))
    return Bench("job_launches", directory, file=file).collect()


def test_ranks(tmp_path: Path) -> None:
    """Counts are sums over communicators; lateness is that in a communicator of all ranks here."""
    result = collect(
        tmp_path,
        rank(0, communicator("world", 10, 0, 0.0), communicator("own", 99, 0, 0.5)),
        rank(1, communicator("world", 8, 2, 0.032), communicator("", 7, None, None)),
    )
    assert (result.outcome, result.faults) == (CollectionOutcome.OK, ())
    assert set(result.samples) == {
        LAUNCHES(109.0, JOB, "0", "collective"),
        LAUNCHES(4.0, JOB, "0", "send"),
        AGE(10.0, JOB, "0"),
        BEHIND(0.0, JOB, "0"),
        LATE(0.0, JOB, "0"),
        LAUNCHES(15.0, JOB, "1", "collective"),
        LAUNCHES(4.0, JOB, "1", "send"),
        AGE(10.0, JOB, "1"),
        BEHIND(2.0, JOB, "1"),
        LATE(0.032, JOB, "1"),
    }


def test_the_busiest_communicator(tmp_path: Path) -> None:
    """Of those of all ranks here it tells how late a rank is, whichever is first."""
    busy, quiet = communicator("a", 50, 1, 0.1), communicator("b", 5, 0, 0.9)
    for both in ((busy, quiet), (quiet, busy)):
        result = collect(tmp_path, rank(0, *both), rank(1, *both))
        assert {one.value for one in result.samples if one.metric is LATE} == {0.1}


@pytest.mark.parametrize("reason", list(Obstacle))
def test_a_rank_that_is_not_counted(reason: Obstacle, tmp_path: Path) -> None:
    """It has a reason, and no figure, which would be 0; unless some communicators are counted."""
    some = reason is Obstacle.TOO_MANY_COMMUNICATORS
    result = collect(tmp_path, rank(0, communicator("", 5, None, None), refused=reason))
    assert UNCOUNTED(1.0, JOB, reason) in result.samples
    assert len(result.samples) == (4 if some else 1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"refused": "denied", "detail": "x"}, Reason.PERMISSION_DENIED),
        ({"refused": "lockdown"}, Reason.PERMISSION_DENIED),
        ({"refused": "unsupported"}, Reason.NOT_FOUND),
        ({"at": 1000.0 - FRESH - 1}, Reason.EXPIRED),
        ({"schema": SCHEMA + 1}, Reason.MALFORMED),
        ({"refused": "for fun"}, Reason.MALFORMED),
        ({"ranks": [{}]}, Reason.MALFORMED),
        ({"at": "now"}, Reason.MALFORMED),
    ],
)
def test_nothing_is_counted(changes: dict[str, Any], reason: Reason, tmp_path: Path) -> None:
    """It is an error with its reason, never a figure."""
    result = collect(tmp_path, rank(0, communicator("world", 10, 0, 0.0)), **changes)
    assert (result.outcome, result.reason) == (CollectionOutcome.ERROR, reason)
    assert result.samples == ()


@pytest.mark.parametrize(
    ("more", "outcome"), [(0, CollectionOutcome.OK), (1, CollectionOutcome.ERROR)]
)
def test_a_long_file(tmp_path: Path, more: int, outcome: CollectionOutcome) -> None:
    """Four MiB are read."""
    collect(tmp_path)
    rest = (4 << 20) - (tmp_path / "launches.json").stat().st_size
    assert collect(tmp_path, detail="x" * (rest + more)).outcome is outcome


def test_without_the_service(tmp_path: Path) -> None:
    """It is off by default: not available. What is no file is an error, and does not hang."""
    file = tmp_path / "launches.json"
    assert Bench("job_launches", tmp_path, file=file).collect().outcome is (
        CollectionOutcome.NOT_AVAILABLE
    )
    os.mkfifo(file)
    assert Bench("job_launches", tmp_path, file=file).collect().outcome is CollectionOutcome.ERROR
