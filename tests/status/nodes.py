"""What agents have that commands query, and how they are run."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

from dshealthd.cli import main as cli
from dshealthd.collectors.gpu import UP, VISIBLE
from dshealthd.collectors.gpu_bus import EXPECTED
from dshealthd.collectors.job_hang import CULPRIT, HANG, OVERDUE
from dshealthd.collectors.kernel import UPTIME
from dshealthd.collectors.training import LOSS_FINITE, STEP, STEP_SECONDS
from dshealthd.core.collector import Sample
from dshealthd.core.result import CollectionOutcome, CollectionResult
from dshealthd.core.snapshot import Snapshot
from tests.http import impostors

HEALTHY = (UP(1, "0", "GPU-a"), VISIBLE(1), EXPECTED(1), UPTIME(1e6))
JOB = (
    STEP(1246, "run-1", "0"),
    STEP(1245, "run-1", "1"),
    STEP_SECONDS(5.0, "run-1", "0"),
    STEP_SECONDS(5.0, "run-1", "1"),
    LOSS_FINITE(1, "run-1", "0"),
)
HUNG = (
    *JOB,
    HANG(1, "run-1", "input"),
    CULPRIT(1, "run-1", "1", "input", "input"),
    OVERDUE(90, "run-1", "0"),
    OVERDUE(120, "run-1", "1"),
)


def snapshot(*samples: Sample) -> Snapshot:
    """Return what an agent has that collected these samples."""
    made = Snapshot(time.monotonic, time.time)
    made.expect("gpu", 3600)
    made.put("gpu", CollectionResult(CollectionOutcome.OK, samples))
    return made


@contextlib.contextmanager
def answering(*documents: dict[str, Any]) -> Iterator[list[str]]:
    """Answer as an agent with each of these documents; yield their addresses."""
    with contextlib.ExitStack() as stack:
        talks = [impostors.saying(json.dumps(one)) for one in documents]
        yield [f"127.0.0.1:{stack.enter_context(impostors.serving(talk))}" for talk in talks]


def run(*arguments: str) -> int:
    """Run the command line."""
    return cli.main(list(arguments))
