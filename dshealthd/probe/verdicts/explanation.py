"""The explanation of an investigation's bad rounds: this node, its leaf, its peers, or nothing yet.

Pure functions of the rounds of one investigation. The larger cause is tried first: if nearly all
neighbors on the leaf report the same about themselves, it is the leaf; if they do not, it is this
node, or the part of it that was timed.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dshealthd.probe.verdicts.signals import Investigation, Measurement, Signal

_CUT_OFF = frozenset({Outcome.UNREACHABLE, Outcome.REFUSED, Outcome.UNAUTHORIZED})
_MOST = 12
"""Rounds of an investigation after which an undecided cause is called ambiguous."""
_LEAST_FAR = 3
"""Members of other leaves that the leaf's uplink must fail with to be blamed. That is more than may
lie, as they alone implicate the uplink.
"""
_ALIKE = 1.15
"""Maximum ratio between the largest and the smallest bad ratio that counts as equally slow. Jitter
of 3 % at both ends of 4 rounds stays below it; random spikes, by 1.2 to 3, do not.
"""
_AGREED = 3
"""Neighbors that must agree for each one that disagrees."""


class Cause(enum.Enum):
    """The cause of an investigation's bad rounds, or the round that is needed to find it."""

    NOTHING = "nothing"
    """It was chance, or is over."""
    MORE_NEAR = "more_near"
    """A round inside the leaf is needed."""
    MORE_FAR = "more_far"
    """A round with another leaf is needed."""
    SELF = "self"
    LEAF = "leaf"
    FABRIC = "fabric"
    """Everybody reports the same: it is more than a leaf, or the usual has changed everywhere."""
    PEER = "peer"
    """Every bad round includes the only peer, or one of so few that they may lie. It is these
    peers, the path to them, or this node.
    """
    UNCLEAR = "unclear"
    """This node or its leaf: the neighbors' reports do not settle it."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The circumstances in which an investigation is judged."""

    me: str
    intra_leaf: int
    """Other members on this node's leaf; 0 if the leaf is not known."""
    inter_leaf: int
    """Members elsewhere."""
    high: float
    confirmations: int
    known_leaf: bool

    @property
    def liars(self) -> int:
        """How many other members may lie together without being believed. Two among five others or
        more, one among two to four, none if there is only one.
        """
        others = self.intra_leaf + self.inter_leaf
        return 2 if others > 2 * 2 else 1 if others > 1 else 0

    def witnesses(self, unreached: Collection[str]) -> int:
        """Return how many others must fail to call a member before it counts as gone.

        More than may lie, unless fewer are left: `unreached` are members that do not answer this
        node, among them the one in question. One is enough if so many do not answer that some of
        them cannot be lying: then it is not this node's path to a single one that is cut.
        """
        if len(unreached) - 1 > self.liars:
            return 1
        return max(1, min(self.liars + 1, self.intra_leaf + self.inter_leaf - len(unreached)))


def _count_by_result(measurements: Iterable[Measurement]) -> Counter[str]:
    """Count rounds: explained ones, and bad and good ones, of these also the near and far ones."""
    count: Counter[str] = Counter()
    for measurement in measurements:
        if measurement.explained:
            count["explained"] += 1
        elif measurement.bad or measurement.good:
            kind = "bad" if measurement.bad else "good"
            count.update((kind, f"{'near' if measurement.round.near else 'far'} {kind}"))
    return count


def reason_of(measurements: Iterable[Measurement]) -> str:
    """Return the most common reason among the bad measurements."""
    return Counter(
        measurement.reason for measurement in measurements if measurement.bad
    ).most_common(1)[0][0]


def explain(investigation: Investigation, track: Signal, around: Surroundings) -> Cause:
    """Return the cause of an investigation's bad rounds, as far as its rounds show it."""
    measurements = list(investigation.measurements)
    count = _count_by_result(measurements)
    first = _count_by_result(investigation.earlier)
    # Chance slows a round but does not break it, so half as many failures are proof.
    needed = around.confirmations if track.timed else (around.confirmations + 1) // 2
    cut_off = not track.timed and any(
        measurement.reason in _CUT_OFF
        for measurement in (*investigation.earlier, *measurements)
        if measurement.bad
    )
    if track.timed and _alike((*investigation.earlier, *measurements)):
        needed -= 1
    if cut_off:
        # Several peers may be gone at once, and nobody else can report that it is their fault.
        needed = around.confirmations
    if (
        around.known_leaf
        and around.inter_leaf
        and not first["near bad"] + count["near bad"] + count["explained"]
        and first["far bad"]
    ):
        return _way_out(measurements, track, count, around, needed)
    # An intermittent fault lets a round through now and then. A node that is cut off gets no answer
    # at all.
    tolerated = 0 if cut_off else 1
    if count["good"] > tolerated:
        return Cause.NOTHING
    if count["bad"] + count["explained"] >= needed:
        return _inward(investigation, track, count, around, needed)
    return _next(measurements, around)


def _alike(measurements: Iterable[Measurement]) -> bool:
    """Return whether all bad rounds are slow by about the same ratio, unlike random spikes."""
    ratios = [measurement.ratio for measurement in measurements if measurement.bad]
    return max(ratios) <= _ALIKE * min(ratios)


