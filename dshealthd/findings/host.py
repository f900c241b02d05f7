"""Findings about the host: memory, files, threads, sockets, rendezvous, clock."""

from __future__ import annotations

from collections.abc import Iterator

from dshealthd.findings.finding import Sign
from dshealthd.findings.past import DAY, HOUR, MINUTES_5
from dshealthd.findings.series import (
    RECENT,
    Point,
    Series,
    each,
    each_over,
    flagged,
    logged,
    over,
    share,
    some,
)
from dshealthd.findings.storage import waits_told

BUSY, NEAR = "DshealthdRendezvousPortsBusy", "DshealthdHostLimitNear"
ERROR = "DshealthdHostErrors"
MEET = "DshealthdRanksDoNotMeet"
SHRINKS = 60.0
"""Seconds over which available memory is seen to shrink."""
RUNS_OUT = 600.0
"""Seconds in which it is used up at that rate: a tenth of it a minute, more than buffers come and
go."""
UNCORRECTED = "has had errors that ECC did not correct"
CORRECTED = "has had many corrected errors in a day"
STUCK = "finds CPUs or processes stuck again and again"
CPUS_STUCK, WAITS = ("soft_lockup", "rcu_stall"), "hung_task"
CORRECTED_IN_A_DAY = 100
"""What mcelog allows a socket in 24 h before it speaks of it (mem-ce-error-threshold)."""
ERRORS = (
    (("memory_error_uncorrected",), 1, HOUR, "its memory", UNCORRECTED),
    (("machine_check",), 1, HOUR, "a CPU", "has reported uncorrected machine checks"),
    (("kernel_oops",), 1, HOUR, "the kernel", "has hit a bug, and may have left locks behind"),
    (("kernel_panic",), 1, HOUR, "the kernel", "has panicked"),
    (("hard_lockup",), 1, HOUR, "a CPU", "was locked up"),
    # The kernel tells of a process that waits every 120 s: of a checkpoint of four minutes twice.
    (CPUS_STUCK, 3, RECENT, "the kernel", STUCK),
    ((*CPUS_STUCK, WAITS), 3, RECENT, "the kernel", STUCK),
    (("memory_error_corrected",), CORRECTED_IN_A_DAY + 1, DAY, "its memory", CORRECTED),
    (("machine_check_corrected",), CORRECTED_IN_A_DAY + 1, DAY, "a CPU", CORRECTED),
    (("cpu_throttled",), 10, HOUR, "its processor", "is slowed down by heat"),
    # As many as the kernel writes of one moment, before it limits their rate.
    (("allocation_failure",), 10, RECENT, "the kernel", "finds no large pieces of memory"),
    (("nvidia_version_mismatch",), 1, RECENT, "a library of the GPU driver", "is not its version"),
    (("nvlink_detect_failed",), 1, RECENT, "the GPU driver", "finds no other end of some NVLinks"),
    # Single ones come with a job that is killed.
    (("peermem_error",), 10, RECENT, "nvidia-peermem", "logs errors"),
)
"""Events of the kernel log, how many lines there must be and in how many seconds, and words for
them."""
REACHED = (
    ("open_files_exhausted", "open files", "the system"),
    ("fork_rejected", "threads", "a control group"),
    ("time_wait_overflow", "sockets in TIME_WAIT", "the system"),
    ("conntrack_full", "tracked connections", "the system"),
)
"""Events that say that a limit was reached: of what, and whose."""


def _near(
    series: Series,
    what: str,
    value: float | None,
    source: str,
    part: str = "",
    job: str = "",
) -> Iterator[Sign]:
    """Yield a sign if this share of the limit of `what` is too much, by default of the job or the
    system.
    """
    part = part or (f"job {job}" if job else "the system")
    limit = "limit_used_ratio"
    return over(series, NEAR, value, limit, source, what, part=part, job=job, apart=what)


