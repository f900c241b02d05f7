"""The time that findings take: from when a sign lasts long enough, until it is gone for long
enough.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dshealthd.core import schema
from dshealthd.findings.finding import Finding, State, Verdict
from dshealthd.findings.past import CLOCK_SET

if TYPE_CHECKING:
    Key = tuple[str, str, str, str]


MAX_WATCHED = 20
"""Most signs shown that are no findings yet; a node has as many only while everything breaks."""


@dataclass(slots=True)
class Episode:
    """One sign over time. It is a finding from `opened` on."""

    finding: Finding
    began: float
    """Monotonic time in seconds of the first judgement that saw it."""
    seen: float
    """Monotonic time of the last one."""
    opened: bool = False
    exported: bool = False
    """Whether it has lasted for its hold; what could not be read for a moment is only shown."""
    worst: float | None = None
    """The value that was furthest beyond the limit."""

    def at(self, now: float) -> Finding:
        """Return the finding, with the severity that it has by now."""
        if now - self.began >= self.finding.page_seconds:
            return self.finding
        return dataclasses.replace(self.finding, severity=State.WARNING)


_KEPT = schema.of(list[Episode])


class Episodes:
    """What is wrong and for how long.

    A sign becomes a finding once every judgement has seen it for its hold, and stays one for its
    keep after the last that did, or for as long as its source cannot be read: what cannot be read
    has not healed.
    """

    def __init__(self) -> None:
        """Know of none."""
        self._episodes: dict[Key, Episode] = {}
        self._now = 0.0
        """Monotonic time of the last judgement."""
        self._zero: float | None = None
        """Unix time at which the monotonic clock stood at 0, by the clock as it was set last."""
        self.closed: list[Episode] = []
        """Findings that the last judgement closed."""
        self.begun: Counter[str] = Counter()
        """How many have lasted for their hold, by name, since the agent started."""
        self.changed = False
        """Whether a finding has begun or ended since `document` was called."""

    def update(
        self,
        signs: Iterable[Finding],
        now: float,
        wall: float,
        readable: Callable[[Finding], bool] = lambda _finding: True,
    ) -> Verdict:
        """Follow how long signs last; return those that are findings by now, worst first.

        `signs` are what rules see now, `now` is monotonic and `wall` Unix time in seconds;
        `readable` says whether the source of a finding that is not seen any more was read.
        """
        seen = set()
        self._now, self.closed = now, []
        zero = self._follow_clock(wall - now)
        for sign in signs:
            seen.add(sign.key)
            episode = self._episodes.get(sign.key)
            if episode is None:
                since = wall if sign.since is None else sign.since
                sign = dataclasses.replace(sign, since=since)  # noqa: PLW2901 - the dated one
                episode = self._episodes[sign.key] = Episode(sign, now, now, worst=sign.value)
            else:
                episode.finding = _continued(episode, sign, zero + episode.began)
                episode.worst = _worst(episode.worst, sign)
            episode.seen = now
        for key, episode in list(self._episodes.items()):
            finding = episode.finding
            if key in seen:
                lasts = now - episode.began >= finding.hold_seconds
                # An unknown is shown at once: a node that cannot be read is not healthy meanwhile.
                if not episode.opened and (lasts or finding.severity is State.UNKNOWN):
                    episode.opened = self.changed = True
                if lasts and not episode.exported:
                    episode.exported = True
                    self.begun[finding.name] += 1
            elif not episode.opened:
                del self._episodes[key]
            elif now - episode.seen >= finding.keep_seconds and readable(finding):
                if self._episodes.pop(key).exported:
                    self.closed.append(episode)
                self.changed = True
        return self.verdict()

    def _follow_clock(self, zero: float) -> float:
        """Date what lasts anew if the clock was set since the last judgement; return when the
        monotonic one stood at 0.
        """
        if self._zero is None:
            self._zero = zero
        elif abs(moved := zero - self._zero) > CLOCK_SET:
            self._zero = zero
            for episode in self._episodes.values():
                since = max(0.0, (episode.finding.since or 0.0) + moved)
                episode.finding = dataclasses.replace(episode.finding, since=since)
        return self._zero

    def verdict(self) -> Verdict:
        """Return the findings as the last judgement left them."""
        return Verdict.of(
            episode.at(self._now) for episode in self._episodes.values() if episode.opened
        )

    @property
    def firing(self) -> tuple[Finding, ...]:
        """The findings that have lasted for their hold, as the last judgement left them, worst
        first.
        """
        return Verdict.of(episode.at(self._now) for episode in self.lasting).findings

    @property
    def lasting(self) -> list[Episode]:
        """The findings that have lasted for their hold and are not over."""
        return [episode for episode in self._episodes.values() if episode.exported]

    def watched(self, now: float, wall: float) -> tuple[Finding, ...]:
        """Return the signs that have not lasted for their hold, those first that soon will have.

        They are `since` the first judgement that saw them, as their hold is.
        """
        held = [episode for episode in self._episodes.values() if not episode.opened]
        return tuple(
            dataclasses.replace(episode.finding, since=wall - (now - episode.began))
            for episode in sorted(held, key=self._end)[:MAX_WATCHED]
        )

    def open_at(self, finding: Finding, now: float) -> bool:
        """Return whether a sign that is seen now is a finding by now."""
        episode = self._episodes.get(finding.key)
        began = now if episode is None else episode.began
        return (episode is not None and episode.opened) or now - began >= finding.hold_seconds

    def due(self, now: float) -> float:
        """Return the seconds after which time alone may open or close a finding; infinite if
        never.
        """
        return min(
            (
                end - now
                for episode in self._episodes.values()
                for end in (self._end(episode), episode.began + episode.finding.page_seconds)
                if end > now
            ),
            default=math.inf,
        )

    @staticmethod
    def _end(episode: Episode) -> float:
        """Return when the hold of a sign ends, or the keep of a finding that is not seen any
        more.
        """
        if not episode.opened:
            return episode.began + episode.finding.hold_seconds
        return episode.seen + episode.finding.keep_seconds

    def document(self) -> object:
        """Return the findings for JSON, with times by its clock."""
        self.changed = False
        return _KEPT.write([one for one in self._episodes.values() if one.opened], "findings")

    def restore(
        self,
        document: Any,
        clock: float,
        now: float,
        known: Callable[[str], bool],
        *,
        booted: bool = False,
    ) -> None:
        """Restore what `document` returned, for findings that this release still knows. It was at
        `clock` by the clock of that agent, which is `now` by this one's. If the node has `booted`
        since, none is kept that is not seen again.

        Raise SchemaError if it is not that, and restore nothing.
        """
        restored = _KEPT.read(document, "findings")
        for episode in restored:
            if booted:
                episode.finding = dataclasses.replace(episode.finding, keep_seconds=0.0)
            episode.began, episode.seen = episode.began + now - clock, episode.seen + now - clock
        # They began before anything that was seen since.
        self._episodes |= {one.finding.key: one for one in restored if known(one.finding.alert)}
        self._now = now


def _worst(before: float | None, sign: Finding) -> float | None:
    """Return the value that is further beyond the limit, without one the larger."""
    if before is None or sign.value is None:
        return sign.value if before is None else before
    below = sign.limit is not None and sign.value < sign.limit
    return (min if below else max)(before, sign.value)


def _continued(episode: Episode, sign: Finding, began: float) -> Finding:
    """Return the sign of now as the same finding: since when, and the job that it struck. It
    `began`, as Unix time, no later than it was seen first, though its Xid may come again.

    A lost GPU ends its job within seconds, and remains what ended it.
    """
    before = episode.finding
    # Its labels stay once it is one, or the alert of one fault would end and begin anew. That of
    # another severity is another alert.
    settled = episode.opened and before.severity is sign.severity
    return dataclasses.replace(
        sign,
        reason=before.reason if settled else sign.reason,
        since=before.since if sign.since is None else min(began, sign.since),
        # What was certain once needs no hold afterwards.
        hold_seconds=min(before.hold_seconds, sign.hold_seconds),
        page_seconds=min(before.page_seconds, sign.page_seconds),
        training_job=before.training_job or sign.training_job,
    )
