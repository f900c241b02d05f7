"""Log files of a job: standard output and error of its ranks, and configured patterns.

Every name is looked up as the job's process sees it, with the rights of its user.
"""

from __future__ import annotations

import enum
import fnmatch
import glob
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.core.collector import CollectorOptions
from dshealthd.core.options import Duration, constant, option
from dshealthd.linux.regular_files import Irregular

if TYPE_CHECKING:
    from dshealthd.core.host import Host
    from dshealthd.linux.process_root import Root

MAX_DIRECTORIES = 256
"""Most directories that are listed for one wildcard of a pattern."""
MAX_MATCHES = 1024
MAX_FILES = 64
"""Most files that are followed, of all jobs."""
JOB = "{job}"
"""Stands for the number of a Slurm job in a pattern."""
_WILD = frozenset("*?[")
_SLURM = "slurm-"
_DELETED = " (deleted)"


class LogFileState(enum.StrEnum):
    """What happens with a log file."""

    FOLLOWED = "followed"
    AMBIGUOUS = "ambiguous"
    """Two jobs of one user could have written it."""
    FOREIGN = "foreign"
    """It belongs to another user than the job, is older than the job, or is not a regular file."""
    UNREADABLE = "unreadable"
    LEFT_OUT = "left_out"
    """It exceeds MAX_FILES."""


@dataclass(frozen=True, kw_only=True)
class JobLogsOptions(CollectorOptions):
    """Options of job logs."""

    interval: Duration = option("1s", "Read interval.", minimum="100ms")
    deadline: Duration = constant("5s")
    """As long as a path of `filesystem` may take: its files may be on a network."""
    paths: tuple[str, ...] = option(
        [],
        "Log files of jobs: absolute paths in the job's own view, with * ? and [] within a "
        "name; {job} is the Slurm job number. A pattern without {job} works only where a user "
        "has one job on the node.",
    )
    standard_streams: bool = option(
        False, "Whether to also follow files that the ranks' standard output and error go to."
    )

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invalid option of job logs, and why."""
        for path in self.paths:
            if (why := pattern_problem(path)) is not None:
                yield "paths", f'"{path}" {why}'


def standard_streams(host: Host, pid: int) -> list[str]:
    """Return the paths of the files behind a process's standard output and error.

    OSError if they cannot be read. Pipes, sockets, terminals and deleted files have no path.
    """
    found = dict.fromkeys(os.readlink(host.proc(f"{pid}/fd/{number}")) for number in (1, 2))
    return [
        path
        for path in found
        if path.startswith("/") and not path.startswith("/dev/") and not path.endswith(_DELETED)
    ]


def pattern_of(pattern: str, job: str) -> str | None:
    """Return a log pattern with the job's number filled in; None if it needs one the job lacks."""
    if JOB not in pattern:
        return pattern
    number = job.removeprefix(_SLURM)
    if number == job or not number.isdecimal():
        return None
    return pattern.replace(JOB, number)


def pattern_problem(pattern: str) -> str | None:
    """Return why a configured log pattern is invalid; None if it is valid."""
    if not pattern.startswith("/"):
        return "must be absolute"
    if "**" in pattern:
        return "must not contain **: each * stands for one directory or a part of its name"
    rest = pattern.replace(JOB, "")
    if "{" in rest or "}" in rest:
        return f"must not contain braces other than {JOB}"
    return None


def expand_pattern(root: Root, pattern: str) -> Iterator[str]:
    """Yield the paths that a pattern matches, in order. OSError, except for missing directories."""
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
                continue  # one of many directories that the pattern may match
            found += [f"{place}/{name}" for name in sorted(fnmatch.filter(names, part))]
        places = found[:MAX_MATCHES]
    if places and not glob.has_magic(pattern):
        yield pattern
        return
    yield from places


def is_log(status: os.stat_result | None, user: int, since: float) -> bool:
    """Return whether a file may be a job's log: a regular file of `user`, written after `since`."""
    return (
        status is not None
        and stat.S_ISREG(status.st_mode)
        and status.st_uid == user
        and status.st_mtime >= since
    )


def log_paths(root: Root, patterns: Sequence[str], job: str) -> Iterator[tuple[str, bool]]:
    """Yield the log paths that configured patterns match, and whether the pattern names the job.

    OSError.
    """
    for pattern in patterns:
        if (own := pattern_of(pattern, job)) is not None:
            for path in expand_pattern(root, own):
                yield path, JOB in pattern
