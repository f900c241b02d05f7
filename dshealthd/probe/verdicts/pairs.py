"""Pairs: a peer with which rounds go badly, and whether it is the path to it, the peer, or this
node.

By the medians of both: if this node and the peer are each well with most others, it is the link
between them. If the peer is not, it finds that out itself, and says so; if nobody can call it, this
node says so for it. A slow link is slower than usual for both of its ends. If it is for one alone,
the two are unlike: in their GPUs or adapters, or in how far they are from most others.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from dshealthd.probe.observation import FAR_BELOW, HARD, PeerReport, RoundKind
from dshealthd.probe.verdicts.explanation import ALIKE, CONFIRMATIONS, PEERS
from dshealthd.probe.verdicts.signals import REACH, RUN, ObservedRound, Signal

if TYPE_CHECKING:
    from dshealthd.probe.verdicts.company import Company

HARD_BADS = 2
"""Failed rounds with a peer before others are asked: the first one and a retry."""
_CUT_BADS = 5
"""Failed calls after which the path between two agents counts as cut, if both reach others. A node
that loses half of its packets fails this often in a row with one peer in 1 of 16 cases.
"""
_FLAPPING_BADS = 8
"""The same if good calls came between the failed ones. A cut path lets no call through; if some get
through, the path flaps or a node loses packets.
"""
_CUT_RATIO = 4
"""Minimum good rounds with others for each bad one before this node blames the path: otherwise it
may be losing packets itself.
"""
_SLOW_MORE = 2
"""Flagged rounds that a slow link needs on top of `CONFIRMATIONS`. It needs more because a
suspicion of a link starts with a single flagged round.
"""
_MANY = 2
"""Other peers that are as slow, from which on it is no link: they are of another kind than this
node, or in another room.
"""
_MOST, _PATIENCE = 12, 12
"""Failed calls of a pair, and epochs since the first, after which it is called ambiguous. Of
collectives, as many as make it a link count: more are not asked for.
"""
_STALE = 6
"""Epochs without a round after which a suspicion of a peer is dropped."""
_FLAPS = 36
"""Epochs for which bad rounds with a peer are remembered after good ones ended the suspicion. Six
minutes of 10 s epochs: a pair among 32 nodes meets once in five minutes.
"""


class PairVerdict(enum.Enum):
    """What the rounds of a pair show."""

    NOTHING = "nothing"
    """Not enough yet."""
    LINK = "link"
    AMBIGUOUS = "ambiguous"
    """Its ends, or others, do not agree whose fault it is, or there is nobody to tell."""
    PEER = "peer"
    """Nobody can call the peer."""
    SELF = "self"
    """Echoes with others go badly, too."""


class Others(NamedTuple):
    """How many rounds with others than the pair's other end went well, and how many badly."""

    well: int
    ill: int
    good: int = 0
    """All that went well, also those that say nothing of the pair's path."""

    @property
    def fine(self) -> bool:
        """Whether the median of enough rounds is good."""
        return self.well >= PEERS and self.well > self.ill


