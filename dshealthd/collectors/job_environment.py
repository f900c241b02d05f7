"""Settings of training jobs, from their environments.

Runs, rendezvous addresses, and settings that are wrong for the run or this node.

Read from allow-listed variables of the environment that a process was started with, and from
`/etc/nccl.conf` as the process sees it. Variables that a program sets for itself later are not
seen, nor are `~/.nccl.conf` and the file named by NCCL_CONF_FILE. `dshealthd_processes_unseen`
counts processes whose environment cannot be read.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Sample,
    Worker,
    every,
    gauge,
)
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.jobs import environment_problems as problems
from dshealthd.jobs.environment import (
    NCCL_COMMON,
    digest,
    held_gpus,
    launched_by,
    natural,
    nccl_variables,
)
from dshealthd.jobs.environment_problems import Finding
from dshealthd.jobs.nccl.names import Misnomer, newer
from dshealthd.jobs.nccl.release import MappedReleases, UnknownRelease
from dshealthd.jobs.nccl.settings import parse_configuration
from dshealthd.jobs.network_devices import NetworkDevices
from dshealthd.jobs.processes import ProcessTable, TrainingProcess, read_stat
from dshealthd.jobs.ranks import Ranks, Run
from dshealthd.jobs.shares import MAX_JOBS, MAX_RANKS, Claim, share_places
from dshealthd.linux.pci import bus
from dshealthd.linux.process_root import Root
from dshealthd.linux.socket_owners import started_by

INFO = gauge(
    "dshealthd_job_run_info",
    "1 for each run with ranks on this node, by launcher: torchrun, deepspeed, openmpi, pmi, "
    "slurm, torch (RANK set by something else). A run is the set of ranks with the same "
    "rendezvous and world size; a scheduler's job may have several.",
    *("training_job", "run", "launcher"),
)
WORLD_SIZE = gauge(
    "dshealthd_job_world_size",
    "Number of ranks in the run, according to their environments.",
    *("training_job", "run"),
)
PORT = gauge(
    "dshealthd_job_master_port",
    "MASTER_PORT of the run; absent if its launcher sets none.",
    *("training_job", "run"),
)
RANKS = gauge(
    "dshealthd_job_ranks",
    "Ranks of the run on this node; a duplicate rank counts once.",
    *("training_job", "run"),
)
LOWEST = gauge(
    "dshealthd_job_lowest_rank", "Lowest rank of the run on this node.", "training_job", "run"
)
PROCESSES = gauge(
    "dshealthd_job_processes",
    "Processes on this node that were started as this rank, without their children: more than 1, "
    "or the same rank on two nodes, is a duplicate rank. At most 64 per run.",
    *("training_job", "run", "rank"),
)
ORPHANED = gauge(
    "dshealthd_job_orphaned_ranks",
    "Ranks whose process has lost its parent: left over from a run that has ended, or detached on "
    "purpose (nohup).",
    *("training_job", "run"),
)
KIN = gauge(
    "dshealthd_job_rendezvous_kin_info",
    "1; kin is a digest of the run's rendezvous settings without one variable. Runs with the "
    "same kin differ only in that variable; if only one of them has a rank 0, they are one run "
    "whose ranks failed to meet.",
    *("training_job", "run", "variable", "kin"),
)
PROBLEMS = gauge(
    "dshealthd_job_environment_problems",
    "Number of ranks of the run on this node whose variable has this problem; the label rank is "
    "the lowest of them. Placement: beyond, repeated, absent, down, loopback, unordered; "
    "transport: disabled; port: exposed; value: out_of_range, no_number, differs (from most "
    "ranks here); name: unread, retired, renamed, misspelt (variable is the intended name), "
    "unknown (variable is other). Absent means none.",
    *("training_job", "run", "rank", "variable", "problem"),
)
FINGERPRINT = gauge(
    "dshealthd_job_setting_fingerprint",
    "48-bit digest of an NCCL setting that must be the same on all ranks, over the run's ranks "
    "on this node; absent if no rank sets it, or a rank's settings cannot be read. With an empty "
    "variable: 0 if those of all its ranks can.",
    *("training_job", "run", "variable"),
)
DECLINED = gauge(
    "dshealthd_job_declined_ranks",
    "Ranks of the run on this node whose user declines heartbeats: DSHEALTHD_HEARTBEAT=0.",
    *("training_job", "run"),
)
HELD = gauge(
    "dshealthd_job_held_gpus",
    "GPUs of this node that the scheduler allocated to the run, from the environment of its "
    "processes (SLURM_STEP_GPUS, SLURM_JOB_GPUS, or NVIDIA_VISIBLE_DEVICES with UUIDs); absent "
    "if unknown. terminal is true for an interactive session.",
    *("training_job", "run", "terminal"),
)
LEFT_OUT = gauge(
    "dshealthd_job_runs_left_out",
    "Runs on this node without series because there are more than 16.",
)

MAX_PROBLEMS = 64
"""Limit per run; a user may set any number of wrong variables."""
_DOUBTFUL = frozenset({Misnomer.MISSPELT, Misnomer.UNKNOWN})
"""Verdicts on a name that rest only on no known library reading it."""
_LISTED = 100
"""Least number of variable names in a library that names all of its own; NCCL 2.24 has 148."""
_CONFIGURATION_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class _Told:
    """Settings that a process was started with, read once."""

    settings: Mapping[str, str]
    """Allow-listed variables, plus what `/etc/nccl.conf` adds."""
    names: frozenset[str]
    """Names of all NCCL variables that are set."""
    findings: frozenset[Finding]
    """Problems of names and values."""
    orphaned: bool | None
    """Whether its parent, when the process was found, is not the one that started it."""
    fault: Fault | None
    """Why part of it could not be read."""


class JobEnvironment(Collector):
    """Examines the training processes in the process table.

    Runs in the worker that holds the table, as adapters and `/proc/<pid>/root` may hang.
    """

    worker = Worker.STORAGE

    Options = every("15s")

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._ranks = Ranks()
        self._releases = MappedReleases()
        self._told: dict[tuple[int, int], _Told] = {}
        self._mixed = False
        """Whether the node has several GPU models."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the runs, and the problems of the settings in their environments."""
        table = self.context.shared(ProcessTable)
        runs = self._ranks.runs(table.refresh(), table.machine)
        yield LEFT_OUT(max(0, len(runs) - MAX_JOBS))
        before, self._told = self._told, {}
        network = NetworkDevices(self.context)
        gpus, self._mixed = self._gpus() if runs else (None, False)
        for run in share_places(runs, MAX_JOBS, _claim):
            yield from one_of_many(
                f"job {run.job}",
                functools.partial(self._run, run, before, table.machine, network, gpus),
            )
        yield from network.faults

    def _run(
        self,
        run: Run,
        before: Mapping[tuple[int, int], _Told],
        machine: str,
        network: NetworkDevices,
        gpus: int | None,
    ) -> Iterator[Sample | Fault]:
        for process in run.processes:
            told = before.get(process.key)
            if told is None or told.fault is not None:
                told = self._read(process)
            self._told[process.key] = told
        yield from {told.fault for told in map(self._of, run.processes) if told.fault is not None}
        yield from self._launch(run, machine)
        yield from self._problems(run, network, gpus)
        yield from self._fingerprints(run)

    def _of(self, process: TrainingProcess) -> _Told:
        return self._told[process.key]

    def _read(self, process: TrainingProcess) -> _Told:
        part = process.part
        configured: Mapping[str, str] = {}
        more, orphaned = b"", None
        if (fault := self.context.entering(part)) is None:
            try:
                started = started_by(self.host, process.pid, process.parent)
                orphaned = None if started is None else not started
                with Root.of_process(self.host, process.pid) as root:
                    text = root.read("/etc/nccl.conf", _CONFIGURATION_LIMIT)
                configured, more = parse_configuration(text)
            except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
                pass  # usually there is none
            except (OSError, ValueError, ArithmeticError) as error:
                fault = fault_of(part, error)
        settings = {**configured, **process.environment}
        names = frozenset(process.nccl | nccl_variables(more))
        findings = frozenset((*problems.names(names), *problems.values(settings)))
        return _Told(settings, names, findings, orphaned, fault)

    def _believed(self, process: TrainingProcess, told: _Told) -> Iterable[Finding]:
        """Return the findings without names that the process's own NCCL does read.

        NCCL is mapped some time after the process starts, so this is checked each time.
        """
        doubtful = {finding for finding in told.findings if finding[1] in _DOUBTFUL}
        if not doubtful or self.context.entering(process.part) is not None:
            return told.findings
        try:
            library = self._releases.library(self.host, process.pid)
        except (UnknownRelease, OSError):
            return told.findings
        if newer(library.versions) and len(library.variables) < _LISTED:
            return told.findings - doubtful
        unread = set(problems.names(told.names - library.variables))
        return told.findings - doubtful | doubtful & unread

    def _launch(self, run: Run, machine: str) -> Iterator[Sample]:
        labels = run.job, run.name
        first = run.ranks[min(run.ranks)][0]
        yield INFO(1, *labels, launched_by(first.environment, first.launch))
        if run.world_size is not None:
            yield WORLD_SIZE(run.world_size, *labels)
        if (port := natural(run.rendezvous["MASTER_PORT"])) is not None:
            yield PORT(port, *labels)
        yield RANKS(len(run.ranks), *labels)
        yield LOWEST(min(run.ranks), *labels)
        declined = [
            rank
            for rank, (process, *_) in run.ranks.items()
            if process.environment.get("DSHEALTHD_HEARTBEAT") == "0"
        ]
        yield DECLINED(len(declined), *labels)
        if held := frozenset().union(*(held_gpus(one.environment) for one in run.processes)):
            terminal = any(process.terminal for process in run.processes)
            yield HELD(len(held), *labels, str(terminal).lower())
        counts = {rank: self._alike(members) for rank, members in run.ranks.items()}
        most_first = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        for rank, count in most_first[:MAX_RANKS]:
            yield PROCESSES(count, *labels, str(rank))
        orphaned = [self._orphaned(process) for process in run.processes]
        if None not in orphaned or True in orphaned:
            yield ORPHANED(orphaned.count(True), *labels)
        for variable, kin in run.without(machine).items():
            yield KIN(1, *labels, variable, f"{kin:012x}")

    def _alike(self, members: list[TrainingProcess]) -> int:
        """Return how many processes with the environment of one rank run the same program.

        A daemon that a rank leaves behind has the same environment, but another program.
        """
        programs: Counter[str] = Counter()
        for process in members:
            try:
                programs[os.readlink(self.host.proc(f"{process.pid}/exe"))] += 1
            except OSError:
                programs[""] += 1  # it has ended, or access is denied
        return programs.most_common(1)[0][1]

    def _orphaned(self, process: TrainingProcess) -> bool | None:
        try:
            if read_stat(self.host, process.pid).parent != process.parent:
                return True
        except (OSError, ValueError, ArithmeticError):
            return None
        return self._of(process).orphaned

    def _problems(
        self, run: Run, network: NetworkDevices, gpus: int | None
    ) -> Iterator[Sample | Fault]:
        ranks: dict[Finding, set[int]] = defaultdict(set)
        for rank, members in run.ranks.items():
            for process in members:
                told = self._of(process)
                for finding in (
                    *self._believed(process, told),
                    *problems.place(process.launch, process.environment, gpus, mixed=self._mixed),
                ):
                    ranks[finding].add(rank)
                if (text := told.settings.get("NCCL_IB_HCA")) is not None:
                    for finding in problems.adapters(text, network.ports()):
                        ranks[finding].add(rank)
                if (text := told.settings.get("NCCL_SOCKET_IFNAME")) is not None:
                    try:
                        interfaces = network.interfaces(process.pid, process.network)
                    except (FileNotFoundError, ProcessLookupError):
                        continue  # it has ended
                    except OSError as error:
                        yield fault_of(f"job {run.job}", error)
                        continue
                    for finding in problems.interface(text, interfaces, many_nodes=run.many_nodes):
                        ranks[finding].add(rank)
        first = {rank: self._of(members[0]) for rank, members in run.ranks.items()}
        settings = {rank: told.settings for rank, told in first.items() if told.fault is None}
        for rank, finding in problems.differing(settings):
            ranks[finding].add(rank)
        for (variable, problem), those in sorted(ranks.items())[:MAX_PROBLEMS]:
            yield PROBLEMS(len(those), run.job, run.name, str(min(those)), variable, problem)

    def _fingerprints(self, run: Run) -> Iterator[Sample]:
        told = [self._of(process) for process in run.processes]
        if any(one.fault is not None for one in told):
            return  # it may be set where that cannot be read
        yield FINGERPRINT(0, run.job, run.name, "")
        for variable in NCCL_COMMON:
            found = {one.settings.get(variable) for one in told}
            if found != {None}:
                yield FINGERPRINT(digest(*_ordered(found)), run.job, run.name, variable)

    def _gpus(self) -> tuple[int | None, bool]:
        """Return the number of GPUs available to jobs, None if the bus cannot be read, and whether
        they are of several models.
        """
        gpus, mixed = None, False
        with contextlib.suppress(OSError):
            gpus = len(bus(self.host).gpus())
            mixed = len(bus(self.host).models()) > 1
        return gpus, mixed


def _claim(run: Run) -> Claim:
    started = min(process.start for process in run.processes)
    return run.processes[0].user, (run.job, run.name), started


def _ordered(found: Iterable[str | None]) -> list[str]:
    """Return the values of a setting, with "unset" distinct from any value."""
    return sorted("unset" if value is None else f"={value}" for value in found)
