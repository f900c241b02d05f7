"""Findings about storage: paths that hang, fail or fill up, disks, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from dshealthd.core.collector import gauge
from dshealthd.findings.finding import Sign
from dshealthd.findings.gpus import HUNG
from dshealthd.findings.past import DAY, HOUR, MINUTES_5, MINUTES_15
from dshealthd.findings.series import (
    RECENT,
    Point,
    Series,
    by,
    each,
    each_over,
    logged,
    over,
    share,
    short_name,
)

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - the kernel's name for it
NO_SPACE = frozenset(("no_space", "quota_exceeded"))
SETTINGS = frozenset(("permission_denied", "not_found", "malformed"))
"""Reasons that a path had from the start, as a misspelled one has."""
OF_SERVERS = (
    "nfs_unresponsive",
    "nfs_state_lost",
    "lustre_connection_lost",
    "lustre_evicted",
    "lustre_operation_failed",
)
OF_DISKS = (
    "io_error",
    "filesystem_error",
    "filesystem_read_only",
    "raid_disk_failed",
    "nvme_path_lost",
)
NVME = {
    "nvme_failure": "has failed, and its driver has given it up",
    "nvme_timeout": "does not answer in time",
}
TROUBLE, HANGS = "DshealthdStorageTrouble", "hangs"
FULL = "DshealthdFilesystemFull"
FREE = "filesystem_free_bytes"
SPACE, INODES = (FREE, "filesystem_size_bytes"), ("filesystem_files_free", "filesystem_files")
STALL_SECONDS = 30.0
"""Seconds for which a path must hang: the agent gives up after 5, but a short stall of a shared
file system must not page for each of its nodes."""
WEEKEND = 3
"""Days at the rate of the last one in which a ticket must have an answer: nobody reads it on
two."""
REQUEST = gauge("dshealthd_disk_request_seconds", "Mean time of a request.", "disk")
"""Derived here, and kept for a day; not exported."""


def paths(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about paths that hang, fail or are slow."""
    for labels, value in series("path_failing"):
        reason = labels["reason"]
        if value != 1 or reason in NO_SPACE:
            continue
        setting, hangs = reason in SETTINGS, reason in HUNG
        yield Sign(
            "DshealthdPathFailing",
            HANGS if hangs else f"fails ({reason.replace('_', ' ')})",
            labels,
            source="path_failing",
            mild=setting,
            apart=HANGS if hangs else "",
            hold=STALL_SECONDS if hangs else MINUTES_5 if setting else None,
            keep=RECENT if hangs else None,
        )
    name = "path_write_seconds"
    lowest, reason = series.lowest(name, MINUTES_5), "is slow: writing 4 KiB takes seconds at best"
    yield from each_over(series, TROUBLE, lowest, name, name, reason, hold=MINUTES_5)


