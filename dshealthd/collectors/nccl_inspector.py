"""Bandwidth and time of a job's own NCCL operations, from the files that NCCL's Inspector plugin
writes for Prometheus.

A job writes them where it runs with NCCL_PROFILER_PLUGIN, NCCL_INSPECTOR_ENABLE=1,
NCCL_INSPECTOR_PROM_DUMP=1 and a dump interval. They are found by the NCCL_INSPECTOR_DUMP_DIR of
training processes and in the configured directories. The format is read from the source of NCCL
2.29.3 to 2.30.7; no file of a real NCCL has been taken in yet.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Fault,
    NotAvailable,
    Reason,
    Sample,
    Worker,
    gauge,
)
from dshealthd.core.host import read
from dshealthd.core.options import Bytes, Duration, option
from dshealthd.core.result import os_reason
from dshealthd.jobs.nccl import inspector_files
from dshealthd.jobs.nccl.inspector import parse
from dshealthd.jobs.nccl.inspector_files import Directories, FileRefused, InspectorFileState
from dshealthd.jobs.processes import ProcessTable
from dshealthd.linux.process_files import Root

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping

    from dshealthd.core.host import Host
    from dshealthd.jobs.nccl.inspector import Content, Figures, Operation
    from dshealthd.jobs.nccl.inspector_files import Directory, File

_LABELS = ("job", "uuid", "operation", "size", "nodes", "message")
BANDWIDTH = gauge(
    "dshealthd_job_nccl_bus_bandwidth_bytes_per_second",
    "Bus bandwidth of the job's operations on this GPU since the dump before, as nccl-tests "
    "counts it: geometric mean over its "
    "communicators of this size (ranks) and nodes, over algorithms and messages of this "
    "class. Job is unknown where nothing tells it.",
    *_LABELS,
)
SECONDS = gauge(
    "dshealthd_job_nccl_operation_seconds",
    "How long one operation took, waiting for other ranks included: arithmetic mean over the same.",
    *_LABELS,
)
WRITTEN = gauge(
    "dshealthd_job_nccl_inspector_written_timestamp_seconds",
    "Unix time at which the file of this GPU was last written.",
    "job",
    "uuid",
)
FILES = gauge(
    "dshealthd_nccl_inspector_files",
    "Files of the Inspector, by what became of them at the last collection: taken; or "
    "dropped as stale (older than max_age), elsewhere "
    "(another node's), foreign (owner), irregular (link, FIFO), too_large, unreadable, "
    "left_out (more than max_files).",
    "state",
)
MALFORMED = gauge(
    "dshealthd_nccl_inspector_malformed_lines",
    "Lines of the files taken that are not the Inspector's; they are left out.",
)
LEFT_OUT = gauge(
    "dshealthd_nccl_inspector_operations_left_out",
    "Operations that are not shown, as there are more than max_operations.",
)

VARIABLE = "NCCL_INSPECTOR_DUMP_DIR"
MAX_DIRECTORIES = 32
"""Directories that processes name and that are looked into."""
_UUID = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-f-]{36})$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class NcclInspectorOptions(CollectorOptions):
    """Options of this collector."""

    interval: Duration = option(
        "15s", "Time from one look to the next; the plugin writes every 30 s at most.", minimum="1s"
    )
    deadline: Duration = option(
        "5s", "How long one directory or file may take before it is given up.", minimum="10ms"
    )
    directories: tuple[str, ...] = option(
        [], "Directories looked into beside those that jobs name, below path.rootfs."
    )
    max_age: Duration = option(
        "2m",
        "Age beyond which a file is not taken; twice the dump interval of the jobs, and more.",
        minimum="31s",
    )
    max_files: int = option(64, "Files that are read.", minimum=1, maximum=10_000)
    max_bytes: Bytes = option(
        Bytes(1 << 18),
        "Length of a file beyond which it is not read; 24 KiB are usual.",
        minimum=4096,
    )
    max_operations: int = option(512, "Series of each metric.", minimum=1, maximum=10_000)

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield the options of NCCL's Inspector whose values cannot be used, and why."""
        if any(not path.startswith("/") for path in self.directories):
            yield "directories", "must be absolute paths"


