"""Findings about the host: memory, files, sockets, storage, clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.findings.finding import Sign
from dshealthd.findings.gpus import HUNG
from dshealthd.findings.limits import LIMITS, PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dshealthd.findings.series import Series

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's name for it
NO_SPACE = frozenset(("no_space", "quota_exceeded"))


def over(
    alert: str,
    value: float | None,
    limit: str,
    source: str,
    labels: Mapping[str, str] | None = None,
) -> Iterator[Sign]:
    """Yield a sign about the host if `value` is above the threshold named `limit`."""
    if value is not None and value > LIMITS[limit]:
        yield Sign(
            alert=alert,
            labels=labels or {},
            value=value,
            limit=LIMITS[limit],
            limit_source=PREFIX + limit,
            source=f"dshealthd_{source}",
        )


def share(part: float | None, whole: float | None) -> float | None:
    """Return `part` as a share of `whole`; None if either is unknown or the whole is 0."""
    return part / whole if part is not None and whole else None


def memory(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about pressure on the host's memory."""
    stalled = series.value("pressure_stalled_ratio", resource="memory", tasks="full")
    yield from over(
        "DshealthdHostMemoryStalls", stalled, "memory_pressure_ratio", "pressure_stalled_ratio"
    )
    available = share(series.value("memory_available_bytes"), series.value("memory_total_bytes"))
    if available is not None and available < LIMITS["memory_available_ratio"]:
        yield Sign(
            alert="DshealthdHostMemoryLow",
            value=available,
            limit=LIMITS["memory_available_ratio"],
            limit_source=f"{PREFIX}memory_available_ratio",
            source="dshealthd_memory_available_bytes",
        )
    requests = share(series.value("aio_requests"), series.value("aio_requests_limit"))
    yield from over("DshealthdAioRequestsUsedUp", requests, "aio_requests_ratio", "aio_requests")
    for labels, limit in series("job_locked_memory_limit_bytes"):
        locked = [point.value for point in series("job_locked_memory_bytes", job=labels["job"])]
        yield from over(
            "DshealthdLockedMemoryHigh",
            share(max(locked, default=None), limit),
            "locked_memory_ratio",
            "job_locked_memory_bytes",
            {**labels, "exported_job": labels["job"]},
        )


def files(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about limits on the host's open files that are nearly reached."""
    for labels, value in series("open_files"):
        limit = series.value("open_files_limit", **labels)
        used = share(value, limit)
        named = {**labels, "exported_job": labels["job"]}
        critical = [
            *over(
                "DshealthdOpenFilesExhausted",
                used,
                "open_files_critical_ratio",
                "open_files",
                named,
            )
        ]
        if labels["scope"] == "process":  # one process at its limit is not worth a page
            critical = []
        yield from critical or over(
            "DshealthdOpenFilesHigh", used, "open_files_ratio", "open_files", named
        )


def sockets(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about ports and sockets that run out, and about a broken loopback."""
    if series.value("loopback_up") == 0:
        yield Sign(alert="DshealthdLoopbackRefused", value=0, source="dshealthd_loopback_up")
    seconds = series.value("loopback_connect_seconds")
    yield from over(
        "DshealthdLoopbackSlow", seconds, "loopback_connect_seconds", "loopback_connect_seconds"
    )
    waiting = series.value("rendezvous_sockets", state="time_wait")
    yield from over(
        "DshealthdRendezvousPortsInTimeWait",
        waiting,
        "rendezvous_time_wait_sockets",
        "rendezvous_sockets",
    )
    used = share(series.value("rendezvous_ports_used"), series.value("rendezvous_ports"))
    yield from over(
        "DshealthdRendezvousPortsUsedUp", used, "rendezvous_ports_ratio", "rendezvous_ports_used"
    )
    for labels, age in series("rendezvous_orphan_age_seconds"):
        if not series.value("rendezvous_orphan_connections", **labels):
            yield from over(
                "DshealthdRendezvousPortOrphaned",
                age,
                "orphan_listener_seconds",
                "rendezvous_orphan_age_seconds",
                labels,
            )
    name = "tcp_ephemeral_ports_used"
    used = share(series.value(name), series.value("tcp_ephemeral_ports"))
    critical = [
        *over("DshealthdEphemeralPortsUsedUp", used, "ephemeral_ports_critical_ratio", name)
    ]
    yield from critical or over("DshealthdEphemeralPortsLow", used, "ephemeral_ports_ratio", name)
    kept = share(
        series.value("tcp_sockets", state="time_wait"), series.value("tcp_time_wait_limit")
    )
    yield from over("DshealthdTimeWaitLimitNear", kept, "time_wait_ratio", "tcp_sockets")


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
            "DshealthdPathSlow", seconds, "path_write_seconds", "path_write_seconds", labels
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
                    "DshealthdFilesystemFull", used, "filesystem_used_critical_ratio", free, labels
                )
            ]
            yield from critical or over(
                "DshealthdFilesystemFilling", used, "filesystem_used_ratio", free, labels
            )


def _shared_memory(series: Series) -> Iterator[Sign]:
    """Yield findings about shared memory that is full, or too small for a node with GPUs."""
    path = {"path": SHARED_MEMORY}
    size = series.value("filesystem_size_bytes", **path)
    left = share(series.value("filesystem_free_bytes", **path), size)
    yield from over(
        "DshealthdSharedMemoryFull",
        None if left is None else 1 - left,
        "filesystem_used_ratio",
        "filesystem_free_bytes",
        path,
    )
    if size is not None and size < LIMITS["shared_memory_bytes"] and series.value("gpus_expected"):
        yield Sign(
            alert="DshealthdSharedMemorySmall",
            labels=path,
            value=size,
            limit=LIMITS["shared_memory_bytes"],
            limit_source=f"{PREFIX}shared_memory_bytes",
            source="dshealthd_filesystem_size_bytes",
        )


def clock(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about a clock that is not synchronised, or that differs from the peers'."""
    if series.value("clock_synchronized") == 0:
        yield Sign(
            alert="DshealthdClockUnsynchronized", value=0, source="dshealthd_clock_synchronized"
        )
    offset = series.value("probe_clock_offset_seconds", statistic="median")
    if offset is not None and abs(offset) > LIMITS["clock_offset_seconds"]:
        yield Sign(
            alert="DshealthdClockOff",
            value=abs(offset),
            limit=LIMITS["clock_offset_seconds"],
            limit_source=f"{PREFIX}clock_offset_seconds",
            source="dshealthd_probe_clock_offset_seconds",
        )


RULES = (memory, files, sockets, storage, clock)
