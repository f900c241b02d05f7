"""The summary of failed ranks that torchrun prints below `ChildFailedError`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dshealthd.explain.events import Stamp
from dshealthd.explain.facts import MAX_FAILURES, Failure
from dshealthd.explain.streams import Line

if TYPE_CHECKING:
    from collections.abc import Callable

    from dshealthd.explain.events import Place
    from dshealthd.explain.facts import Recognised

_SUMMARY = re.compile(r"\s+(time|host|rank|exitcode|error_file|traceback)\s*: ?(.*)")
_SUMMARY_ENTRY = re.compile(r"\[\d+\]:\s*$")
_SUMMARY_RANK = re.compile(r"(\d{1,9}) \(local_rank: (\d{1,9})\)")
_SUMMARY_EXIT = re.compile(r"(-?\d{1,9}) +\(pid: (\d{1,10})\)")


class LauncherSummary:
    """Reader of the summaries in one file, which follow `ChildFailedError`."""

    def __init__(
        self, found: Recognised, source: int, feed: Callable[[Line, Place], object]
    ) -> None:
        """Make a reader that passes the first line of a traceback in a summary to `feed`."""
        self._found = found
        self._source = source
        self._feed = feed
        self._facts = found.sources[source]
        self._failure: Failure | None = None

    def take(self, line: Line, place: Place) -> bool:
        """Read a line; return whether it belongs to torchrun's summary."""
        text = line.text
        self._facts.summaries += text.startswith("Failures:")
        if text.startswith("Root Cause (first observed failure)"):
            self._failure = Failure(place, self._source, line.origin.task, root=True)
            return True
        if self._failure is None:
            if text.startswith("Failures:"):
                self._failure = Failure(place, self._source, line.origin.task)
                return True
            return False
        if text.startswith("====="):
            self._failure = None
            return True
        if text.startswith("-----"):
            return True
        if _SUMMARY_ENTRY.match(text):
            if self._failure.rank is not None:
                self._failure = Failure(
                    place, self._source, line.origin.task, root=self._failure.root
                )
            return True
        match = _SUMMARY.match(text)
        if match is None:
            return False
        failure, value = self._failure, match[2]
        if match[1] == "time":
            failure.time = value.strip()
        elif match[1] == "host":
            failure.host = value.strip()
        elif match[1] == "rank" and (ranks := _SUMMARY_RANK.match(value)):
            failure.rank, failure.local = int(ranks[1]), int(ranks[2])
        elif match[1] == "exitcode" and (exits := _SUMMARY_EXIT.match(value)):
            failure.exit, failure.pid = int(exits[1]), int(exits[2])
            failure.place = place
            self._facts.root_causes += failure.root
            if len(self._found.failures) < MAX_FAILURES:
                self._found.failures.append(failure)
            if failure.rank is not None:
                self._found.ranks_by_pid[self._source, failure.pid] = failure.rank
                self._found.see(failure.rank)
        elif match[1] == "traceback" and "Traceback" in value:
            origin = line.origin._replace(rank=failure.rank, host=failure.host)
            stamp = Stamp("iso", failure.time.replace("_", " "))
            self._feed(Line(value, origin, stamp, "", prefixed=False), place)
        return True
