"""Genuine logs of ProcessGroupNCCL, its watchdog and its heartbeat monitor, over genuine NCCL.

Made by `tests/nccl/pytorch/record.py`; the file names the versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dshealthd.explain import command
from tests.nccl.pytorch.record import CULPRIT, kept

if TYPE_CHECKING:
    from pathlib import Path

    from dshealthd.explain.causality import Finding

KEPT = kept()
RUNS: dict[str, dict[str, str]] = KEPT["runs"]


def explained(files: dict[str, str], folder: Path) -> Finding:
    """Explain some files."""
    folder.mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    recognizer, unread = command.read([str(folder)])
    assert unread == []
    return command.conclude(recognizer)


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
        finding = explained(form, tmp_path / str(number))
        assert (finding.slug, finding.ranks) == expected(run), finding.statement
