"""Activity of training jobs between steps: file and network traffic, CPU time of child processes,
waits for services outside the job, and stopped or ended processes.

A job that moves bytes is at work, even if its ranks report nothing: it saves or uploads a
checkpoint, or loads data. So is a job whose compilers or data loaders compute. Heartbeats are not
needed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter

from dshealthd.core.collector import (
    Collector,
    CollectorOptions,
    Context,
    Fault,
    Metric,
    Sample,
    Worker,
    every,
    gauge,
)
from dshealthd.core.host import read_bytes
from dshealthd.core.result import fault_of, one_of_many
from dshealthd.core.text import printable
from dshealthd.jobs import shares
from dshealthd.jobs.environment import watchdog_seconds
from dshealthd.jobs.processes import ProcessTable, TrainingProcess, read_stat
from dshealthd.jobs.rank_processes import RankProcesses
from dshealthd.jobs.ras.address import PORT, parse_address
from dshealthd.linux import sock_diag
from dshealthd.linux.activity import BUSY, IDLE_BYTES, IDLE_SHARE, busiest, demands
from dshealthd.linux.process import TICKS, open_files
from dshealthd.linux.sock_diag import TcpState
from dshealthd.linux.socket_owners import parse_inode
from dshealthd.linux.socket_waits import peers_awaited, ports_served
from dshealthd.linux.starvation import parse_run_queue

FILES = gauge(
    "dshealthd_job_file_bytes_per_second",
    "Rate at which the job's processes on this node read and write files, since the previous "
    "sample. The larger of read_bytes + write_bytes in /proc/<pid>/io, which count pages, and "
    "rchar + wchar, which count read and write calls. If some of the processes cannot be read, "
    "absent unless the others move more than 10 kB/s.",
    "training_job",
)
SOCKETS = gauge(
    "dshealthd_job_socket_bytes_per_second",
    "Acknowledged TCP traffic, in both directions, of ranks on this node with an idle main "
    "thread, since the previous sample. For a job in its own network namespace: traffic of all "
    "interfaces except lo. Absent if no rank has an idle main thread; if some connections cannot "
    "be read, absent unless the others move more than 10 kB/s.",
    "training_job",
)
CHILDREN = gauge(
    "dshealthd_job_children_cpu_cores",
    "CPU cores that child processes of the job's ranks on this node, such as compilers and "
    "data loaders, used since the previous sample, or that one of them was ready to use. If some "
    "cannot be read, absent unless the others use more than half a core.",
    "training_job",
)
TROUBLE = gauge(
    "dshealthd_job_rank_trouble_seconds",
    "Time since a rank's process on this node was first seen stopped by a signal (stopped), "
    "waiting in the kernel for a file system or driver (blocked), or gone while other ranks of "
    "its run continue here: ended (exit status 0), failed, terminated, killed, crashed, or "
    "unknown. Absent for other ranks, and if all ranks of the run are stopped. After a run "
    "ends, the rank that was killed or crashed first is shown for ten minutes, unless all ranks "
    "were.",
    *("training_job", "rank", "what", "pid"),
)
AWAITS = gauge(
    "dshealthd_job_rank_awaits_info",
    "1 while a rank's main thread waits in the kernel for something outside the job: for "
    "terminal input, or for data over a TCP connection whose peer has acknowledged everything "
    "sent (peer: its address and port; not the job's MASTER_PORT). Absent otherwise, and if the "
    "agent lacks CAP_SYS_PTRACE.",
    *("training_job", "rank", "peer"),
)
SERVES = gauge(
    "dshealthd_job_rank_serves_info",
    "1 for a port on which a rank with an idle main thread listens, unless the kernel assigned "
    "the port: clients may use it. Excludes the job's MASTER_PORT and NCCL's RAS.",
    *("training_job", "rank", "port"),
)
CPU = gauge(
    "dshealthd_job_rank_cpu_cores",
    "CPU cores that the rank's process used since the previous sample: by its main thread "
    "(`main`), or by all its threads (`all`). If the main thread is idle, `all` includes time "
    "that a thread waited for a CPU. Absent while a signal or a debugger stops the process.",
    *("training_job", "rank", "threads"),
)
_MAIN, _ALL, _READY = "main", "all", "ready"
WATCHDOG = gauge(
    "dshealthd_job_watchdog_seconds",
    "Time after which the job's own watchdog ends it if a collective does not complete, from "
    "the environment of its processes here; 600 by default.",
    "training_job",
)
PROCESS = gauge(
    "dshealthd_job_process_info",
    "1; the job's first process on this node: its pid, its script or module, and its user ID.",
    *("training_job", "script", "user", "pid"),
)

MAX_PROCESSES = 4096
"""Most processes of jobs that are looked at in a sample, some 0.3 s: 64 ranks with 63 children
each. Users take turns, then jobs; the oldest first, so that each sample looks at the same ones.
"""
MAX_DESCRIPTORS = 32_768
"""Most descriptors looked at in a sample, about 0.1 s, of which each user has a share, and each job
of it: one can have millions.
"""
LOOKING = 0.25
"""Seconds in which the threads of ranks are looked at: an eighth of the deadline."""
BUDGET = 0.1
"""Seconds of CPU time that the dump of sockets may take."""
MAX_PORTS = 64
"""Most ports told of a user: a rank each of the largest nodes, and some of its children."""
_TAKE_ONE = {"-W", "-X"}
"""Options of Python's interpreter that are followed by a value."""
MAX_NAME = 64
"""Most characters of a script's name, which becomes a label that its user chooses."""
_SHOW_WORK = {FILES: IDLE_BYTES, SOCKETS: IDLE_BYTES, CHILDREN: BUSY}
"""Above what a job is at work. What a part of it does is the least that all of it does, so it is
told above that; below, what the job does is unknown.
"""


