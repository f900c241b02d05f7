"""What a process that reads others' text may use."""

from __future__ import annotations

import functools
import json
import mmap
from collections.abc import Callable
from typing import Any

from dshealthd.evidence import nccl_ras
from dshealthd.linux import privileges
from dshealthd.linux.forked import Emit
from tests.evidence.steps import take


def parse(_emit: Emit, text: str, bound: Callable[[], object]) -> Any:
    """Take a JSON document apart within bounds."""
    bound()
    return len(json.loads(text))


def test_an_honest_answer_has_room() -> None:
    """3 MiB of records, as 4,096 ranks have, are read."""
    record = {"rank": 1, "host": "node-17", "counts": {"AllReduce": 12345, "AllGather": 99}}
    honest = json.dumps([record] * 40_000)
    assert len(honest) > 3_000_000
    bound = functools.partial(privileges.limit_memory, nccl_ras.MAX_MEMORY)
    assert take(functools.partial(parse, text=honest, bound=bound))[0].value == 40_000


def test_what_the_parent_had_mapped_is_no_part_of_the_limit() -> None:
    """A limit below what a child inherits leaves it nothing, and CPython no way to say so."""
    text = json.dumps(["a rank's record"] * 100_000)
    bound = functools.partial(privileges.confine, 256 << 20, 20)
    with mmap.mmap(-1, 2 << 30):
        assert take(functools.partial(parse, text=text, bound=bound))[0].value == 100_000
