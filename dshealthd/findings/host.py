"""Findings about the host: memory, files, sockets, storage, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.gpus import HUNG
from dshealthd.findings.limits import source as limit_source

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.findings.series import Point, Series

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's name for it
NO_SPACE = frozenset(("no_space", "quota_exceeded"))


def over(
    series: Series,
    alert: str,
    value: float | None,
    limit: str,
    source: str,
    labels: Mapping[str, str] | None = None,
    *,
    part: str = "",
    job: str = "",
) -> Iterator[Sign]:
    """Yield a sign about the host if `value` is above the limit of this name."""
    if value is not None and value > series.limit(limit):
        yield Sign(
            alert=alert,
            part=part,
            job=job,
            labels=labels or {},
            value=value,
            limit=series.limit(limit),
            limit_source=limit_source(limit),
            source=f"dshealthd_{source}",
        )


def share(part: float | None, whole: float | None) -> float | None:
    """Return `part` as a share of `whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def memory(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about pressure on the host's memory."""
    stalled = series.value("pressure_stalled_ratio", resource="memory", tasks="full")
    yield from over(
        series,
        "DshealthdHostMemoryStalls",
        stalled,
        "memory_pressure_ratio",
        "pressure_stalled_ratio",
    )
    available = share(series.value("memory_available_bytes"), series.value("memory_total_bytes"))
    if available is not None and available < series.limits.memory_available_ratio:
        yield Sign(
            alert="DshealthdHostMemoryLow",
            value=available,
            limit=series.limits.memory_available_ratio,
            limit_source=limit_source("memory_available_ratio"),
            source="dshealthd_memory_available_bytes",
        )
    requests = share(series.value("aio_requests"), series.value("aio_requests_limit"))
    yield from over(
        series, "DshealthdAioRequestsUsedUp", requests, "aio_requests_ratio", "aio_requests"
    )
    for labels, limit in series("job_locked_memory_limit_bytes"):
        locked = [point.value for point in series("job_locked_memory_bytes", job=labels["job"])]
        yield from over(
            series,
            "DshealthdLockedMemoryHigh",
            share(max(locked, default=None), limit),
            "locked_memory_ratio",
            "job_locked_memory_bytes",
            {**labels, "exported_job": labels["job"]},
        )


def files(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about open files and threads that are close to their limits."""
    for scope, files_open, limit in _limited(series, "open_files"):
        job = files_open.labels["job"]
        value = files_open.value / limit
        # The process closest to its limit may belong to a job, which has its own finding.
        of_job = (
            other.value / most for _, other, most in _limited(series, "open_files", scope="job")
        )
        if scope != "process" or value > max(of_job, default=0.0):
            yield from over(
                series,
                "DshealthdOpenFilesNearLimit",
                value,
                "open_files_ratio",
                "open_files",
                part={"job": f"job {job}", "process": "a process"}.get(scope, "the system"),
                job=job,
            )
    used = share(series.value("threads"), series.value("threads_limit"))
    yield from over(
        series, "DshealthdThreadsNearLimit", used, "threads_ratio", "threads", part="the system"
    )
    for labels, value in series("job_threads"):
        yield from over(
            series,
            "DshealthdThreadsNearLimit",
            share(value, series.value("job_threads_limit", **labels)),
            "threads_ratio",
            "job_threads",
            part=f"job {labels['job']}",
            job=labels["job"],
        )


def _limited(series: Series, name: str, **labels: str) -> Iterator[tuple[str, Point, float]]:
    """Yield scope, series and limit of a metric whose limit is known and not 0."""
    for point in series(name, **labels):
        if limit := series.value(f"{name}_limit", **point.labels):
            yield point.labels["scope"], point, limit


def sockets(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about ports and sockets that run out, and about a broken loopback."""
    if series.value("loopback_up") == 0:
        yield Sign(alert="DshealthdLoopbackRefused", value=0, source="dshealthd_loopback_up")
    seconds = series.value("loopback_connect_seconds")
    yield from over(
        series,
        "DshealthdLoopbackSlow",
        seconds,
        "loopback_connect_seconds",
        "loopback_connect_seconds",
    )
    waiting = series.value("rendezvous_sockets", state="time_wait")
    yield from over(
        series,
        "DshealthdRendezvousPortsInTimeWait",
        waiting,
        "rendezvous_time_wait_sockets",
        "rendezvous_sockets",
    )
    used = share(series.value("rendezvous_ports_used"), series.value("rendezvous_ports"))
    yield from over(
        series,
        "DshealthdRendezvousPortsUsedUp",
        used,
        "rendezvous_ports_ratio",
        "rendezvous_ports_used",
    )
    for labels, age in series("rendezvous_orphan_age_seconds"):
        if not series.value("rendezvous_orphan_connections", **labels):
            yield from over(
                series,
                "DshealthdRendezvousPortOrphaned",
                age,
                "orphan_listener_seconds",
                "rendezvous_orphan_age_seconds",
                labels,
            )
    name = "tcp_ephemeral_ports_used"
    used = share(series.value(name), series.value("tcp_ephemeral_ports"))
    critical = [
        *over(series, "DshealthdEphemeralPortsUsedUp", used, "ephemeral_ports_critical_ratio", name)
    ]
    yield from critical or over(
        series, "DshealthdEphemeralPortsLow", used, "ephemeral_ports_ratio", name
    )
    kept = share(
        series.value("tcp_sockets", state="time_wait"), series.value("tcp_time_wait_limit")
    )
    yield from over(series, "DshealthdTimeWaitLimitNear", kept, "time_wait_ratio", "tcp_sockets")


def storage(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about paths that hang, fail, are slow or full."""
    yield from _shared_memory(series)
    read_only = series.parts("filesystem_read_only", "path")
    full = set()
    for labels, value in series("path_failing"):
        reason = labels["reason"]
        if value != 1:
            continue
        if reason in NO_SPACE:
            if labels["path"] != SHARED_MEMORY and (labels["path"],) not in read_only:
                full.add(labels["path"])
                yield Sign(
                    alert="DshealthdFilesystemFull",
                    labels=labels,
                    source="dshealthd_path_failing",
                )
            continue
        alert = "DshealthdPathHangs" if reason in HUNG else "DshealthdPathFailing"
        yield Sign(alert=alert, labels=labels, source="dshealthd_path_failing")
    for labels, seconds in series("path_write_seconds"):
        yield from over(
            series, "DshealthdPathSlow", seconds, "path_write_seconds", "path_write_seconds", labels
        )
    for free, total in (
        ("filesystem_free_bytes", "filesystem_size_bytes"),
        ("filesystem_files_free", "filesystem_files"),
    ):
        for labels, value in series(free):
            left = share(value, series.value(total, **labels))
            used = None if left is None else 1 - left
            if labels["path"] == SHARED_MEMORY or labels["path"] in full:
                continue
            if (labels["path"],) in read_only:
                continue
            critical = [
                *over(
                    series,
                    "DshealthdFilesystemFull",
                    used,
                    "filesystem_used_critical_ratio",
                    free,
                    labels,
                )
            ]
            yield from critical or over(
                series, "DshealthdFilesystemFilling", used, "filesystem_used_ratio", free, labels
            )


def _shared_memory(series: Series) -> Iterator[Sign]:
    """Yield findings about shared memory that is full, or too small for a node with GPUs."""
    path = {"path": SHARED_MEMORY}
    size = series.value("filesystem_size_bytes", **path)
    left = share(series.value("filesystem_free_bytes", **path), size)
    yield from over(
        series,
        "DshealthdSharedMemoryFull",
        None if left is None else 1 - left,
        "filesystem_used_ratio",
        "filesystem_free_bytes",
        path,
    )
    if (
        size is not None
        and size < series.limits.shared_memory_bytes
        and series.value("gpus_expected")
    ):
        yield Sign(
            alert="DshealthdSharedMemorySmall",
            labels=path,
            value=size,
            limit=series.limits.shared_memory_bytes,
            limit_source=limit_source("shared_memory_bytes"),
            source="dshealthd_filesystem_size_bytes",
        )


def clock(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about a clock that is not synchronised, or that differs from the peers'."""
    if series.value("clock_synchronized") == 0:
        yield Sign(
            alert="DshealthdClockUnsynchronized", value=0, source="dshealthd_clock_synchronized"
        )
    offset = series.value("probe_clock_offset_seconds", statistic="median")
    if offset is not None and abs(offset) > series.limits.clock_offset_seconds:
        yield Sign(
            alert="DshealthdClockOff",
            value=abs(offset),
            limit=series.limits.clock_offset_seconds,
            limit_source=limit_source("clock_offset_seconds"),
            source="dshealthd_probe_clock_offset_seconds",
        )


RULES = (memory, files, sockets, storage, clock)