def parse_io(data: bytes) -> int:
    """Return the bytes read and written, from a `/proc/<pid>/io`; ValueError if it lacks them."""
    found = {}
    for line in data.split(b"\n"):
        name, _, value = line.partition(b":")
        if name in {b"rchar", b"wchar", b"read_bytes", b"write_bytes"}:
            found[name] = int(value)
    try:
        return max(found[b"rchar"] + found[b"wchar"], found[b"read_bytes"] + found[b"write_bytes"])
    except KeyError as error:
        raise ValueError(f"no {error.args[0].decode()}") from error


def parse_interfaces(data: bytes) -> int:
    """Return the bytes that the interfaces of a `/proc/<pid>/net/dev` received and sent, but for
    lo; ValueError if malformed.
    """
    total = 0
    for line in data.rstrip(b"\n").split(b"\n")[2:]:
        name, _, values = line.partition(b":")
        numbers = values.split()
        if len(numbers) < 9:  # noqa: PLR2004 - eight of receiving come before those of sending
            raise ValueError(f"not an interface: {line[:80]!r}")
        if name.strip() != b"lo":
            total += int(numbers[0]) + int(numbers[8])
    return total


class JobActivity(Collector):
    """Reads `/proc` for the processes of jobs, in the worker that holds the process table.

    The kernel makes a reader wait while the process executes another program.
    """

    worker = Worker.STORAGE

    Options = every("10s")

    def __init__(self, options: CollectorOptions, context: Context) -> None:
        super().__init__(options, context)
        self._at: float | None = None
        """When the sample before was taken."""
        self._before: Mapping[tuple[object, object], float] = {}
        """The counters at the sample before, by what is counted and where."""
        self._looked_at: set[int] = set()
        """The processes of which all connections were looked at in the sample before."""
        self._ranks = RankProcesses(self.host)
        self._demands: dict[tuple[int, int], Mapping[int, float]] = {}
        """Of ranks whose main thread was idle in the sample before, what their threads wanted."""
        self._scripts: dict[tuple[int, int], str] = {}
        """What each job's first process runs, by pid and start."""

    def close(self) -> None:
        """Release the processes that are followed."""
        self._ranks.close()

    def collect(self) -> Iterator[Sample | Fault]:
        """Yield what each job uses and moves; an unreadable process is a fault, never 0."""
        processes = self.context.shared(ProcessTable).refresh()
        whole = shares.jobs_with_places(processes)
        jobs = _with_turns(whole)
        now = self.context.monotonic()
        elapsed = None if self._at is None else now - self._at
        for trouble in self._ranks.troubles(processes, now):
            if trouble.job in jobs or trouble.over:
                labels = trouble.job, str(trouble.rank), trouble.what, str(trouble.pid)
                yield TROUBLE(trouble.seconds, *labels)
        counted: dict[tuple[object, object], float] = {}
        idle = {job: self._idle(job, members, elapsed) for job, members in jobs.items()}
        wanted = self._wanted(idle)
        sockets, known = self._sockets(idle)
        for job, members in jobs.items():
            partly = set() if job in known else {SOCKETS}
            if len(members) < len(whole[job]):
                partly = {*_SHOW_WORK}
            read = functools.partial(
                self._job, job, members, elapsed, counted, sockets[job], wanted, partly
            )
            yield from one_of_many(f"job {job}", read)
        yield from self._outside(idle)
        self._at, self._before = now, counted

    def _idle(
        self, job: str, members: list[TrainingProcess], elapsed: float | None
    ) -> list[TrainingProcess]:
        """Return the processes of those ranks whose main thread has done nothing since the sample
        before, as far as is known.

        Only of them it matters whether they move bytes, and the descriptors of a training that
        makes steps, whose data loaders have a copy of each, take most of a sample's time.
        """
        threads, children = self._ranks.threads.get(job, {}), _children(members)
        working = set()
        for process in members:
            if process.pid not in children and process.key in threads:
                before = self._before.get((_MAIN, process.key))
                ran = math.inf if before is None else threads[process.key][0] - before
                if ran >= IDLE_SHARE * (elapsed or 0.0):
                    working.add(process.launch.rank)
        return [process for process in members if process.launch.rank not in working]

    def _wanted(
        self, idle: Mapping[str, list[TrainingProcess]]
    ) -> dict[tuple[int, int], float | None]:
        """Return for how many seconds since the sample before a thread of each rank whose main one
        is idle ran, or waited for a CPU: the most of its threads; None where there was no time to
        look at them.
        """
        before, self._demands = self._demands, {}
        ranks = [
            process
            for job, members in idle.items()
            for process in members
            if process.key in self._ranks.threads.get(job, {})
        ]
        wanted: dict[tuple[int, int], float | None] = {process.key: None for process in ranks}
        until = self.context.monotonic() + LOOKING
        for process in shares.share_places(
            ranks, len(ranks), lambda one: (one.user, one.job, one.start)
        ):
            if self.context.monotonic() >= until:
                break
            now = self._demands[process.key] = demands(self.host, process.pid)
            wanted[process.key] = busiest(before.get(process.key, {}), now)
        return wanted

    def _job(
        self,
        job: str,
        members: list[TrainingProcess],
        elapsed: float | None,
        counted: dict[tuple[object, object], float],
        sockets: Mapping[object, tuple[float, bool]],
        wanted: Mapping[tuple[int, int], float | None],
        partly: set[Metric],
    ) -> Iterator[Sample | Fault]:
        """Yield what the processes of one job do, and add their counters to `counted`.

        Of what is `partly` known, only a part of the job was looked at.
        """
        before = self._before
        rises: defaultdict[object, list[float]] = defaultdict(list)

        def count(what: object, key: object, value: float, *, new: bool = False) -> None:
            counted[what, key] = value
            if (what, key) in before or new:
                rises[what].append(value - before.get((what, key), 0.0))

        children = _children(members)
        for process in members:
            if (fault := self.context.entering(process.part)) is not None:
                partly |= {FILES, CHILDREN}
                yield fault
                continue
            place = self.host.proc(str(process.pid))
            try:
                moved = parse_io(read_bytes(f"{place}/io"))
                stat = read_stat(self.host, process.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended
            except (OSError, ValueError, ArithmeticError) as error:
                partly |= {FILES, CHILDREN}
                yield fault_of(process.part, error)
                continue
            ticks = stat.children_ticks + (stat.cpu_ticks if process.pid in children else 0)
            count(FILES, process.key, moved)
            count(CHILDREN, process.key, ticks / TICKS)
            if process.pid in children:
                with contextlib.suppress(OSError, ValueError, ArithmeticError):  # no schedstat
                    waited = parse_run_queue(read_bytes(f"{place}/schedstat")).waiting
                    count(_READY, process.key, stat.cpu_ticks / TICKS + waited)
        for where, (moved_there, new) in sockets.items():
            count(SOCKETS, where, moved_there, new=new)
        if not sockets:
            rises[SOCKETS].append(0.0)
        ranks = {process.key: process.launch.rank for process in members}
        took: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
        for key, both in self._ranks.threads.get(job, {}).items():
            least = wanted.get(key, 0.0)
            for which, seconds in zip((_MAIN, _ALL), both, strict=True):
                counted[which, key] = seconds
                if key in ranks and (which, key) in before and least is not None:
                    ran = seconds - before[which, key]
                    took[ranks[key], which].append(max(ran, least if which == _ALL else 0.0))
        if rises[CHILDREN]:
            rises[CHILDREN] = [max(sum(rises[CHILDREN]), *rises[_READY], 0.0)]
        if elapsed:
            rates = {what: max(sum(rise), 0.0) / elapsed for what, rise in rises.items() if rise}
            for metric, shows in _SHOW_WORK.items():
                if metric in rates and (metric not in partly or rates[metric] > shows):
                    yield metric(rates[metric], job)
            for (rank, which), rise in took.items():
                yield CPU(max(rise) / elapsed, job, str(rank), which)
        yield WATCHDOG(min(watchdog_seconds(one.environment, 0) for one in members), job)
        yield from self._script_of_first(job, members)

    def _outside(self, idle: Mapping[str, list[TrainingProcess]]) -> Iterator[Sample]:
        """Yield for whom outside their job ranks wait, and on which ports they serve clients."""
        places: defaultdict[tuple[str, int | None], dict[int, TrainingProcess]] = defaultdict(dict)
        groups: defaultdict[tuple[str, int | None], dict[str, list[int]]] = defaultdict(dict)
        most = _descriptor_shares(idle)
        ranks = set()
        for job, members in idle.items():
            children = _children(members)
            for process in members:
                where = process.network, process.user
                places[where][process.pid] = process
                groups[where].setdefault(job, []).append(process.pid)
                if process.pid not in children:
                    ranks.add(process.pid)
        parts = Counter(itertools.chain.from_iterable(groups.values()))
        for where, found in places.items():
            # Lazily: each is entered right before its memory is read.
            waiting = (
                pid
                for pid in found.keys() & ranks
                if self.context.entering(found[pid].part) is None
            )
            for pid, peer in peers_awaited(self.host, waiting).items():
                process = found[pid]
                port = "" if isinstance(peer, str) else str(peer.port)
                if not port or port != process.environment.get("MASTER_PORT"):
                    yield AWAITS(1, process.job, str(process.launch.rank), str(peer))
            shared = ((pids, most[job] // parts[job]) for job, pids in groups[where].items())
            ports = {
                (process.job, process.launch.rank, own): (process.user, process.job, process.start)
                for pid, own in ports_served(self.host, *shared)
                if (process := found[pid]) and str(own) not in _own_ports(process)
            }
            served = shares.share_places(sorted(ports.items()), MAX_PORTS, itemgetter(1))
            for (job, rank, own), _ in served:
                yield SERVES(1, job, str(rank), str(own))

    def _script_of_first(self, job: str, members: list[TrainingProcess]) -> Iterator[Sample]:
        """Yield who runs what in a job: nothing where that cannot be read."""
        first = min(members, key=lambda process: (process.start, process.pid))
        key = first.pid, first.start
        running = {key for _, key in self._before}
        if key not in self._scripts and self.context.entering(first.part) is None:
            self._scripts = {  # and forget those of jobs that have ended
                known: script for known, script in self._scripts.items() if known in running
            }
            with contextlib.suppress(OSError):
                line = read_bytes(self.host.proc(f"{first.pid}/cmdline"))
                self._scripts[key] = script(line.split(b"\0"))
        if name := self._scripts.get(key):
            user = "" if first.user is None else str(first.user)
            yield PROCESS(1, job, name, user, str(first.pid))

    def _sockets(
        self, jobs: Mapping[str, list[TrainingProcess]]
    ) -> tuple[dict[str, dict[object, tuple[float, bool]]], set[str]]:
        """Return the bytes that each job's connections, or network namespaces, have moved so far,
        and whether a connection is new: then it has moved all of them since the sample before.
        Return also the jobs of which all connections were looked at.
        """
        found: dict[str, dict[object, tuple[float, bool]]] = {job: {} for job in jobs}
        known = {job for job, members in jobs.items() if members}
        owners: dict[int, tuple[str, bool]] = {}
        before, self._looked_at = self._looked_at, set()
        most = _descriptor_shares(jobs)
        for job, members in jobs.items():
            left = most.get(job, 0)
            for process in members:
                try:
                    if process.network:
                        if process.network not in found[job]:
                            place = self.host.proc(f"{process.pid}/net/dev")
                            moved = parse_interfaces(read_bytes(place))
                            found[job][process.network] = moved, False
                        continue
                    for link in itertools.islice(open_files(self.host, process.pid), left + 1):
                        left -= 1
                        if (inode := parse_inode(link)) is not None:
                            owners[inode] = job, process.pid in before
                    if left < 0:
                        known.discard(job)
                        break
                    self._looked_at.add(process.pid)
                except (FileNotFoundError, ProcessLookupError):  # it has ended
                    continue
                except (OSError, ValueError, ArithmeticError):  # access is denied
                    known.discard(job)
        if owners:
            try:
                for inode, count in sock_diag.bytes_moved(
                    TcpState.ESTABLISHED.mask, BUDGET
                ).items():
                    if inode in owners:
                        job, new = owners[inode]
                        found[job][inode] = count, new
            except (OSError, sock_diag.Interrupted, sock_diag.MalformedReply):
                known -= {job for job, _ in owners.values()}
        return found, known


def script(arguments: Sequence[bytes]) -> str:
    """Return the name of the script or module that a command line runs, without its directory; of
    another program than Python's interpreter that program's.
    """
    program, *rest = [os.fsdecode(argument) for argument in arguments] or [""]
    name = os.path.basename(program)
    if name.startswith("python"):
        for before, argument in itertools.pairwise([program, *rest]):
            if argument == "-c":  # what follows is the program itself
                break
            if before == "-m":
                name = argument
                break
            if argument and not argument.startswith("-") and before not in _TAKE_ONE:
                name = os.path.basename(argument)
                break
    return printable(name)[:MAX_NAME]


def _own_ports(process: TrainingProcess) -> set[str | None]:
    """Return the ports of a job at which its own ranks meet, and NCCL's RAS listens."""
    ras = PORT
    with contextlib.suppress(KeyError, ValueError, ArithmeticError):
        _, ras = parse_address(process.environment["NCCL_RAS_ADDR"])
    return {process.environment.get("MASTER_PORT"), str(ras)}


def _with_turns(jobs: Mapping[str, list[TrainingProcess]]) -> dict[str, list[TrainingProcess]]:
    """Return those processes of jobs that are looked at."""
    found: dict[str, list[TrainingProcess]] = {job: [] for job in jobs}
    for process in shares.share_places(
        itertools.chain.from_iterable(jobs.values()),
        MAX_PROCESSES,
        lambda one: (one.user, one.job, one.start),
    ):
        found[process.job].append(process)
    return found


def _descriptor_shares(jobs: Mapping[str, list[TrainingProcess]]) -> dict[str, int]:
    """Return how many descriptors of each job are looked at, of those that have processes."""
    owners = {job: members[0].user for job, members in jobs.items() if members}
    counts = Counter(owners.values())
    return {job: MAX_DESCRIPTORS // len(counts) // counts[user] for job, user in owners.items()}


def _children(members: list[TrainingProcess]) -> set[int]:
    """Return the pids of those processes whose parent is of the same rank."""
    ranks = {process.pid: process.launch.rank for process in members}
    return {
        process.pid
        for process in members
        if ranks.get(process.parent) == process.launch.rank and process.parent != process.pid
    }
