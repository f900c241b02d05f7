"""Whose libraries are looked at before a job is asked."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dshealthd.core.host import Host
from dshealthd.jobs.nccl.release import Library, MappedReleases
from dshealthd.jobs.ras.question import JobProcess, loaded_by


class Same:
    """Releases of processes that all have mapped one."""

    def library(self, _host: Host, _pid: int) -> Library:
        """Return it."""
        return Library(frozenset({"2.30.7"}), frozenset())


@pytest.mark.parametrize(("ranks", "versions"), [(128, {"2.30.7"}), (129, {"2.30.7", None})])
def test_so_many_processes(ranks: int, versions: set[str | None]) -> None:
    """A job with more is not asked, as one of them may have another release; children of a rank
    have its own.
    """
    members: list[Any] = [JobProcess(100 + rank, 100 + rank, 1, rank) for rank in range(ranks)]
    members += [JobProcess(1000 + rank, 1000, 100 + rank, rank) for rank in range(ranks)]
    found = loaded_by(Host(), members, cast("MappedReleases", Same()))
    assert found.versions == versions
    assert len(found.pids) == min(ranks, 128)
