"""The hang detector: which jobs are hung on this node, check by check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from dshealthd.jobs.hangs.exits import ExitWatcher
from dshealthd.jobs.hangs.hang import judge
from dshealthd.jobs.hangs.watch import RankWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dshealthd.core.host import Host
    from dshealthd.jobs.hangs.hang import Hang, RankState
    from dshealthd.jobs.heartbeats.identity import Identity
    from dshealthd.jobs.heartbeats.sender import Sender
    from dshealthd.jobs.options import HangOptions

SLACK = 3.0
"""Most intervals between two checks that count as silence; time beyond that is ignored."""


class HangDetector:
    """A detector that watches the ranks that send heartbeats, and their processes."""

    def __init__(
        self,
        options: HangOptions,
        host: Host,
        *,
        monotonic: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """Start without ranks, in the running loop, which is notified when processes exit."""
        self._monotonic = monotonic
        self._wall = wall
        self._exit_watcher = ExitWatcher(host, asyncio.get_running_loop(), wall)
        self._watch = RankWatch(
            host,
            self._exit_watcher,
            slack=SLACK * options.interval,
            floor=float(options.floor),
        )
        self._suspected: frozenset[str] = frozenset()
        """Jobs that were hung at the last check."""
        self.jobs: Mapping[str, Sequence[RankState]] = {}
        """The ranks of each job, as of the last check."""
        self.hangs: Mapping[str, Hang] = {}
        """Confirmed hangs by job: two checks in a row have seen them."""

    def look(self, ranks: Mapping[tuple[str, int], Sequence[tuple[Identity, Sender]]]) -> None:
        """Check for hangs now; if a rank has several processes, the latest counts."""
        present = {}
        for place, senders in ranks.items():
            who, sender = senders[-1]
            if sender.message is not None:
                present[place] = who, sender.message
        self._watch.look(present, self._monotonic())
        self.jobs = self._watch.jobs()
        wall = self._wall()
        found = {
            job: hang
            for job, states in self.jobs.items()
            if (hang := judge(job, states, wall)) is not None
        }
        self.hangs = {job: hang for job, hang in found.items() if job in self._suspected}
        self._suspected = frozenset(found)

    def restore(self, rows: Iterable[dict[str, Any]]) -> None:
        """Restore baselines from `rows` of an earlier detector. ValueError, TypeError, KeyError."""
        self._watch.restore(rows)

    def rows(self) -> list[dict[str, Any]]:
        """Return the ranks' baselines, for a later detector."""
        return self._watch.rows()

    def close(self) -> None:
        """Release the processes that the detector watches."""
        self._exit_watcher.close()
