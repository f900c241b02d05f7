"""The training jobs that use this node's parts, or did within the last minute."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dshealthd.findings.finding import Sign
    from dshealthd.findings.series import Series

IN_USE = 60.0
"""Seconds for which a job counts as a user after it was last seen.

A fault ends what would show its job: NVML lists no processes of a lost GPU, and the ranks end.
Their GPUs are read every 15 s, and NCCL gives up a port that is down after some 30 s.
"""


class Users:
    """The training jobs that use, or have just used, this node's parts."""

    def __init__(self, series: Series) -> None:
        """Read which ranks have which GPU from `series`, and from its past if it has one."""
        self._by_gpu: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Ranks by job, of a GPU by its UUID and by its index."""
        located: defaultdict[str, set[str]] = defaultdict(set)
        for labels, _ in series.lately("job_gpu_info", IN_USE):
            located[labels["training_job"]].add(labels["rank"])
            for gpu in {labels["uuid"], labels["gpu"]}:
                self._by_gpu[gpu][labels["training_job"]] += 1
        self._here = Counter(
            labels["training_job"] for labels, _ in series.lately("job_step", IN_USE)
        )
        self._here |= Counter({job: len(ranks) for job, ranks in located.items()})
        launched: Counter[str] = Counter()
        for labels, ranks in series.lately("job_ranks", IN_USE):
            launched[labels["training_job"]] += max(1, int(ranks))
        self._here |= launched
        self._elsewhere = {job for job, ranks in located.items() if len(ranks) >= self._here[job]}
        """Jobs of which each rank's GPU is known."""

    def of_gpu(self, labels: Mapping[str, str]) -> Mapping[str, int]:
        """Return the ranks on a GPU by job; `labels` are those of a series that names the GPU.

        By its UUID if the series has it: the indices of other GPUs shift when one is gone.
        """
        return self._by_gpu.get(labels.get("uuid") or labels.get("gpu") or "", {})

    def of(self, sign: Sign) -> str:
        """Return the job with most ranks on the GPU that a sign is about, or on the node; or "".

        A GPU without known ranks may have those of jobs whose GPUs are not all known: a page too
        many is better than one too few.
        """
        jobs = self.of_gpu(sign.labels)
        if not jobs:
            apart = self._elsewhere if sign.labels.get("gpu") else ()
            jobs = {job: ranks for job, ranks in self._here.items() if job not in apart}
        return min(jobs, key=lambda job: (-jobs[job], job), default="")
