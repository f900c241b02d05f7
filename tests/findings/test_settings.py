"""What a node sees of how jobs are set up."""

from __future__ import annotations

import pytest

from dshealthd.collectors.job_environment import PROCESSES, WORLD_SIZE
from dshealthd.findings.series import Series
from dshealthd.findings.settings import placement


@pytest.mark.parametrize(("world", "rank", "processes", "named"), [
    (2, 0, 2, ["rank 0 has 2 processes"]),
    (2, 0, 1, []),
    (None, 1, 2, ["rank 1 has 2 processes"]),
    (1, 0, 2, []),
    (None, 0, 2, []),
])  # fmt: skip
def test_a_rank_that_is_started_twice(
    world: int | None, rank: int, processes: int, named: list[str]
) -> None:
    """It keeps the ranks of a run from meeting; where there is one rank, as far as is known, nobody
    waits for another: programs that a task starts in the background are all rank 0.
    """
    samples = [PROCESSES(processes, "slurm-7", "run-1", str(rank))]
    if world is not None:
        samples.append(WORLD_SIZE(world, "slurm-7", "run-1"))
    assert [sign.reason for sign in placement(Series(samples), 0.0)] == named