@dataclass(slots=True, eq=False)
class PairSuspicion:
    """The suspicion that bad rounds are due to one peer, or the path to it."""

    peer: str
    first: ObservedRound
    signals: frozenset[Signal]
    """What was bad in every bad round: REACH or RUN for one that failed."""
    reason: str
    """Of the last bad round: it shows what is wrong now, even if an agent first refused."""
    touched: int
    """The epoch of the last round."""
    least: float
    """The lowest ratio of the bad rounds: chance makes some of them high, but not all."""
    bads: int = 1
    goods: int = 0
    earlier: int = 0
    """Bad rounds of previous suspicions of this peer, which good rounds ended."""
    is_good: bool = False
    """Whether the last round was good."""
    accused: str = ""
    """The reason of the accusation."""
    agreed: int = 0
    """Reports in which the peer found its rounds with this node bad, too."""
    checked: int = -1
    """The epoch of the last extra round requested for this pair."""
    sought: int = -1
    """The epoch in which another was last asked to call the peer, whether or not it has."""
    words: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """Others that were asked to call the peer: the epoch, and whether they could."""

    @property
    def unreached(self) -> bool:
        """Whether the peer did not answer when last called."""
        return REACH in self.signals and not self.is_good

    @property
    def hard(self) -> bool:
        """Whether rounds fail, rather than being slow."""
        return not self.signals.isdisjoint({REACH, RUN})

    @property
    def is_mutual(self) -> bool:
        """Whether both ends find it slow if it is the link: each times its own collectives, but not
        every echo has a time.
        """
        return not self.hard and self.kind is not RoundKind.LIGHT

    @property
    def kind(self) -> RoundKind:
        """The kind of a round that repeats the first: an echo for reachability."""
        return RoundKind.LIGHT if REACH in self.signals else self.first.kind

    @classmethod
    def begin(
        cls,
        round: ObservedRound,
        bad: frozenset[Signal],
        ratio: float,
        reason: str,
        before: PairSuspicion | None,
    ) -> PairSuspicion:
        """Begin a suspicion with a bad round, `before` being the last of this peer that ended."""
        new = cls(round.peer, round, bad, reason, round.epoch, ratio)
        if before is not None and 0 <= round.epoch - before.touched <= _FLAPS:
            new.earlier = before.bads + before.earlier
        return new

    def update(
        self,
        round: ObservedRound,
        bad: frozenset[Signal],
        ratio: float,
        reason: str,
        measured: Mapping[Signal, bool],
    ) -> bool:
        """Count a further round with the peer, which has `measured` signals, as good or not. Return
        whether good ones have ended the suspicion.
        """
        hard = not bad.isdisjoint({REACH, RUN})
        if not bad and REACH in self.signals and self.first.led and not round.led:
            return False  # a peer that calls is not necessarily one that can be called
        self.touched = round.epoch
        if not hard and self.signals.isdisjoint(measured):
            return False  # it did not measure what was bad
        if hard or self.signals & bad:
            self.signals = bad if hard else self.signals & bad
            self.bads, self.is_good, self.reason = self.bads + 1, False, reason
            self.least = min(self.least, ratio)
            # An accusation ends only after consecutive good rounds; a suspicion also if chance
            # mixes in bad ones.
            self.goods = 0 if self.accused else self.goods
        elif not self.accused or all(measured.get(signal, True) for signal in self.signals):
            self.goods, self.is_good = self.goods + 1, True
        # A single bad round may be chance, so one good round refutes it.
        return self.goods >= (2 if self.bads > 1 else 1)

    def is_stale(self, epoch: int) -> bool:
        """Return whether the suspicion has had no rounds for too long."""
        return not self.accused and not 0 <= epoch - self.touched <= _STALE

    @property
    def missing(self) -> int:
        """How many more bad rounds are needed before the link can be accused."""
        if REACH in self.signals:
            return (
                (_FLAPPING_BADS if self.earlier or self.goods else _CUT_BADS)
                - self.bads
                - self.earlier
            )
        return (HARD_BADS if self.hard else CONFIRMATIONS + _SLOW_MORE) - self.bads

    def find(self, company: Company, unreached: Collection[str], epoch: int) -> PairVerdict:
        """Return what the rounds of the pair, of its ends with others, and others' calls show."""
        mine = self.others(company)
        echoes = self.echoes(company)
        if RUN in self.signals and len(echoes) >= PEERS and all(echoes.values()):
            return PairVerdict.SELF
        if epoch == self.first.epoch or self.bads < HARD_BADS:
            return PairVerdict.NOTHING  # what others know may be older than the fault
        if self.is_mutual and self.agreed < HARD_BADS:
            return PairVerdict.NOTHING
        alone = len(company.leaves) <= PEERS  # nobody else can tell
        waits = not alone and (
            epoch <= self.first.epoch + _PATIENCE
            or (self.bads < _MOST if REACH in self.signals else self.missing > 0)
            or mine.ill > mine.good  # the fault is not this pair's alone
        )
        if REACH not in self.signals:
            if self.missing > 0:
                return PairVerdict.NOTHING
            if mine.fine and self.theirs(company).fine:
                return PairVerdict.LINK
            return PairVerdict.NOTHING if waits else PairVerdict.AMBIGUOUS
        words = [well for _, well in self.words.values()]
        needed = min(PEERS, len(company.leaves.keys() - {company.me, self.peer, *unreached}))
        if needed and len(words) >= needed:
            if not any(words):
                return PairVerdict.PEER
            if (
                all(words)
                and not self.is_good
                and self.theirs(company).fine
                and not company.fails_with_others(self.peer, epoch)
                and self.missing <= 0
                and mine.well >= max(PEERS, _CUT_RATIO * mine.ill)
            ):
                return PairVerdict.LINK
        return PairVerdict.NOTHING if waits else PairVerdict.AMBIGUOUS

    def others(self, company: Company) -> Others:
        """Return how this node's rounds with others have gone since the first of this pair's that
        was bad. Echoes say nothing good of collectives, nor rounds inside the leaf of its uplink.
        """
        light, near = self.kind is RoundKind.LIGHT, self.first.near or self.hard
        well = ill = good = 0
        for met in company.log:
            if met.round.number > self.first.number and met.round.peer != self.peer:
                if met.bad and FAR_BELOW * met.ratio > self.least:
                    ill += 1
                    continue
                good += 1
                well += (light or not met.light) and (near or not met.round.near)
        return Others(well, ill, good)

    def met(self, company: Company) -> Counter[str]:
        """Return how often this node has met each other member since then, in rounds like this."""
        return Counter(
            met.round.peer
            for met in company.log
            if met.light is (self.kind is RoundKind.LIGHT)
            and met.round.number > self.first.number
            and met.round.peer != self.peer
        )

    def opinion(self, told: PeerReport, me: str) -> float | None:
        """Return the ratio that the peer reports of its collectives with this node; None if there
        is none, or if this suspicion is of something else.
        """
        return told.pairs.get(me) if self.is_mutual and me not in told.echoes else None

    def is_one_of_many(self, company: Company) -> bool:
        """Return whether the last rounds with several other peers were as slow: links fail one by
        one, and by different ratios.
        """
        alike = {
            met.round.peer: self.signals <= met.bad
            and max(met.ratio, self.least) <= ALIKE * min(met.ratio, self.least)
            for met in company.log
            if met.light is (self.kind is RoundKind.LIGHT) and met.round.peer != self.peer
        }
        return sum(alike.values()) >= _MANY

    def theirs(self, company: Company) -> Others:
        """Return how the peer's last rounds with others went, by its own report."""
        report = company.report(self.peer, self.first.number)
        if report is None:
            return Others(0, 0)
        ratios = company.pairs_of(self.peer, report)
        high = HARD if self.hard else max(company.high, self.least / FAR_BELOW)
        good = {name for name, ratio in ratios.items() if ratio < high}
        # As in `others`: echoes say nothing good of collectives.
        echoed = set() if self.kind is RoundKind.LIGHT else set(report.echoes)
        return Others(len(good - echoed), len(ratios) - len(good))

    def echoes(self, company: Company) -> dict[str, bool]:
        """Return whether this node's last echo with each other member since then went badly."""
        return {
            met.round.peer: bool(met.bad)
            for met in company.log
            if met.light and met.round.number > self.first.number and met.round.peer != self.peer
        }