class NcclInspector(Collector):
    """Runs in the worker for paths, as a directory of a job may be on a file system that hangs."""

    worker = Worker.STORAGE
    Options = NcclInspectorOptions

    @classmethod
    def absent(cls, options: NcclInspectorOptions, host: Host) -> str | None:  # noqa: ARG003 - as every collector
        """Say that there is no driver that NCCL, whose Inspector writes, could use."""
        places = (host.device("nvidiactl"), host.device("dxg"), host.sys("module/nvidia"))
        return None if any(map(os.path.exists, places)) else "no NVIDIA driver, and so no NCCL"

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield what the Inspector's files tell; one that is not taken is counted, a directory that
        cannot be read is a fault.
        """
        jobs: dict[int, set[str]] = defaultdict(set)
        directories = Directories()
        states: Counter[InspectorFileState] = Counter()
        taken: list[tuple[str, File, Content]] = []
        try:
            faults = [*self._named(directories, jobs), *self._configured(directories, jobs)]
            yield from faults
            if not directories and not faults:
                message = f"no training process names a directory that is there by {VARIABLE}, and none is configured"
                raise NotAvailable(message)
            uuids = self._uuids() if directories else frozenset[str]()
            files = yield from self._list(directories, uuids, states)
            for directory, name in files[: self.options.max_files]:
                if (
                    self.context.entering(directory.part) is None
                    and (file := self._read(directory, name, states)) is not None
                ):
                    content = parse(file.text)
                    # In a directory that nodes share. A host name is the second choice, as a
                    # container has its own.
                    if not uuids and os.uname().nodename not in {
                        operation.node for operation in content.operations
                    }:
                        states[InspectorFileState.ELSEWHERE] += 1
                        continue
                    states[InspectorFileState.TAKEN] += 1
                    taken.append(
                        (_job(content, directory.jobs, jobs.get(file.owner, set())), file, content)
                    )
            states[InspectorFileState.LEFT_OUT] += max(0, len(files) - self.options.max_files)
        finally:
            for directory in directories.values():
                os.close(directory.descriptor)
        for state in InspectorFileState:
            yield FILES(states[state], state)
        yield MALFORMED(sum(content.malformed for _, _, content in taken))
        yield from self._samples(taken)

    def _named(self, directories: Directories, jobs: dict[int, set[str]]) -> Iterator[Fault]:
        """Open the Inspector's directories that training processes name, each seen as the process
        sees it, and note whose jobs there are.
        """
        seen: set[tuple[object, str]] = set()
        for process in self.context.shared(ProcessTable).refresh():
            path = process.environment.get(VARIABLE, "")
            part = f"inspector {path}"
            if process.user is not None:
                jobs[process.user].add(process.job)
            if not path or len(directories) >= MAX_DIRECTORIES:
                continue
            try:
                with Root.of_process(self.host, process.pid) as root:
                    owner = root.owner.uid
                    jobs[owner].add(process.job)
                    if (root.place, path) in seen:  # the ranks of a job, and the children of each
                        continue
                    seen.add((root.place, path))
                    if (fault := self.context.entering(part)) is not None:
                        yield fault
                        continue
                    directory = directories.add(root.open_directory(path), part)
            except OSError as error:
                # The process has gone, or nothing is written yet.
                if error.errno not in (errno.ENOENT, errno.ESRCH):
                    yield Fault(part, os_reason(error), str(error))
                continue
            except ValueError as error:
                yield Fault(part, Reason.MALFORMED, str(error))
                continue
            directory.owners.add(owner)
            directory.jobs.add(process.job)

    def _configured(
        self, directories: Directories, jobs: Mapping[int, set[str]]
    ) -> Iterator[Fault]:
        """Open the Inspector's directories that the collector's options name, in which those who
        train may write, and those to whom the directory or the node belongs.
        """
        for path in self.options.directories:
            part = f"inspector {path}"
            if (fault := self.context.entering(part)) is not None:
                yield fault
                continue
            try:
                with Root.of_owner(self.host.rootfs, path) as root:
                    descriptor, owner = root.open_directory(path), root.owner.uid
            except OSError as error:
                yield Fault(part, os_reason(error), str(error))
                continue
            directories.add(descriptor, part).owners |= {owner, os.geteuid(), 0, *jobs}

    def _uuids(self) -> frozenset[str]:
        """Return the UUIDs of this node's GPUs, which Inspector files name; none if unknown."""
        place = self.host.proc("driver/nvidia/gpus")
        try:
            texts = [read(f"{place}/{slot}/information", 4096) for slot in os.listdir(place)]
        except OSError:
            return frozenset()
        return frozenset(match[1] for text in texts if (match := _UUID.search(text)))

    def _list(
        self, directories: Directories, uuids: Collection[str], states: Counter[InspectorFileState]
    ) -> Generator[Fault, None, list[tuple[Directory, str]]]:
        """Return the Inspector's files of this node's GPUs by their names, and count those that are
        known to be of others.
        """
        found = []
        for directory in directories.values():
            if (fault := self.context.entering(directory.part)) is not None:
                yield fault
                continue
            try:
                names = inspector_files.names(directory.descriptor)
            except OSError as error:
                yield Fault(directory.part, os_reason(error), str(error))
                continue
            own = [
                (directory, name)
                for name in names
                if not uuids or inspector_files.uuid(name) in uuids
            ]
            states[InspectorFileState.ELSEWHERE] += len(names) - len(own)
            found += own
        return found

    def _read(
        self, directory: Directory, name: str, states: Counter[InspectorFileState]
    ) -> File | None:
        """Return an Inspector file if it may be taken, and count it if not."""
        now, age = self.context.wall(), self.options.max_age
        try:
            return inspector_files.read(
                directory.descriptor,
                name,
                directory.owners,
                now - age,
                now + age,
                self.options.max_bytes,
            )
        except FileRefused as refusal:
            states[refusal.state] += 1
        except FileNotFoundError:
            return None  # removed since it was listed
        except OSError:
            states[InspectorFileState.UNREADABLE] += 1
        return None

    def _samples(self, taken: list[tuple[str, File, Content]]) -> Iterator[Sample]:
        """Yield the numbers of the Inspector, of each operation those written last."""
        written: dict[tuple[str, str], float] = {}
        shown: dict[tuple[str, str, str, str, str, str], Figures] = {}
        for job, file, content in sorted(taken, key=lambda entry: entry[1].written, reverse=True):
            written.setdefault((job, file.uuid), file.written)
            for operation, figures in sorted(
                content.operations.items(), key=lambda entry: _rank(entry[0])
            ):
                labels = (
                    job,
                    file.uuid,
                    operation.name,
                    operation.ranks,
                    operation.nodes,
                    operation.message,
                )
                shown.setdefault(labels, figures)
        for who, time in written.items():
            yield WRITTEN(time, *who)
        yield LEFT_OUT(max(0, len(shown) - self.options.max_operations))
        for labels, figures in list(shown.items())[: self.options.max_operations]:
            if figures.bandwidth is not None:
                yield BANDWIDTH(figures.bandwidth, *labels)
            if figures.seconds is not None:
                yield SECONDS(figures.seconds, *labels)


def _job(content: Content, named: set[str], users: set[str]) -> str:
    """Return the job that an Inspector file is of: the one it names, if its owner has that.

    Else the only one of its directory, or of its owner.
    """
    for job in {f"slurm-{operation.job}" for operation in content.operations if operation.job}:
        if job in users:
            return job
    for candidates in (named & users, users):
        if len(candidates) == 1:
            return next(iter(candidates))
    return "unknown"


def _rank(operation: Operation) -> tuple[int, str, str]:
    """Return where an NCCL operation stands where there is no room for all.

    Those of large communicators first.
    """
    return -int(operation.ranks), operation.name, operation.message
