"""Settings of training jobs, from their environments.

Who they are, where they meet, and what of it does not fit them or this node.

Read from the environment that a process was started with, of allow-listed variables alone, and from
`/etc/nccl.conf` as the process sees it. What a program sets for itself later is not seen, nor are
`~/.nccl.conf` and the file that NCCL_CONF_FILE names. Processes whose environment cannot be read
are counted by `dshealthd_processes_unseen`.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    Reason,
    Sample,
    Worker,
    gauge,
)
from dshealthd.core.host import read_bytes
from dshealthd.core.options import Duration, option
from dshealthd.core.result import os_reason
from dshealthd.jobs import environment_problems as problems
from dshealthd.jobs.environment import NCCL_COMMON, launched_by, natural, nccl_variables
from dshealthd.jobs.environment_problems import Finding
from dshealthd.jobs.nccl.names import Misnomer, newer
from dshealthd.jobs.nccl.release import MappedReleases, UnknownRelease
from dshealthd.jobs.nccl.settings import parse_configuration
from dshealthd.jobs.network_devices import NetworkDevices
from dshealthd.jobs.processes import ProcessTable
from dshealthd.jobs.ranks import Ranks, digest
from dshealthd.jobs.shares import shared
from dshealthd.linux.pci import bus
from dshealthd.linux.process_files import Root
from dshealthd.linux.process_stat import parse_stat
from dshealthd.linux.socket_owners import started_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dshealthd.core.collector import Context
    from dshealthd.jobs.processes import TrainingProcess
    from dshealthd.jobs.ranks import Run

INFO = gauge(
    "dshealthd_job_run_info",
    "1 for each run that has ranks on this node, and what started them: torchrun, deepspeed, "
    "openmpi, pmi, slurm, torch (RANK set by "
    "something else). A run is the ranks that agree on where they meet and how many they "
    "are; a job of a scheduler may have several.",
    "job",
    "run",
    "launcher",
)
WORLD_SIZE = gauge(
    "dshealthd_job_world_size",
    "How many ranks the run has, by the environments of its ranks.",
    "job",
    "run",
)
PORT = gauge(
    "dshealthd_job_master_port",
    "MASTER_PORT of the run; absent where its launcher sets none.",
    "job",
    "run",
)
RANKS = gauge(
    "dshealthd_job_ranks",
    "Ranks of the run on this node; one that is used twice counts once.",
    "job",
    "run",
)
LOWEST = gauge("dshealthd_job_lowest_rank", "Lowest rank of the run on this node.", "job", "run")
PROCESSES = gauge(
    "dshealthd_job_processes",
    "Processes on this node that were started as this rank, their children left out: more "
    "than 1, or the same rank on two nodes, is a "
    "rank used twice. At most max_ranks of a run.",
    *("job", "run", "rank"),
)
ORPHANED = gauge(
    "dshealthd_job_orphaned_ranks",
    "Ranks whose process has lost the one that started it: left over from a run that was "
    "ended, or detached on purpose (nohup).",
    "job",
    "run",
)
KIN = gauge(
    "dshealthd_job_rendezvous_kin_info",
    "1; kin is a digest of where the run meets without one variable. Runs with the same kin "
    "differ in that variable alone, so that ranks "
    "which should have met are in them if only one of them has a rank 0.",
    *("job", "run", "variable", "kin"),
)
PROBLEMS = gauge(
    "dshealthd_job_environment_problems",
    "Ranks of the run on this node whose variable has this problem, of which rank is the "
    "lowest. Of a place: beyond, repeated, absent, "
    "down, loopback, unordered; a transport that is disabled; a port that is exposed; of a value: out_of_range, no_number, "
    "differs (from most ranks here); of a name: unread, "
    "retired, renamed, misspelt (variable is what is meant), unknown (variable is other). "
    "Absent is none.",
    *("job", "run", "rank", "variable", "problem"),
)
FINGERPRINT = gauge(
    "dshealthd_job_setting_fingerprint",
    "48 bits of a digest of what the ranks of the run on this node have for an NCCL setting "
    "that all ranks must have in common; absent "
    "where none of them sets it.",
    *("job", "run", "variable"),
)
LEFT_OUT = gauge(
    "dshealthd_job_runs_left_out",
    "Runs on this node that are not shown, as there are more than max_runs.",
)

MAX_PROBLEMS = 64
"""Of one run; a user may set any number of wrong variables."""
_DOUBTFUL = frozenset({Misnomer.MISSPELT, Misnomer.UNKNOWN})
"""What is said of a name only because no library that we know reads it."""
_LISTED = 100
"""Variables that a library at least names if it names them all; NCCL 2.24 has 148."""
_CONFIGURATION_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class _Told:
    """What a process was told, read once."""

    settings: Mapping[str, str]
    """Allowed variables, and what `/etc/nccl.conf` adds to them."""
    names: frozenset[str]
    """Names of all variables that are set for NCCL."""
    findings: frozenset[Finding]
    """What is wrong with names and values."""
    orphaned: bool | None
    """Whether its parent, as it was found, is not the one that started it."""
    fault: Fault | None
    """What could not be read of it."""


@dataclass(frozen=True, kw_only=True)
class JobEnvironmentOptions(CollectorOptions):
    """Options of the job environments."""

    interval: Duration = option(
        "15s", "Time from one look at the training processes to the next.", minimum="100ms"
    )
    max_runs: int = option(
        16,
        "Runs that get series of their own: users take turns, the oldest first.",
        minimum=1,
        maximum=1000,
    )
    max_ranks: int = option(
        64,
        "Ranks of a run that get series of their own; those that are used twice come first.",
        minimum=1,
    )


class JobEnvironment(Collector):
    """Looks at what the process table found.

    In the worker whose table it shares, as adapters and `/proc/<pid>/root` may hang.
    """

    worker = Worker.STORAGE

    Options = JobEnvironmentOptions

    def __init__(self, options: JobEnvironmentOptions, context: Context) -> None:
        """Look at nothing yet."""
        super().__init__(options, context)
        self._ranks = Ranks()
        self._releases = MappedReleases()
        self._told: dict[tuple[int, int], _Told] = {}
        self._mixed = False
        """Whether the node has GPUs of several models."""

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the runs, and what is wrong with the settings in their environments."""
        table = self.context.shared(ProcessTable)
        runs = self._ranks.runs(table.refresh(), table.machine)
        yield LEFT_OUT(max(0, len(runs) - self.options.max_runs))
        before, self._told = self._told, {}
        network, gpus = NetworkDevices(self.context), self._gpus() if runs else None
        self._mixed = bool(runs) and self._models() > 1
        for run in shared(
            runs,
            self.options.max_runs,
            lambda run: run.processes[0].user,
            lambda run: (run.job, run.name),
            lambda run: min(process.start for process in run.processes),
        ):
            for process in run.processes:
                key = process.pid, process.start
                self._told[key] = (
                    before[key]
                    if key in before and before[key].fault is None
                    else self._read(process)
                )
            yield from {
                told.fault for told in map(self._of, run.processes) if told.fault is not None
            }
            yield from self._launch(run, table.machine)
            yield from self._problems(run, network, gpus)
            yield from self._fingerprints(run)
        yield from network.faults

    def _of(self, process: TrainingProcess) -> _Told:
        return self._told[process.pid, process.start]

    def _read(self, process: TrainingProcess) -> _Told:
        """Return the settings of a training process, from its environment and `nccl.conf`."""
        part = f"process {process.pid}"
        configured: Mapping[str, str] = {}
        more, orphaned = b"", None
        if (fault := self.context.entering(part)) is None:
            started = started_by(self.host, process.pid, process.parent)
            orphaned = None if started is None else not started
            try:
                with Root.of_process(self.host, process.pid) as root:
                    text = root.read("/etc/nccl.conf", _CONFIGURATION_LIMIT)
                configured, more = parse_configuration(text)
            except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
                pass  # there is none, which is usual
            except OSError as error:
                fault = Fault(part, os_reason(error), str(error))
            except ValueError as error:
                fault = Fault(part, Reason.MALFORMED, str(error))
        settings = {**configured, **process.environment}
        names = frozenset(process.nccl | nccl_variables(more))
        findings = frozenset((*problems.names(names), *problems.values(settings)))
        return _Told(settings, names, findings, orphaned, fault)

    def _believed(self, process: TrainingProcess, told: _Told) -> Iterable[Finding]:
        """Leave out names in the environment that the NCCL of the process does read.

        It is mapped some time after the start of a process, so that this is asked again.
        """
        doubtful = {finding for finding in told.findings if finding[1] in _DOUBTFUL}
        if not doubtful or self.context.entering(f"process {process.pid}") is not None:
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
        """Yield what the environments of a job say of its launch: launcher, size, master port."""
        labels = run.job, run.name
        first = run.ranks[min(run.ranks)][0]
        yield INFO(1, *labels, launched_by(first.environment, first.launch))
        if run.world_size is not None:
            yield WORLD_SIZE(run.world_size, *labels)
        if (port := natural(run.rendezvous["MASTER_PORT"])) is not None:
            yield PORT(port, *labels)
        yield RANKS(len(run.ranks), *labels)
        yield LOWEST(min(run.ranks), *labels)
        counts = {rank: self._alike(members) for rank, members in run.ranks.items()}
        for rank, count in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))[
            : self.options.max_ranks
        ]:
            yield PROCESSES(count, *labels, str(rank))
        orphaned = [self._orphaned(process) for process in run.processes]
        if None not in orphaned or True in orphaned:
            yield ORPHANED(orphaned.count(True), *labels)
        for variable, kin in run.without(machine).items():
            yield KIN(1, *labels, variable, f"{kin:012x}")

    def _alike(self, members: list[TrainingProcess]) -> int:
        """Return how many processes with the environment of one rank run the same program.

        A daemon that a rank has left behind has its environment as well.
        """
        if len(members) == 1:
            return 1
        programs: Counter[str] = Counter()
        for process in members:
            try:
                programs[os.readlink(self.host.proc(f"{process.pid}/exe"))] += 1
            except OSError:
                programs[""] += 1  # it has ended, or one may not know
        return programs.most_common(1)[0][1]

    def _orphaned(self, process: TrainingProcess) -> bool | None:
        try:
            if (
                parse_stat(read_bytes(self.host.proc(f"{process.pid}/stat"), 4096)).parent
                != process.parent
            ):
                return True
        except (OSError, ValueError):
            return None
        return self._of(process).orphaned

    def _problems(
        self, run: Run, network: NetworkDevices, gpus: int | None
    ) -> Iterator[Sample | Fault]:
        """Yield what is wrong with the settings of a job, and with how many ranks."""
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
                        interfaces = network.interfaces(process.pid)
                    except (FileNotFoundError, ProcessLookupError):
                        continue  # it has ended
                    except OSError as error:
                        yield Fault(
                            f"job {run.job}",
                            os_reason(error),
                            f"interfaces of process {process.pid}: {error}",
                        )
                        continue
                    for finding in problems.interface(text, interfaces, many_nodes=run.many_nodes):
                        ranks[finding].add(rank)
        settings = {rank: self._of(members[0]).settings for rank, members in run.ranks.items()}
        for rank, finding in problems.differing(settings):
            ranks[finding].add(rank)
        for (variable, problem), those in sorted(ranks.items())[:MAX_PROBLEMS]:
            yield PROBLEMS(len(those), run.job, run.name, str(min(those)), variable, problem)

    def _fingerprints(self, run: Run) -> Iterator[Sample]:
        """Yield fingerprints of the settings that a job's nodes must have in common."""
        for variable in NCCL_COMMON:
            found = {self._of(process).settings.get(variable) for process in run.processes}
            if found != {None}:
                yield FINGERPRINT(digest(*_ordered(found)), run.job, run.name, variable)

    def _models(self) -> int:
        """Return of how many models the GPUs for jobs are; 0 if their bus cannot be read."""
        try:
            return len(bus(self.host).models())
        except OSError:
            return 0

    def _gpus(self) -> int | None:
        """Return how many GPUs the node has for jobs; None if its bus cannot be read."""
        try:
            return len(bus(self.host).gpus())
        except OSError:
            return None


def _ordered(found: Iterable[str | None]) -> list[str]:
    """Return values of a setting so that not to be set differs from all of them."""
    return sorted("unset" if value is None else f"={value}" for value in found)
