"""Findings about the host: memory, files, threads, sockets, rendezvous, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.series import RECENT, each, logged, over, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dshealthd.findings.series import Point, Series

REFUSED = (
    "its MASTER_ADDR answers and refuses connections to MASTER_PORT: rank 0 has not started, has "
    "ended, or is on another node"
)
BUSY, NEAR = "DshealthdRendezvousPortsBusy", "DshealthdHostLimitNear"
UNREACHABLE = "DshealthdRendezvousUnreachable"
OUTCOMES = {
    "timed_out": "no answer, as when a firewall drops packets",
    "unreachable": "no route, or a firewall that rejects",
    "name_unknown": "the name does not resolve there",
    "failed": "the connection fails",
}
"""Why ranks cannot reach their master, by the outcome of the agent's own attempt."""


HOUR, DAY = 3600.0, 86400.0
ERRORS = (
    (
        ("memory_error_uncorrected",),
        1,
        HOUR,
        "its memory",
        "has had errors that ECC did not correct",
    ),
    (("machine_check",), 1, HOUR, "its processor", "has reported machine checks"),
    (("kernel_oops",), 1, HOUR, "the kernel", "has hit a bug, and may have left locks behind"),
    (("kernel_panic",), 1, HOUR, "the kernel", "has panicked"),
    (("hard_lockup",), 1, HOUR, "a CPU", "was locked up"),
    (
        ("soft_lockup", "rcu_stall", "hung_task"),
        3,
        RECENT,
        "the kernel",
        "finds CPUs or processes stuck again and again",
    ),
    (("memory_error_corrected",), 101, DAY, "its memory", "has had many corrected errors in a day"),
    (("cpu_throttled",), 10, HOUR, "its processor", "is slowed down by heat"),
    (("allocation_failure",), 10, RECENT, "the kernel", "finds no large pieces of memory"),
    (("nvidia_version_mismatch",), 1, RECENT, "a library of the GPU driver", "is not its version"),
    (("nvlink_detect_failed",), 1, RECENT, "the GPU driver", "finds no other end of some NVLinks"),
    # Single ones come with a job that is killed.
    (("peermem_error",), 10, RECENT, "nvidia-peermem", "logs errors"),
)
"""Events of the kernel log, how many lines there must be and in how many seconds, and words for them."""
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
    limit: str,
    source: str,
    part: str = "the system",
    job: str = "",
) -> Iterator[Sign]:
    """Yield a sign if this share of the limit of `what` is too much."""
    return over(series, NEAR, value, limit, source, what, part=part, job=job, apart=what)


