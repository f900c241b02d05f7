"""Genuine logs of ProcessGroupNCCL, its watchdog and its heartbeat monitor, over genuine NCCL.

Made by `tests/nccl/pytorch/record.py`; the file names the versions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explain.explaining import explained_paths
from tests.nccl.pytorch.record import CULPRIT, kept

KEPT = kept()
RUNS: dict[str, dict[str, str]] = KEPT["runs"]


def expected(run: str) -> tuple[str, tuple[int, ...]]:
    """Return the cause of a run, and the ranks at fault."""
    launcher, fault = run.split()
    if fault == "none":
        return "", ()
    if fault == "symmetric":
        return "nccl-timeout", ()
    told_by_launcher = fault == "raises" or (fault == "killed" and launcher == "torchrun")
    return "child-failed" if told_by_launcher else "nccl-timeout", (CULPRIT,)


@pytest.mark.parametrize("run", RUNS)
def test_cause_and_rank(run: str, tmp_path: Path) -> None:
    """Root and rank are right, of the files as they were and of all lines in one."""
    files = RUNS[run]
    merged = {"job.out": "".join(files.values())}
    for number, form in enumerate((files, merged)):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in form.items():
            (folder / name).write_text(text)
        finding = explained_paths(folder)
        assert (finding.slug, finding.ranks) == expected(run), finding.statement
