"""What the steps of a batch script take of the GPUs that its job has.

A step takes all GPUs that the job has on its nodes unless it asks for some of them (stepmgr.c,
`_copy_job_tres_to_step`), and those that it has are no other step's, unless one of the two has
--overlap (srun(1)).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.text import plural
from dshealthd.doctor.job.sources import launcher_command, programs
from dshealthd.doctor.job.sources.shell_faults import ScriptFault
from dshealthd.doctor.job.sources.slurm_options import (
    PLACES,
    gpus_of_step,
    gpus_per_node,
    nodes_of,
    with_nodes,
)
from dshealthd.jobs.environment import natural

if TYPE_CHECKING:
    from dshealthd.doctor.job.sources.shell import ShellCommand

MAX_COMPONENTS = 128
"""Components of a heterogeneous job, at most (slurm.h, MAX_HET_JOB_COMPS)."""
_ENDS = frozenset({"wait", "kill", "scancel"})
"""Commands behind which a step in the background may have ended."""
_SHARES = frozenset({"overlap", "jobid"})
"""Options of a step that takes nothing of its job's from others."""
_STARTERS = frozenset({"mpirun", "mpiexec", "ray", "sbatch", "exec"}) | programs.ELSEWHERE


@dataclass(slots=True)
class _Component:
    """A job, or one component of a heterogeneous one."""

    options: Mapping[str, str]
    held: int = 0
    """GPUs that steps in the background have."""
    most: int = 0
    """GPUs that its steps had at once."""

    @property
    def gpus(self) -> int:
        """GPUs of all its nodes; 0 if unknown."""
        return (nodes_of(self.options) or 0) * (gpus_per_node(self.options) or 0)


def groups(step: Mapping[str, str]) -> list[int]:
    """Return the components of a heterogeneous job in which a step runs; none if unknown."""
    found: list[int] = []
    for text in step.get("het-group", "0").split(","):
        first, dash, last = text.partition("-")
        begin, end = natural(first), natural(last if dash else first)
        if begin is None or end is None:
            return []
        found += range(begin, min(end, MAX_COMPONENTS) + 1)
    return found


def faults(
    components: Sequence[Mapping[str, str]], seen: Sequence[ShellCommand], *, is_known: bool
) -> Iterator[ScriptFault]:
    """Yield a step that waits for GPUs of another, and GPUs that no step has.

    `is_known` says that the script has no commands beyond those that are seen.
    """
    jobs = [_Component(with_nodes(one)) for one in components]
    waits = False
    for one in seen:
        program = os.path.basename(one.words[0])
        if program in _ENDS:
            for job in jobs:
                job.held = 0
        if program != "srun":
            is_known = is_known and not _may_start(one)
            continue
        step = launcher_command.parse(one.words, {})
        used = [jobs[at] for at in (groups(step.options) if step else ()) if at < len(jobs)]
        counts = [gpus_of_step(job.options, step.options) for job in used if step]
        is_known = is_known and not one.is_conditional
        is_open = step is None or step.is_partial or None in counts
        if is_open or not used or one.in_loop or step is None:  # a loop may have no pass
            is_known = False
            continue
        if one.is_conditional and step.options.keys() & PLACES:
            continue  # of other nodes, if there are some
        for job, count in zip(used, counts, strict=True):
            taken = count or 0
            if not step.options.keys() & _SHARES:
                is_full = 0 < job.gpus < job.held + taken
                waits = waits or bool(job.held and taken and is_full)
                job.most = max(job.most, job.held + taken)
                job.held += taken * (one.end == "&" and not one.is_conditional)
            job.most = max(job.most, taken)
    if waits:
        yield ScriptFault(
            " starts a step in the background that holds GPUs: the next srun waits until it ends,"
            " as it takes them, too, unless one of the two has --overlap",
            *("--overlap", "srun"),
            is_critical=False,
        )
    for at, job in enumerate(jobs) if is_known and any(job.most for job in jobs) else ():
        if job.most >= job.gpus:
            continue
        where = f"component {at} of the job" if jobs[1:] else "the job"
        yield ScriptFault(
            f": {where} has {plural(job.gpus, 'GPU')}, but its steps take {job.most or 'none'} of"
            " them at once",
            *("srun", "srun"),
            is_critical=False,
        )


def _may_start(one: ShellCommand) -> bool:
    """Return whether a command of the script may start what takes GPUs in another way."""
    program = os.path.basename(one.words[0])
    is_file = programs.is_file(one.words[0])
    reads = program in {"source", "."} and not one.words[-1].endswith("activate")
    is_known = programs.runs_programs(program) or program in programs.CALLED | _STARTERS
    return is_known or reads or is_file or one.end == "&"
