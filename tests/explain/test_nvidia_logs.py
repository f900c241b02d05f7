"""The logs of NVIDIA's tests of their Restart Agent: what failed in them is never overlooked."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.explain import nvidia_logs
from tests.explain.explaining import explained_paths

TESTS = os.environ.get("DSHEALTHD_NVRX_TESTS", "")
"""The folder `tests/attribution/unit` of NVIDIA/nvidia-resiliency-ext."""
FAILED = re.compile(
    r"(?m)^(?:\d+: )?(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception)\b: |Watchdog caught "
)
WENT_ON = 10
"""Steps after an error that clear it."""


@pytest.mark.skipif(not TESTS, reason="DSHEALTHD_NVRX_TESTS names no folder")
def test_no_failure_in_nvidias_logs_is_overlooked(tmp_path: Path) -> None:
    """Each log with an exception or a time-out gets a cause, quoted from a line of it."""
    found = nvidia_logs.logs(Path(TESTS))
    assert len(found) > 40
    failed = 0
    for number, (name, text) in enumerate(found.items()):
        path = tmp_path / f"{number}.log"
        path.write_text(text)
        finding = explained_paths(path)
        lines = text.split("\n")
        assert all(place.quote in lines[place.line - 1] for place in finding.proof)
        last = max((match.start() for match in FAILED.finditer(text)), default=None)
        if last is not None and text.count("iteration", last) < WENT_ON:
            failed += 1
            assert finding.outcome != "nothing", (name, text)
    assert failed > 20


def test_logs_are_read_from_literals_alone(tmp_path: Path) -> None:
    """Joins, sums and repetitions are evaluated; what a call makes is left out."""
    (tmp_path / "test_restart_agent.py").write_text(
        "def test_one(path):\n"
        "    path.write_text('\\n'.join(['a', *['b', 'c'] * 2]) + '\\n')\n"
        "    path.write_text(made())\n"
    )
    assert nvidia_logs.logs(tmp_path) == {"test_one 0": "a\nb\nc\nb\nc\n"}
