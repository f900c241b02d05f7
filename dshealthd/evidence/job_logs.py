"""Failures in the ranks' logs: the answer of `dshealthd explain`, with its proof."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from dshealthd.core.text import printable_lines
from dshealthd.explain import answer, patterns
from dshealthd.explain import input as logs
from dshealthd.explain.dumps import MEMORY
from dshealthd.explain.finding import decide
from dshealthd.explain.recognition import Recognizer
from dshealthd.jobs.logs import files
from dshealthd.linux import privileges
from dshealthd.linux.forked import Emit, Missing
from dshealthd.linux.process_root import Root
from dshealthd.linux.regular_files import Irregular

if TYPE_CHECKING:
    from dshealthd.core.host import Host

FILE = "explain.txt"
MAX_BYTES = 256 << 20
"""Limit for all files together, which takes some five seconds; the end of each file is read."""
SECONDS = 20
Opened = tuple[str, int | None, IO[bytes]]
"""Path, the rank if only one writes to it, and the open file."""


def collect(
    emit: Emit,
    host: Host,
    ranks: Iterable[tuple[str, int, int]],
    paths: tuple[str, ...],
    now: float,
) -> dict[str, Any]:
    """Emit `explain.txt` of the jobs' logs, and return a line for each job whose logs show a cause.

    `ranks` are job, rank and pid; `paths` the configured patterns. `Missing` if there is no log.

    The files are opened with the rights of the job's user. Their lines are examined as nobody.
    """
    by_job: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for job, rank, pid in ranks:
        by_job[job].append((rank, pid))
    opened: dict[str, list[Opened]] = {}
    problems: list[str] = []
    for job, members in by_job.items():
        opened[job] = list(_open(host, job, members, paths, problems))
    if not any(opened.values()):
        message = "; ".join(problems[:3]) or "no rank's output is a file, and no path matches"
        raise Missing(message)
    for slug in {pattern.slug for pattern in patterns.load().every}:
        patterns.heading(slug)  # cached now: `confine` forbids opening files
    recognizers = {job: Recognizer() for job in opened}
    privileges.become(privileges.NOBODY)
    privileges.end_with_parent()
    privileges.confine(MEMORY, SECONDS)
    says = []
    share = MAX_BYTES // sum(map(len, opened.values()))
    for job, found in opened.items():
        unread = list(problems)
        for name, writer, stream in found:
            skipped = max(0, os.fstat(stream.fileno()).st_size - share)
            if skipped:
                stream.seek(skipped)
                unread.append(f"{name}: the first {skipped:,} bytes; lines are counted from there")
            recognizer = recognizers[job]
            items = logs.read(name, recognizer.find, recognizer.found.statistics, stream)
            recognizer.add(name, items, writer)
        finding = decide(recognizers[job].found, now=now)
        text = answer.text(finding, recognizers[job].found, unread)
        emit(FILE, f"{job}\n{printable_lines(text)}\n".encode(errors="replace"))
        if finding.outcome == "found":
            who = f", rank {', '.join(map(str, finding.ranks[:8]))}" if finding.ranks else ""
            says.append(f"logs of {job}: {finding.slug}{who}: {finding.statement}")
    return {"says": says}


def _open(
    host: Host,
    job: str,
    members: list[tuple[int, int]],
    paths: tuple[str, ...],
    problems: list[str],
) -> Iterator[Opened]:
    seen: set[tuple[int, int]] = set()
    writers: dict[str, set[int]] = defaultdict(set)
    for rank, pid in members:
        with _noted(f"output of rank {rank}", problems):
            for path in files.standard_streams(host, pid):
                writers[path].add(rank)
    for rank, pid in members:
        what = f"logs of rank {rank}"
        found = [path for path, by in writers.items() if rank in by]
        with _noted(what, problems), Root.of_process(host, pid) as root:
            for pattern in paths:
                with _noted(what, problems):
                    found += [path for path, own in files.log_paths(root, [pattern], job) if own]
            for path in dict.fromkeys(found):
                if len(seen) >= files.MAX_FILES:
                    problems.append(f"{path}: at most {files.MAX_FILES} files are read")
                    return
                stream = None
                with _noted(what, problems):
                    stream = _opened(root, path, seen)
                if stream is not None:
                    by = writers.get(path, set())
                    yield path, next(iter(by)) if len(by) == 1 else None, stream


def _opened(root: Root, path: str, seen: set[tuple[int, int]]) -> IO[bytes] | None:
    """Return a file of the process's user; None if it is another's, or open already. OSError."""
    descriptor = root.open(path)
    status = os.fstat(descriptor)
    identity = status.st_dev, status.st_ino
    if identity in seen or status.st_uid != root.owner.uid:
        os.close(descriptor)
        return None
    seen.add(identity)
    return os.fdopen(descriptor, "rb")


@contextlib.contextmanager
def _noted(what: str, problems: list[str]) -> Iterator[None]:
    """Add why the block fails to the problems, but for what is no file, and so no log."""
    try:
        yield
    except Irregular:
        return
    except (OSError, ValueError, ArithmeticError) as error:
        problems.append(f"{what}: {error}")
