"""What a process that reads others' text may use."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from dshealthd.evidence import nccl_ras
from dshealthd.linux import privileges
from tests.evidence.steps import take

if TYPE_CHECKING:
    from dshealthd.evidence.step import Emit, RunningStep


def parse(_emit: Emit, text: str, limit: int) -> Any:
    """Take a JSON document apart with little memory."""
    privileges.limit_memory(limit)
    return len(json.loads(text))


def parsed(text: str) -> RunningStep:
    """Return the step that does."""
    return take(functools.partial(parse, text=text, limit=nccl_ras.MAX_MEMORY), 60.0)[0]


def test_an_answer_made_to_fill_the_memory() -> None:
    """16 MiB of empty objects would be 400 MiB; the step ends with a reason, and nothing else."""
    hostile = "[" + ",".join(["{}"] * (nccl_ras.MAX_ANSWER // 3)) + "]"
    assert parsed(hostile).problem == "it needs more memory than its limit"


def test_an_honest_answer_has_room() -> None:
    """3 MiB of records, as 4,096 ranks have, are read."""
    record = {"rank": 1, "host": "node-17", "counts": {"AllReduce": 12345, "AllGather": 99}}
    honest = json.dumps([record] * 40_000)
    assert len(honest) > 3_000_000
    assert parsed(honest).answer == 40_000
