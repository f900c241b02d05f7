"""Bandwidth and duration of a job's own NCCL operations, from the Prometheus files of NCCL's
Inspector plugin.

A job writes them if it runs with NCCL_PROFILER_PLUGIN, NCCL_INSPECTOR_ENABLE=1,
NCCL_INSPECTOR_PROM_DUMP=1 and a dump interval. The agent finds the files through
NCCL_INSPECTOR_DUMP_DIR of training processes, or where the site-wide switch puts them. The parser
follows the source of NCCL 2.29.3 to 2.30.7 and has not been tested with real files.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    NotAvailable,
    Sample,
    Worker,
    every,
    gauge,
)
from dshealthd.core.host import Host, read
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.jobs.nccl import inspector
from dshealthd.jobs.nccl.inspector import (
    Content,
    Directories,
    Directory,
    Figures,
    File,
    FileRefused,
    InspectorFileState,
    MeasuredOperation,
    parse,
)
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux.pci import driver_absent
from dshealthd.linux.process_root import Root

_LABELS = ("training_job", "uuid", "operation", "size", "nodes", "message")
BANDWIDTH = gauge(
    "dshealthd_job_nccl_bus_bandwidth_bytes_per_second",
    "Bus bandwidth of the job's operations on this GPU since the previous dump, as defined by "
    "nccl-tests: geometric mean over communicators of this size (ranks) and node count, over "
    "all algorithms. training_job is unknown if it cannot be determined.",
    *_LABELS,
)
SECONDS = gauge(
    "dshealthd_job_nccl_operation_seconds",
    "Mean duration of one operation, including waiting for other ranks; same labels.",
    *_LABELS,
)
FILES = gauge(
    "dshealthd_nccl_inspector_files",
    "Inspector files by outcome of the last collection: taken; or dropped as stale (older than "
    "two minutes), elsewhere (another node's), foreign (wrong owner), irregular (link, FIFO), "
    "too_large, unreadable, left_out (more than 64).",
    "state",
)
MALFORMED = gauge(
    "dshealthd_nccl_inspector_malformed_lines",
    "Lines in the accepted files that are not in the Inspector's format and were ignored.",
)

VARIABLE = "NCCL_INSPECTOR_DUMP_DIR"
SITE_PLUGIN = "/usr/lib/dshealthd/training/libnccl-profiler-inspector.so"
SITE_DIRECTORY = "/tmp/nccl-inspector-%d"  # noqa: S108 - files of other users are refused
"""Of a user's jobs that name none themselves, where the site has the plugin; its switch sets the
variable within a process, which `/proc` does not show (`deploy/training/site/dshealthd_site.py`).
"""
MAX_AGE = 120.0
"""Seconds after which a file is dropped; the plugin writes every 30 s at most."""
MAX_FILES, MAX_BYTES = 64, 1 << 18
"""Most files that are read, and the size above which one is not; 24 KiB is usual."""
MAX_OPERATIONS = 512
"""Most series of each metric."""
MAX_DIRECTORIES = 32
"""Most directories named by processes that are read."""
_UUID = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-f-]{36})$", re.MULTILINE)


@dataclass(slots=True)
class _Found:
    """What one collection has found."""

    uuids: frozenset[str] = frozenset()
    """Of this node's GPUs; empty if unknown."""
    jobs: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Jobs of each user."""
    states: Counter[InspectorFileState] = field(default_factory=Counter)
    taken: list[tuple[str, File, Content]] = field(default_factory=list)
    """Job, file and content."""


class NcclInspector(Collector):
    """Runs in the storage worker, as a job's directory may be on a hung file system."""

    worker = Worker.STORAGE
    Options = every("15s", within="5s")  # as long as a path of `filesystem` may take

    @classmethod
    # as every collector
    def absent(cls, options: CollectorOptions, host: Host) -> str | None:  # noqa: ARG003
        """Return why the collector is absent if there is no driver that NCCL could use."""
        return driver_absent(host)

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield the numbers in the Inspector's files; a dropped file is counted, an unreadable
        directory is a fault.
        """
        directories = Directories()
        found = _Found()
        try:
            faults = [*self._named(directories, found.jobs)]
            yield from faults
            if not directories and not faults:
                message = f"no training process has {VARIABLE} set to an existing directory"
                raise NotAvailable(message)
            found.uuids = self._uuids() if directories else frozenset[str]()
            files = yield from self._list(directories, found)
            for file in files[:MAX_FILES]:
                read = functools.partial(self._read_file, *file, found)
                yield from one_of_many(file[0].part, read)
            found.states[InspectorFileState.LEFT_OUT] += max(0, len(files) - MAX_FILES)
        finally:
            for directory in directories.values():
                os.close(directory.descriptor)
        for state in InspectorFileState:
            yield FILES(found.states[state], state)
        yield MALFORMED(sum(content.malformed for _, _, content in found.taken))
        yield from self._samples(found.taken)

    def _read_file(
        self, directory: Directory, name: str, uuid: str, found: _Found
    ) -> Iterator[Fault]:
        """Read an Inspector file of this node, with its job; count any other."""
        self.context.entering(directory.part)  # which was listed just before: it is not blocked
        now, states = self.context.wall(), found.states
        try:
            times = now - MAX_AGE, now + MAX_AGE
            file = inspector.read(
                directory.descriptor, name, uuid, directory.owners, *times, MAX_BYTES
            )
        except FileRefused as refusal:
            states[refusal.state] += 1
            return
        except FileNotFoundError:
            return  # removed since it was listed
        except OSError:
            states[InspectorFileState.UNREADABLE] += 1
            return
        content = parse(file.text)
        # In a directory that nodes share. The host name is only a fallback, as a container has its
        # own.
        if not found.uuids and os.uname().nodename not in {
            operation.node for operation in content.operations
        }:
            states[InspectorFileState.ELSEWHERE] += 1
            return
        states[InspectorFileState.TAKEN] += 1
        job = _job(content, directory.jobs, found.jobs.get(file.owner, set()))
        found.taken.append((job, file, content))
        yield from ()

    def _named(self, directories: Directories, jobs: dict[int, set[str]]) -> Iterator[Fault]:
        """Open the Inspector's directories that training processes name, as each process sees them,
        and note the jobs of each user.
        """
        seen: set[tuple[object, str]] = set()
        of_site = os.path.exists(self.host.root(SITE_PLUGIN))
        for process in self.context.shared(ProcessTable).refresh():
            named = process.environment.get(VARIABLE, "")
            part = f"inspector {named}" if named else f"inspector of user {process.user}"
            if process.user is not None:
                jobs[process.user].add(process.job)
            if not (named or of_site) or len(directories) >= MAX_DIRECTORIES:
                continue
            try:
                with Root.of_process(self.host, process.pid) as root:
                    owner = root.owner.uid
                    path = named or SITE_DIRECTORY % owner
                    jobs[owner].add(process.job)
                    if (root.place, path) in seen:  # the ranks of a job, and the children of each
                        continue
                    seen.add((root.place, path))
                    if (fault := self.context.entering(part)) is not None:
                        yield fault
                        continue
                    directory = directories.add(root.open_directory(path), part)
            except (FileNotFoundError, ProcessLookupError):
                continue  # the process has ended, or nothing is written yet
            except (OSError, ValueError, ArithmeticError) as error:
                yield fault_of(part, error)
                continue
            directory.owners.add(owner)
            directory.jobs.add(process.job)

    def _uuids(self) -> frozenset[str]:
        """Return the UUIDs of this node's GPUs, which Inspector files name; empty if unknown."""
        place = self.host.proc("driver/nvidia/gpus")
        try:
            texts = [read(f"{place}/{slot}/information") for slot in os.listdir(place)]
        except OSError:
            return frozenset()
        return frozenset(match[1] for text in texts if (match := _UUID.search(text)))

    def _list(
        self, directories: Directories, found: _Found
    ) -> Generator[Fault, None, list[tuple[Directory, str, str]]]:
        """Return the Inspector's files that, by name, are of this node's GPUs, each with its
        directory and GPU; count the others.
        """
        files = []
        for directory in directories.values():
            if (fault := self.context.entering(directory.part)) is not None:
                yield fault
                continue
            try:
                names = inspector.file_names(directory.descriptor)
            except OSError as error:
                yield fault_of(directory.part, error)
                continue
            own = [
                (directory, name, uuid)
                for name, uuid in names.items()
                if not found.uuids or uuid in found.uuids
            ]
            found.states[InspectorFileState.ELSEWHERE] += len(names) - len(own)
            files += own
        return files

    def _samples(self, taken: list[tuple[str, File, Content]]) -> Iterator[Sample]:
        """Yield the Inspector's numbers, the most recently written for each operation."""
        shown: dict[tuple[str, ...], Figures] = {}
        for job, file, content in sorted(taken, key=lambda entry: entry[1].written, reverse=True):
            for operation, figures in sorted(
                content.operations.items(), key=lambda entry: _rank(entry[0])
            ):
                _, _, *kept = operation  # without the job and the host, as its container has them
                shown.setdefault((job, file.uuid, *kept), figures)
        for labels, figures in list(shown.items())[:MAX_OPERATIONS]:
            if figures.bandwidth is not None:
                yield BANDWIDTH(figures.bandwidth, *labels)
            if figures.seconds is not None:
                yield SECONDS(figures.seconds, *labels)


def _job(content: Content, named: set[str], users: set[str]) -> str:
    """Return the job of an Inspector file: the one that it names, if its owner has that job.

    Else the only job of its directory, or of its owner.
    """
    for job in {f"slurm-{operation.job}" for operation in content.operations if operation.job}:
        if job in users:
            return job
    for candidates in (named & users, users):
        if len(candidates) == 1:
            return next(iter(candidates))
    return "unknown"


def _rank(operation: MeasuredOperation) -> tuple[int, str, str]:
    """Return the sort key by which NCCL operations get the limited series.

    Large communicators come first.
    """
    return -int(operation.ranks), operation.name, operation.message