def memory(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about pressure on the host's memory."""
    alert, name = "DshealthdHostMemoryPressure", "oom_kills_total"
    reason = "OOM kill: the kernel has killed processes"
    for _, kills in series.rise(name, MINUTES_5):
        if kills > 0:
            yield Sign(alert, reason, value=kills, source=name, apart="kill", hold=0.0)
    name, reason = "pressure_stalled_ratio", "all tasks wait for memory, and an OOM kill is near"
    stalled = series.value(name, resource="memory", tasks="full")
    yield from over(series, alert, stalled, "memory_pressure_ratio", name, reason)
    yield from _running_out(series)
    name = "aio_requests"
    requests = share(series.value(name), series.value("aio_requests_limit"))
    yield from _near(series, "asynchronous I/O requests", requests, name)
    name = "job_locked_memory_bytes"
    for labels, limit in series("job_locked_memory_limit_bytes"):
        job = labels["training_job"]
        locked = max((value for _, value in series(name, training_job=job)), default=None)
        used = share(locked, limit)
        yield from _near(series, "lockable memory", used, name, job=job)


def _running_out(series: Series) -> Iterator[Sign]:
    """Yield a sign if tasks wait for the little memory that is left, or it goes on shrinking.

    What offloads its optimizer to the host fills it to the last percent on purpose, and stays
    there.
    """
    name = "memory_available_bytes"
    free = series.value(name)
    before = max((value for _, value in series.highest(name, SHRINKS)), default=free)
    available = share(free, series.value("memory_total_bytes"))
    if available is None or free is None or available >= series.limits.memory_available_ratio:
        return
    stalled = series.value("pressure_stalled_ratio", resource="memory", tasks="some") or 0.0
    shrinking = before is not None and (before - free) * RUNS_OUT > free * SHRINKS
    if stalled > series.limits.memory_pressure_ratio or shrinking:
        yield Sign(
            "DshealthdHostMemoryPressure",
            "little memory is available, and an OOM kill is near",
            value=available,
            limit="memory_available_ratio",
            source=name,
            hold=2 * SHRINKS,  # one that has just been filled still shows the way there
        )


def files(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about open files and threads that are close to their limits."""
    for scope, files_open, allowed in _limited(series, "open_files"):
        job = files_open.labels["training_job"]
        value = files_open.value / allowed
        # The process closest to its limit may belong to a job, which has its own finding.
        of_job = (
            other.value / most for _, other, most in _limited(series, "open_files", scope="job")
        )
        if scope != "process" or value > max(of_job, default=0.0):
            part = "a process" if scope == "process" else ""
            yield from _near(series, "open files", value, "open_files", part, job)
    used = share(series.value("threads"), series.value("threads_limit"))
    yield from _near(series, "threads", used, "threads")
    for labels, value in series("job_threads"):
        used = share(value, series.value("job_threads_limit", **labels))
        job = labels["training_job"]
        yield from _near(series, "threads", used, "job_threads", job=job)


def _limited(series: Series, name: str, **labels: str) -> Iterator[tuple[str, Point, float]]:
    """Yield scope, series and limit of a metric whose limit is known and not 0."""
    for point in series(name, **labels):
        if limit := series.value(f"{name}_limit", **point.labels):
            yield point.labels["scope"], point, limit


def sockets(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about sockets that run out, and about a broken loopback."""
    # Where no local port was free, the loopback is not what is broken.
    no_port = series.rise("loopback_connections_total", MINUTES_5, outcome="no_port")
    alert, name = "DshealthdLoopbackRefused", "loopback_connect_seconds"
    if not some(no_port):
        yield from flagged(series, alert, "loopback_up", "fail", at=0.0)
    reason = "take hundreds of times as long as they should"
    slow = each_over(series, alert, series.lowest(name, 60.0), name, name, reason)
    yield from each(slow, apart="slow", mild=True, hold=60.0)
    name = "tcp_ephemeral_ports_used"
    used = share(series.value(name), series.value("tcp_ephemeral_ports"))
    yield from _near(series, "ephemeral ports", used, name)
    name = "tcp_sockets"
    used = share(series.value(name, state="time_wait"), series.value("tcp_time_wait_limit"))
    yield from _near(series, "sockets in TIME_WAIT", used, name)
    name = "conntrack_entries"
    used = share(series.value(name), series.value("conntrack_entries_limit"))
    yield from _near(series, "tracked connections", used, name)


def rendezvous(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about rendezvous ports, and about ranks that cannot reach their master."""
    used = share(series.value("rendezvous_ports_used"), series.value("rendezvous_ports"))
    part = "rendezvous ports"
    limit, reason = "rendezvous_ports_ratio", "are mostly in use, or held by sockets in TIME_WAIT"
    yield from over(series, BUSY, used, limit, "rendezvous_ports_used", reason, part=part)
    for labels, age in series("rendezvous_orphan_age_seconds"):
        connections = series.value("rendezvous_orphan_connections", **labels) or 0
        # Rank 0 is connected to itself: that one is no use if it has lost its launcher and has no
        # other rank, as in a run whose other ranks have ended.
        if not connections or (connections == 1 and _rank_alone(series)):
            yield from over(
                series,
                BUSY,
                age,
                "orphan_listener_seconds",
                "rendezvous_orphan_age_seconds",
                "is held by a process that lost its parent, with no rank connected",
                part=f"port {labels['port']}",
                hold=15.0,
            )
    name = "rendezvous_client_sockets"
    unanswered = series.value(name, state="syn_sent")
    if unanswered:
        yield Sign(
            MEET,
            "its MASTER_ADDR cannot be reached: packets are dropped on the way, or it is wrong",
            part="a job",
            hold=75.0,
            value=unanswered,
            source=name,
        )


def _rank_alone(series: Series) -> bool:
    """Return whether a run here has only ranks without a launcher, and fewer than it began with."""
    for labels, orphaned in series("job_orphaned_ranks"):
        world = series.value("job_world_size", **labels)
        here = series.value("job_ranks", **labels)
        if world and here is not None and orphaned == here < world:
            return True
    return False


def clock(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield the finding that the clock is not synchronized, or differs from the peers'."""
    alert, reason = "DshealthdClockWrong", "not synchronized by any time daemon"
    yield from flagged(series, alert, "clock_synchronized", reason, at=0.0)
    name, reason = "probe_clock_offset_seconds", "off from the median of its peers' clocks"
    for _, offset in series(name, statistic="median"):
        yield from over(series, alert, abs(offset), "clock_offset_seconds", name, reason)


def errors(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield what the kernel logs about the host's hardware, about itself and about limits."""
    told = waits_told(series)
    for events, at_least, seconds, part, reason in ERRORS:
        lines = logged(
            series,
            ERROR,
            *events,
            part=part,
            at_least=at_least,
            seconds=seconds,
            reason=reason,
            together=True,
            apart=events[0],
        )
        signs = list(lines)  # asked for each time, because the past is kept of what is asked for
        if not told or WAITS not in events:
            yield from signs
    for event, what, part in REACHED:
        lines = logged(series, NEAR, event, part=part, reason=what, apart=what)
        yield from each(lines, value=1.0)


RULES = (memory, files, sockets, rendezvous, clock, errors)
