"""Logs of pods, the kernel's own, and a log of several attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.explain.explaining import explained_paths, explained_text

if TYPE_CHECKING:
    from pathlib import Path

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
KILLED = "Out of memory: Killed process 4711 (python) total-vm:9kB, anon-rss:9kB"
RESTART = "E1122 05:03:27.456000 7 torch/distributed/elastic/agent/server/api.py:900] 1/3 attempts left; will restart worker group"


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        (f"[pod/train-0/worker] [rank3]: {OOM}", "cuda-oom"),
        (f"2026-01-05T10:00:00.123456789Z stderr F [rank3]: {OOM}", "cuda-oom"),
        (f"Jan  5 10:00:00 gpu-1 train[4711]: [rank3]: {OOM}", "cuda-oom"),
        (f"[ 1234.567890] {KILLED}", "host-memory-pressure"),
        (f"[Mon Jan  5 10:00:00 2026] {KILLED}", "host-memory-pressure"),
        (f"Jan  5 10:00:00 gpu-1 kernel: {KILLED}", "host-memory-pressure"),
        (f"2026-01-05T10:00:00+0000 gpu-1 kernel: [ 1234.567890] {KILLED}", "host-memory-pressure"),
    ],
)
def test_pods_journal_syslog_and_kernel(text: str, slug: str, tmp_path: Path) -> None:
    """The cause is told behind the prefix of each collector, and a rank where there is one."""
    (tmp_path / "some.log").write_text(f"{text}\n")
    finding = explained_paths(tmp_path)
    assert (finding.outcome, finding.slug) == ("found", slug)
    assert finding.ranks == ((3,) if "rank3" in text else ())


def test_the_last_attempt_counts(tmp_path: Path) -> None:
    """An error before a restart is of another episode: what ended the last one is the cause."""
    first, last = f"[rank1]: {OOM}", "[rank2]: OSError: [Errno 28] No space left on device"
    finding = explained_text(tmp_path, f"{first}\n{RESTART}\n[rank0]: step 1\n{last}\n")
    assert finding.ranks == (2,)
    assert finding.slug != "cuda-oom"
    (tmp_path / "job.out").write_text(f"{last}\n{RESTART}\n[rank0]: step 1\n{first}\n")
    assert explained_paths(tmp_path).slug == "cuda-oom"
