"""The explanation of an investigation's bad rounds: this node, its leaf, the fabric, or nothing
yet.

Pure functions of the rounds of one investigation. The larger cause is tried first: if most
neighbors on the leaf report the same about themselves, it is the leaf; if they do not, it is this
node, or the part of it that was timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dshealthd.probe.observation import Outcome
from dshealthd.probe.verdicts.signals import (
    REACH,
    Cause,
    Investigation,
    Measurement,
    Signal,
    accuses_itself,
)

if TYPE_CHECKING:
    from dshealthd.probe.verdicts.company import Company

_CUT_OFF = frozenset({Outcome.UNREACHABLE, Outcome.REFUSED})
_MOST = 12
"""Rounds of an investigation after which an undecided cause is called ambiguous."""
ALIKE = 1.15
"""Maximum ratio between the largest and the smallest bad ratio that counts as equally slow. Jitter
of 3 % at both ends of 4 rounds stays below it; random spikes, by 1.2 to 3, do not.
"""
CONFIRMATIONS = 4
"""Extra rounds to be flagged, with at most one that is not, to make a part a suspect."""
PEERS = 2
"""Well peers with which rounds must be bad, or good, to tell whose fault it is: a single peer's
accuses nobody. Fewer if there are fewer.
"""


def reason_of(measurements: Iterable[Measurement]) -> str:
    """Return the most common reason among measurements."""
    reasons = [measurement.reason for measurement in measurements]
    return max(reasons, key=reasons.count)


def explain(investigation: Investigation, signal: Signal, company: Company) -> Cause:
    """Return the cause of an investigation's bad rounds, as far as its rounds show it."""
    rounds = list(investigation.measurements)
    if signal == REACH and all(entry.explained for entry in investigation.bads):
        return Cause.NOTHING
    if signal.timed:
        # Rounds that are slow by the same ratio are not random spikes: one fewer will do.
        ratios = [entry.ratio for entry in investigation.bads]
        needed = CONFIRMATIONS - (max(ratios) <= ALIKE * min(ratios))
    elif any(entry.reason in _CUT_OFF for entry in investigation.bads):
        # Several peers may be gone at once, and cannot say that it is their fault.
        needed = CONFIRMATIONS
    else:
        # Chance slows a round but does not break it, so half as many failures are proof.
        needed = (CONFIRMATIONS + 1) // 2
    bads = [entry for entry in rounds if entry.bad and not entry.explained]
    spent = len(rounds) >= _MOST or investigation.asked >= 2 * _MOST
    if (
        company.intra_leaf
        and company.inter_leaf
        and not any(entry.explained for entry in rounds)
        and not any(entry.round.near for entry in investigation.bads)
    ):
        cause = _uplink(rounds, bads, signal, company, needed)
    else:
        # An intermittent fault lets a round through now and then. A node that is cut off gets no
        # answer at all.
        cut_off = not signal.timed and needed == CONFIRMATIONS
        if sum(entry.good for entry in rounds) > (not cut_off):
            return Cause.NOTHING
        cause = (
            _inward(rounds, bads, signal, company, needed, spent=spent)
            if sum(entry.bad for entry in rounds) >= needed
            else _next(rounds, company)
        )
    return Cause.UNCLEAR if spent and not cause.decided else cause


def _inward(
    rounds: Sequence[Measurement],
    bads: Sequence[Measurement],
    signal: Signal,
    company: Company,
    needed: int,
    *,
    spent: bool,
) -> Cause:
    """Distinguish leaf and node as the cause when rounds are bad inside and outside the leaf."""
    if signal.local:
        return Cause.SELF
    near_same, near_other = _words(rounds, signal, company, near=True)
    far_same, far_other = _words(rounds, signal, company, near=False)
    if not company.intra_leaf:
        if far_same > max(PEERS, far_other):
            return Cause.FABRIC
    elif near_same >= min(PEERS, company.intra_leaf) and near_same > near_other:
        if company.inter_leaf and not far_other and far_same < PEERS and not spent:
            return Cause.MORE_FAR  # one alone may be faulty itself
        return Cause.FABRIC if far_same >= PEERS and far_same > far_other else Cause.LEAF
    if len(bads) < needed or len({entry.round.peer for entry in bads}) < PEERS:
        return _next(rounds, company)
    if company.intra_leaf and (near_same > near_other or (signal.timed and not near_other)):
        return Cause.MORE_NEAR
    return Cause.SELF


def _uplink(
    rounds: Sequence[Measurement],
    bads: Sequence[Measurement],
    signal: Signal,
    company: Company,
    needed: int,
) -> Cause:
    """Find whether rounds are bad because they leave the leaf."""
    good = [entry.round for entry in rounds if entry.good]
    if sum(not round.near for round in good) > signal.timed:
        return Cause.NOTHING
    peers = {entry.round.peer for entry in bads}
    if len(bads) < needed or len(peers) < min(PEERS, company.inter_leaf):
        return Cause.MORE_FAR
    if sum(round.near for round in good) < min(PEERS, company.intra_leaf):
        return Cause.MORE_NEAR
    told = [(entry.round.near, entry.round.told) for entry in rounds if entry.round.told]
    if any(not near and word.uplink for near, word in told):
        return Cause.FABRIC
    if any(
        near and (word.uplink or accuses_itself(word, signal, company.high)) for near, word in told
    ):
        return Cause.LEAF
    return Cause.MORE_NEAR


def _words(
    rounds: Iterable[Measurement], signal: Signal, company: Company, *, near: bool
) -> tuple[int, int]:
    """Return how many peers report this node's problem about themselves, and how many deny it.

    Only peers inside the leaf count (`near`), or only those outside it, by their last report. A
    peer that finds itself well, but whose recent rounds with others were not mostly good, does not
    know yet and is not counted.
    """
    words: dict[str, bool | None] = {}
    for entry in rounds:
        told = entry.round.told
        if entry.round.near is near and told is not None and told.node is not None:
            same = accuses_itself(told, signal, company.high, entry.ratio)
            known = same or told.is_well(company.me, company.high)
            words[entry.round.peer] = same if known else None
    return sum(word is True for word in words.values()), sum(
        word is False for word in words.values()
    )


def _next(rounds: Sequence[Measurement], company: Company) -> Cause:
    near = sum(entry.round.near for entry in rounds)
    if not company.intra_leaf or not company.inter_leaf:
        return Cause.MORE_NEAR if company.intra_leaf else Cause.MORE_FAR
    return Cause.MORE_NEAR if near <= len(rounds) - near else Cause.MORE_FAR
