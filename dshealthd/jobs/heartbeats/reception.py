"""The reception of heartbeats: keeps their socket open, and reports why it is not."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import defaultdict
from typing import TYPE_CHECKING

from dshealthd.core.collector import NotAvailable, Reason, SourceError
from dshealthd.core.result import os_reason
from dshealthd.jobs.environment import RENDEZVOUS
from dshealthd.jobs.heartbeats.receiver import Receiver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dshealthd.core.host import Host
    from dshealthd.jobs.heartbeats.identity import Identity
    from dshealthd.jobs.heartbeats.sender import Sender


log = logging.getLogger(__name__)


class Reception:
    """The agent's receiver and its upkeep; `tend` is called periodically."""

    def __init__(
        self, path: str, host: Host, *, monotonic: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Prepare to listen on `path`; the first `tend` opens the socket."""
        self.path = path
        self.receiver = Receiver(path, host, monotonic=monotonic, wall=wall)
        self.problem: NotAvailable | SourceError | None = None
        """Why it does not listen; None while it does."""
        self._host = host
        self._warned = False

    def tend(self) -> None:
        """Open the socket if it is not open or was removed, and drop senders that have ended."""
        self.problem = None if self.receiver.is_open else self._listen()
        self.receiver.refresh()

    def ranks(self) -> dict[tuple[str, int], list[tuple[Identity, Sender]]]:
        """Return the processes that send heartbeats, by job and rank, as `by_rank` orders them."""
        return by_rank(self.receiver.senders())

    def close(self) -> None:
        """Stop listening for heartbeats."""
        self.receiver.close()

    def _listen(self) -> NotAvailable | SourceError | None:
        """Open the heartbeats' socket; return why that failed, or None."""
        directory = os.path.dirname(self.path)
        if not os.path.isdir(directory):
            message = (
                f"heartbeats of training jobs are off: {directory} does not exist; systemd creates "
                f"it for the service; without systemd run `mkdir {directory}` as root"
            )
            if not self._warned:
                self._warned = True
                log.warning("%s", message)
            return NotAvailable(message)
        try:
            if os.readlink(self._host.proc("self")) != str(os.getpid()):
                detail = (
                    f"{self._host.procfs} shows another pid namespace than the agent's, so senders "
                    "cannot be identified"
                )
                return SourceError(Reason.NOT_FOUND, detail)
            self.receiver.open(asyncio.get_running_loop())
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return SourceError(Reason.IO_ERROR, f"{self.path}: {error.strerror}")
            return SourceError(os_reason(error), str(error))
        return None


def by_rank(
    senders: Iterable[tuple[Identity, Sender]],
) -> dict[tuple[str, int], list[tuple[Identity, Sender]]]:
    """Return the senders of each job and rank, the one that started last at the end.

    Children of other senders of the same rank are left out. If a job has several runs here, as a
    sweep within one allocation does, its ranks are those of the run with the most, or of the one
    that started last: ranks of different runs do not wait for each other. Another run's process of
    the same rank stands before.
    """
    ranks: dict[tuple[str, int], list[tuple[Identity, Sender]]] = defaultdict(list)
    runs: dict[str, dict[tuple[str, ...], dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for who, sender in senders:
        process = who.process
        ranks[process.job, process.launch.rank].append((who, sender))
        runs[process.job][_run(who)][process.launch.rank] = process.start
    chosen = {
        job: max(of_job.items(), key=lambda run: (len(run[1]), max(run[1].values())))[0]
        for job, of_job in runs.items()
    }
    for key, found in list(ranks.items()):
        pids = {who.process.pid for who, _ in found}
        own = [entry for entry in found if entry[0].process.parent not in pids]
        run = chosen[key[0]]
        ranks[key] = sorted(
            own,
            key=lambda entry: (_run(entry[0]) == run, entry[0].process.start, entry[0].process.pid),
        )
        if _run(ranks[key][-1][0]) != run:
            del ranks[key]
    return ranks


def _run(who: Identity) -> tuple[str, ...]:
    """Return what the ranks of a run on one node have in common."""
    return tuple(who.process.environment.get(name, "") for name in RENDEZVOUS)