def _inward(
    investigation: Investigation,
    track: Signal,
    count: Counter[str],
    around: Surroundings,
    needed: int,
) -> Cause:
    """Distinguish leaf and node as the cause when rounds are bad inside and outside the leaf."""
    measurements = list(investigation.measurements)
    # `asked` also counts rounds for which no peer was left: without it, such an investigation would
    # stay open forever.
    spent = len(measurements) >= _MOST or investigation.asked >= 2 * _MOST
    if track.family not in {"local", "home"} and blamed_by_few(
        [*investigation.earlier, *measurements], around.liars
    ):
        # So few members could have made all these rounds bad: they prove nothing against others.
        return Cause.PEER if spent else _next(measurements, around)
    near_high, near_low = _words(measurements, track, around, near=True)
    far_high, far_low = _words(measurements, track, around, near=False)
    agreed = len(near_high) >= max(1, min(2, around.intra_leaf)) and len(
        near_high
    ) >= _AGREED * len(near_low)
    if around.intra_leaf and agreed:
        if around.inter_leaf and not far_low and (len(far_high) < 2 and not spent):  # noqa: PLR2004 - one alone may be faulty itself
            return Cause.MORE_FAR
        return Cause.FABRIC if len(far_high) > 1 and not far_low else Cause.LEAF
    if not around.known_leaf and len(far_high) >= _AGREED and not far_low:
        return Cause.FABRIC
    peers = {
        measurement.round.peer
        for measurement in measurements
        if measurement.bad and not measurement.explained
    }
    if track.family in {"local", "home"}:
        return Cause.SELF
    if count["bad"] >= needed and len(peers) > 1:
        unheard = around.intra_leaf and not near_high and not near_low
        if unheard and track.timed:
            return Cause.UNCLEAR if spent else Cause.MORE_NEAR
        if near_high and len(near_low) < len(near_high):
            return Cause.UNCLEAR if spent else Cause.MORE_NEAR
        return Cause.SELF
    if around.intra_leaf + around.inter_leaf < 2:  # noqa: PLR2004 - with one peer nothing can be compared
        return Cause.PEER
    return Cause.UNCLEAR if spent else _next(measurements, around)


def _way_out(
    measurements: Sequence[Measurement],
    track: Signal,
    count: Counter[str],
    around: Surroundings,
    needed: int,
) -> Cause:
    if count["far good"] > 1 or (count["far good"] and not track.timed):
        return Cause.NOTHING
    spent = len(measurements) >= _MOST
    peers = {measurement.round.peer for measurement in measurements if measurement.bad}
    # If there are few members on other leaves, all of them together must suffice as proof.
    if blamed_by_few(measurements, min(around.liars, around.inter_leaf - 1)):
        return Cause.PEER if spent else Cause.MORE_FAR
    if count["far bad"] < needed or len(peers) < min(_LEAST_FAR, around.inter_leaf):
        return Cause.UNCLEAR if spent else Cause.MORE_FAR
    if around.intra_leaf and count["near good"] < min(2, around.intra_leaf):
        return Cause.UNCLEAR if spent else Cause.MORE_NEAR
    told = [
        (measurement.round.near, measurement.round.told)
        for measurement in measurements
        if measurement.round.told is not None
    ]
    if any(not near and word.uplink for near, word in told):
        return Cause.FABRIC
    if (
        any(
            near and (word.uplink or word.accuses_itself(track, around.high)) for near, word in told
        )
        or not around.intra_leaf
    ):
        return Cause.LEAF
    return Cause.UNCLEAR if spent else Cause.MORE_NEAR


def blamed_by_few(measurements: Iterable[Measurement], liars: int) -> bool:
    """Return whether `liars` members could have made all of these rounds bad between them."""
    return len({entry.round.peer for entry in measurements if entry.bad}) <= liars


def blamed(investigation: Investigation, around: Surroundings) -> set[str]:
    """Return the few peers that explain the bad rounds of an investigation. A peer must be in more
    than one bad round, as a single one may be chance.
    """
    rounds = Counter(
        entry.round.peer
        for entry in (*investigation.earlier, *investigation.measurements)
        if entry.bad
    )
    if len(rounds) > max(1, around.liars):
        return set()
    return {peer for peer, count in rounds.items() if count > 1}


def _words(
    measurements: Iterable[Measurement], track: Signal, around: Surroundings, *, near: bool
) -> tuple[set[str], set[str]]:
    """Return the peers that report this node's problem about themselves, and those that deny it.

    Only rounds inside the leaf count (`near`), or only those outside it, and only the last report
    of each peer. A peer that finds itself well, but whose recent rounds with others were not mostly
    good, does not know yet and is in neither set.
    """
    words: dict[str, bool | None] = {}
    for measurement in measurements:
        # A neighbor's report distinguishes the leaf from the node, a report from another leaf the
        # fabric from the leaf.
        told = measurement.round.told
        if measurement.round.near is near and told is not None and told.node is not None:
            same = told.accuses_itself(track, around.high)
            known = same or told.is_well(around.me, around.high)
            words[measurement.round.peer] = same if known else None
    return {peer for peer, word in words.items() if word}, {
        peer for peer, word in words.items() if word is False
    }


def _next(measurements: Sequence[Measurement], around: Surroundings) -> Cause:
    near = sum(measurement.round.near for measurement in measurements)
    if not around.intra_leaf:
        return Cause.MORE_FAR
    if not around.inter_leaf:
        return Cause.MORE_NEAR
    return Cause.MORE_NEAR if near <= len(measurements) - near else Cause.MORE_FAR
