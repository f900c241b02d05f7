"""Log files of a job: standard output and error of its ranks, and configured patterns.

Every name is looked up as the job's process sees it, with the rights of its user.
"""

from __future__ import annotations

import enum
import fnmatch
import glob
import os
import stat
from typing import TYPE_CHECKING

from dshealthd.linux.process_files import Irregular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dshealthd.core.host import Host
    from dshealthd.linux.process_files import Root

MAX_DIRECTORIES = 256
"""Directories that one pattern may lead through."""
MAX_MATCHES = 1024
JOB = "{job}"
"""Stands for the number of a Slurm job in a pattern."""
_WILD = frozenset("*?[")
_SLURM = "slurm-"
_DELETED = " (deleted)"


class LogFileState(enum.StrEnum):
    """What becomes of a file."""

    FOLLOWED = "followed"
    AMBIGUOUS = "ambiguous"
    """Two jobs of one user could have written it."""
    FOREIGN = "foreign"
    """Of another user than the job, older than it, or no regular file."""
    UNREADABLE = "unreadable"
    LEFT_OUT = "left_out"
    """There are more than max_files."""


def standard_streams(host: Host, pid: int) -> list[str]:
    """Return the paths of logs that standard output and error of a process lead to, if any.

    OSError where they cannot be seen. Pipes, sockets, terminals and deleted files have none.
    """
    found = dict.fromkeys(os.readlink(host.proc(f"{pid}/fd/{number}")) for number in (1, 2))
    return [
        path
        for path in found
        if path.startswith("/") and not path.startswith("/dev/") and not path.endswith(_DELETED)
    ]


def pattern_of(pattern: str, job: str) -> str | None:
    """Return a log pattern with the job's number in it; None where the job has none."""
    if JOB not in pattern:
        return pattern
    number = job.removeprefix(_SLURM)
    if number == job or not number.isdecimal():
        return None
    return pattern.replace(JOB, number)


def wrong(pattern: str) -> str | None:
    """Return why a configured pattern of log files cannot be used; None if it can."""
    if not pattern.startswith("/"):
        return "must be absolute"
    if "**" in pattern:
        return "may not hold **: each * stands for one directory or a part of its name"
    rest = pattern.replace(JOB, "")
    if "{" in rest or "}" in rest:
        return f"may hold {JOB} and no other name in braces"
    return None


def matches(root: Root, pattern: str) -> Iterator[str]:
    """Yield the logs' paths that a pattern means, in order. OSError, but for what is not there."""
    places = [""]
    for part in pattern.strip("/").split("/"):
        if not _WILD & set(part):
            places = [f"{place}/{part}" for place in places]
            continue
        found = []
        for place in places[:MAX_DIRECTORIES]:
            try:
                names = root.names(place or "/")
            except (FileNotFoundError, NotADirectoryError, PermissionError, Irregular):
                continue  # one of many that the pattern may lead through
            found += [f"{place}/{name}" for name in sorted(fnmatch.filter(names, part))]
        places = found[:MAX_MATCHES]
    if places and not glob.has_magic(pattern):
        yield pattern
        return
    yield from places


def is_log(status: os.stat_result | None, user: int, since: float) -> bool:
    """Tell whether a file may be the log of a job: a regular one of its user, written since."""
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_uid == user
        and status.st_mtime >= since
    )


def named(root: Root, patterns: Sequence[str], job: str) -> Iterator[tuple[str, bool]]:
    """Yield the paths of logs that the configured patterns mean, and whether one names the job.

    OSError.
    """
    for pattern in patterns:
        if (own := pattern_of(pattern, job)) is not None:
            for path in matches(root, own):
                yield path, JOB in pattern