def memory(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about pressure on the host's memory."""
    alert = "DshealthdHostMemoryPressure"
    for _, kills in series.rise("oom_kills_total", 300.0):
        if kills > 0:
            yield Sign(
                alert,
                "OOM kill: the kernel has killed processes",
                value=kills,
                source="oom_kills_total",
                apart="kill",
                hold=0.0,
            )
    stalled = series.value("pressure_stalled_ratio", resource="memory", tasks="full")
    yield from over(
        series,
        alert,
        stalled,
        "memory_pressure_ratio",
        "pressure_stalled_ratio",
        "all tasks wait for memory, and an OOM kill is near",
    )
    available = share(series.value("memory_available_bytes"), series.value("memory_total_bytes"))
    if available is not None and available < series.limits.memory_available_ratio:
        yield Sign(
            alert,
            "little memory is available, and an OOM kill is near",
            value=available,
            limit="memory_available_ratio",
            source="memory_available_bytes",
        )
    requests = share(series.value("aio_requests"), series.value("aio_requests_limit"))
    yield from _near(
        series, "asynchronous I/O requests", requests, "aio_requests_ratio", "aio_requests"
    )
    for labels, limit in series("job_locked_memory_limit_bytes"):
        job = labels["training_job"]
        locked = [value for _, value in series("job_locked_memory_bytes", training_job=job)]
        yield from _near(
            series,
            "lockable memory",
            share(max(locked, default=None), limit),
            "locked_memory_ratio",
            "job_locked_memory_bytes",
            part=f"job {job}",
            job=job,
        )


def files(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about open files and threads that are close to their limits."""
    for scope, files_open, limit in _limited(series, "open_files"):
        job = files_open.labels["training_job"]
        value = files_open.value / limit
        # The process closest to its limit may belong to a job, which has its own finding.
        of_job = (
            other.value / most for _, other, most in _limited(series, "open_files", scope="job")
        )
        if scope != "process" or value > max(of_job, default=0.0):
            yield from _near(
                series,
                "open files",
                value,
                "open_files_ratio",
                "open_files",
                part={"job": f"job {job}", "process": "a process"}.get(scope, "the system"),
                job=job,
            )
    used = share(series.value("threads"), series.value("threads_limit"))
    yield from _near(series, "threads", used, "threads_ratio", "threads")
    for labels, value in series("job_threads"):
        yield from _near(
            series,
            "threads",
            share(value, series.value("job_threads_limit", **labels)),
            "threads_ratio",
            "job_threads",
            part=f"job {labels['training_job']}",
            job=labels["training_job"],
        )


def _limited(series: Series, name: str, **labels: str) -> Iterator[tuple[str, Point, float]]:
    """Yield scope, series and limit of a metric whose limit is known and not 0."""
    for point in series(name, **labels):
        if limit := series.value(f"{name}_limit", **point.labels):
            yield point.labels["scope"], point, limit


def sockets(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about sockets that run out, and about a broken loopback."""
    # Where no local port was free, the loopback is not what is broken.
    no_port = any(
        value > 0
        for _, value in series.rise("loopback_connections_total", 300.0, outcome="no_port")
    )
    if series.value("loopback_up") == 0 and not no_port:
        yield Sign("DshealthdLoopbackRefused", "fail", source="loopback_up")
    for _, seconds in series.lowest("loopback_connect_seconds", 60.0):
        yield from over(
            series,
            "DshealthdLoopbackRefused",
            seconds,
            "loopback_connect_seconds",
            "loopback_connect_seconds",
            "take hundreds of times as long as they should",
            apart="slow",
            mild=True,
            hold=60.0,
        )
    for what, name, value, limit in (
        (
            "ephemeral ports",
            "tcp_ephemeral_ports_used",
            share(series.value("tcp_ephemeral_ports_used"), series.value("tcp_ephemeral_ports")),
            "ephemeral_ports_ratio",
        ),
        (
            "sockets in TIME_WAIT",
            "tcp_sockets",
            share(
                series.value("tcp_sockets", state="time_wait"), series.value("tcp_time_wait_limit")
            ),
            "time_wait_ratio",
        ),
        (
            "tracked connections",
            "conntrack_entries",
            share(series.value("conntrack_entries"), series.value("conntrack_entries_limit")),
            "conntrack_ratio",
        ),
    ):
        yield from _near(series, what, value, limit, name)


def rendezvous(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about rendezvous ports, and about ranks that cannot reach their master."""
    # Sockets in TIME_WAIT are in use as well: where they are the reason, it is the only one.
    used = share(series.value("rendezvous_ports_used"), series.value("rendezvous_ports"))
    for reason, value, limit, name in (
        (
            "are held by sockets in TIME_WAIT",
            series.value("rendezvous_sockets", state="time_wait"),
            "rendezvous_time_wait_sockets",
            "rendezvous_sockets",
        ),
        ("are mostly in use", used, "rendezvous_ports_ratio", "rendezvous_ports_used"),
    ):
        yield from over(series, BUSY, value, limit, name, reason, part="rendezvous ports")
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
            UNREACHABLE,
            "packets are dropped on the way, or MASTER_ADDR is wrong",
            part="a job",
            hold=75.0,
            value=unanswered,
            source=name,
        )
    name = "job_master_connection"
    for labels, value in series(name):
        outcome = labels["outcome"]
        if value == 1 and outcome in {*OUTCOMES, "refused"}:
            refused = outcome == "refused"
            # Rank 0 listens only once it calls init_process_group: loading before that may take
            # minutes.
            yield Sign(
                "DshealthdRanksStuckAtInit" if refused else UNREACHABLE,
                REFUSED if refused else OUTCOMES[outcome],
                job=labels["training_job"],
                source=name,
                apart="rank 0" if refused else "",
                hold=900.0 if refused else None,
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
    if series.value("clock_synchronized") == 0:
        yield Sign(
            "DshealthdClockWrong",
            "not synchronized by any time daemon",
            source="clock_synchronized",
        )
    offset = series.value("probe_clock_offset_seconds", statistic="median")
    yield from over(
        series,
        "DshealthdClockWrong",
        None if offset is None else abs(offset),
        "clock_offset_seconds",
        "probe_clock_offset_seconds",
        "off from the median of its peers' clocks",
    )


def errors(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield what the kernel logs about the host's hardware, about itself and about limits."""
    for events, at_least, seconds, part, reason in ERRORS:
        yield from logged(
            series,
            "DshealthdHostErrors",
            *events,
            at_least=at_least,
            seconds=seconds,
            part=part,
            reason=reason,
            apart=events[0],
        )
    for event, what, part in REACHED:
        lines = logged(series, NEAR, event, part=part, reason=what, apart=what)
        yield from each(lines, value=1.0)


RULES = (memory, files, sockets, rendezvous, clock, errors)