def space(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about file systems that are full, or will be."""
    read_only = {path for (path,) in series.parts("filesystem_read_only", "path")}
    apart = read_only | {SHARED_MEMORY}
    for labels, value in series("path_failing", reason=NO_SPACE):
        if value == 1 and labels["path"] not in apart:
            used = _used(series, labels["path"])
            reason = "had no space for a write, or its quota is used up"
            yield Sign(FULL, reason, labels, value=used, source="path_failing")
    highest = by(series.highest(FREE, DAY), "path", max)
    for labels, free in series(FREE):
        path = labels["path"]
        used = _used(series, path)
        if path in apart or used is None:
            continue
        inodes = _in_use(series, path, *INODES)
        # The last percent of a petabyte is room for many checkpoints; the last inode is not.
        crowded = free < series.limits.filesystem_free_bytes
        no_inodes = inodes is not None and inodes > series.limits.filesystem_used_critical_ratio
        limit = "filesystem_used_critical_ratio"
        reason = "has nearly all of its space or inodes in use"
        full = over(series, FULL, used, limit, FREE, reason, labels)
        signs = [*full] if crowded or no_inodes else []
        yield from signs
        # A large file system has room for days even then, if it is not being filled.
        filled = highest.get(path, free) - free
        room = free >= max(series.limits.filesystem_free_bytes, filled * WEEKEND)
        if not signs and (not room or inodes == used):
            limit = "filesystem_used_ratio"
            reason = "is filling up: most of its space or inodes are in use"
            filling = over(series, FULL, used, limit, FREE, reason, labels)
            yield from each(filling, mild=True, apart="filling", hold=MINUTES_5)
    yield from _soon(series, apart)
    yield from _shared_memory(series)


def _used(series: Series, path: str) -> float | None:
    """Return the share of a path's space or inodes in use, whichever is more."""
    shares = (_in_use(series, path, *each) for each in (SPACE, INODES))
    return max((one for one in shares if one is not None), default=None)


def _in_use(series: Series, path: str, free: str, total: str) -> float | None:
    left = share(series.value(free, path=path), series.value(total, path=path))
    return None if left is None else 1 - left


def _soon(series: Series, apart: set[str]) -> Iterator[Sign]:
    """Yield file systems that will be full soon at the rate of the last hour.

    What was freed within the hour counts: a disk that was emptied has its highest value now.
    """
    for labels, highest in series.highest(FREE, HOUR, full=True):
        free = series.value(FREE, **labels)
        if free is None or labels["path"] in apart or highest <= free:
            continue
        seconds = free / (highest - free) * HOUR
        if seconds < series.limits.filesystem_full_seconds:
            yield Sign(
                FULL,
                "is filling up: it will be full within hours at the rate of the last one",
                labels,
                mild=True,
                apart="filling",
                hold=MINUTES_5,
                value=_used(series, labels["path"]),
                limit="filesystem_full_seconds",
                source=FREE,
            )


def _shared_memory(series: Series) -> Iterator[Sign]:
    """Yield the finding that shared memory is full, or too small for a node with GPUs."""
    size = series.value("filesystem_size_bytes", path=SHARED_MEMORY)
    free = series.value(FREE, path=SHARED_MEMORY)
    left = share(free, size)
    small = size is not None and size < series.limits.shared_memory_bytes
    full = left is not None and 1 - left > series.limits.filesystem_used_ratio
    if full or (small and series.value("gpus_expected")):
        name = "filesystem_used_ratio" if full else "shared_memory_bytes"
        alert, reason = "DshealthdSharedMemoryLow", "full" if full else "too small"
        yield Sign(alert, reason, part=SHARED_MEMORY, value=free, limit=name, source=FREE)


def disks(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about disks that hang or are slow, and processes that wait for them."""
    # The path's own finding tells of its server, whose lines count for a while after it is back.
    # Asked for each time, because the past is kept of what is asked for; so below.
    lately = _hung_paths(series)
    reason = "did not answer, or has dropped this client"
    lines = logged(series, TROUBLE, *OF_SERVERS, part="a storage server", reason=reason)
    of_servers = list(lines)
    reason = "has errors, or the file system on it has"
    yield from logged(series, TROUBLE, *OF_DISKS, part="a disk", reason=reason)
    if not lately:
        yield from of_servers
    for event, reason in NVME.items():
        yield from logged(series, TROUBLE, event, part="an NVMe device", reason=reason)
    done = by(series.rise("disk_requests_total", MINUTES_5, full=True), "disk")
    for labels, requests in series.lowest("disk_requests_in_flight", MINUTES_5, full=True):
        # An idle disk has no request in flight; a busy one, however slow, completes some.
        if requests > 0 and done.get(labels["disk"]) == 0:
            yield Sign(
                TROUBLE,
                "has requests in flight and has completed none for minutes",
                labels,
                value=requests,
                source="disk_requests_in_flight",
                apart="hung",
                hold=60.0,
            )
    yield from _slow_disks(series)
    name = "processes_stuck"
    stuck = series.value(name)
    if stuck and not waits_told(series):
        reason = "wait in the kernel for a file system, a disk or a driver"
        yield Sign(TROUBLE, reason, part="processes", value=stuck, source=name, hold=MINUTES_15)


def waits_told(series: Series) -> bool:
    """Return whether the agent itself finds a driver hung, or has found a path so for as long as
    lines about it count: its finding tells of the processes that wait for it in the kernel.
    """
    paths = _hung_paths(series)
    return bool(paths) or series.has("collector_failing", reason=("timeout", "stuck"))


def _hung_paths(series: Series) -> list[Point]:
    return list(series.lately("path_failing", RECENT, reason=HUNG))


def _slow_disks(series: Series) -> Iterator[Sign]:
    """Yield disks whose requests take far longer than at best in the last day, moving little.

    Rotating disks, and those that move much, as in a checkpoint, have queues by nature.
    """
    now = _request_seconds(series)
    series.add(REQUEST(seconds, disk) for disk, seconds in now.items())
    name = short_name(REQUEST)
    best = {labels["disk"]: value for labels, value in series.lowest(name, DAY)}
    moved = by(series.rise("disk_bytes_total", RECENT, full=True), "disk")
    for labels, _ in series("disk_info", rotational="0"):
        disk = labels["disk"]
        seconds, usual = now.get(disk), best.get(disk)
        busy = moved.get(disk, 0.0) > series.limits.disk_busy_bytes_per_second * RECENT
        if seconds is None or not usual or busy:
            continue
        if seconds > usual * series.limits.disk_request_ratio:
            yield from over(
                series,
                TROUBLE,
                seconds,
                "disk_request_seconds",
                "disk_request_seconds_total",
                "takes far longer for a request than it used to, and moves little data",
                labels,
                hold=MINUTES_15,
            )


def _request_seconds(series: Series) -> dict[str, float]:
    """Return the mean time of a read or write by disk, for disks with at least one a second.

    A discard may take a second on a healthy disk.
    """
    both = ("read", "write")
    requests = by(series.rise("disk_requests_total", RECENT, full=True, operation=both), "disk")
    name = "disk_request_seconds_total"
    busy = by(series.rise(name, RECENT, full=True, operation=both), "disk")
    return {
        disk: seconds / requests[disk]
        for disk, seconds in busy.items()
        if requests.get(disk, 0.0) > RECENT
    }


def checkpoints(series: Series, _wall: float) -> Iterator[Sign]:
    """Yield findings about jobs' checkpoints: incomplete ones, and no room for the next."""
    alert, name = "DshealthdCheckpointIncomplete", "job_checkpoint_problems"
    for job, value in by(series(name), "training_job").items():
        if value > 0:
            yield Sign(alert, job=job, value=value, source=name)
    for labels, free in series("job_checkpoint_free_bytes"):
        needed = series.value("job_checkpoint_next_bytes", **labels)
        if needed is not None and free < needed:
            yield Sign(
                FULL,
                "has less free than the last ones took",
                job=labels["training_job"],
                part=f"the checkpoint path of {labels['training_job']}",
                hold=MINUTES_5,
                value=free,
                limit=needed,
                limit_source="dshealthd_job_checkpoint_next_bytes",
                source="job_checkpoint_free_bytes",
            )


RULES = (paths, space, disks, checkpoints)
