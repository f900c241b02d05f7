"""Accusations: which part of this node, or its leaf, the decided investigations implicate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dshealthd.probe.observation import Part, Suspect
from dshealthd.probe.verdicts.explanation import Cause
from dshealthd.probe.verdicts.signals import Signal, SignalHistory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

AMBIGUOUS = "ambiguous"
FABRIC = "fabric"
"""The component of an accusation that applies to every leaf."""
LOCAL = "local"
_WAIT = 60.0
"""Seconds within which a local round should have run: one is requested in each 10 s slot."""
_OWN = {Cause.SELF, Cause.UNCLEAR}

Verdicts = dict[Signal, tuple[Cause, str]]
"""Cause and reason of each decided investigation."""


def accusations(
    me: str, leaf: str, history: Mapping[Signal, SignalHistory], verdicts: Verdicts, now: float
) -> Iterator[Suspect]:
    """Yield the accusations of this node, its parts and its leaf. A larger part is accused in place
    of the smaller ones that it explains.
    """
    wide = {
        track: verdict
        for track, verdict in verdicts.items()
        if verdict[0] in {Cause.LEAF, Cause.FABRIC}
    }
    own = {track: verdict for track, verdict in verdicts.items() if verdict[0] in _OWN}
    for cause, reason in dict.fromkeys(wide.values()):
        yield (
            Suspect(Part.LEAF, leaf, reason)
            if cause is Cause.LEAF
            else Suspect(Part.LEAF, FABRIC, AMBIGUOUS)
        )
    if len(own) <= len(wide):
        return
    whole = {
        reason for track, (cause, reason) in own.items() if not track.part and cause is Cause.SELF
    }
    doubtful = any(not track.part and cause is Cause.UNCLEAR for track, (cause, _) in own.items())
    fabric, local = (
        _parts(own, history, LOCAL, same=False),
        _parts(own, history, LOCAL, same=True),
    )
    if fabric is None or local is None:
        whole |= {reason for track, (_, reason) in own.items() if track.part}
    for reason in sorted(whole):
        yield Suspect(Part.NODE, me, reason)
    if whole:
        return
    if doubtful:
        yield Suspect(Part.NODE, me, AMBIGUOUS)
    local, fabric = local or {}, fabric or {}
    for part, (_, reason) in local.items():
        yield Suspect(Part.GPU, f"{me}/gpu{part}", reason)
    for part, (cause, reason) in fabric.items():
        if part not in local:
            well = _gpu_is_well(part, history, now)
            if well is not None:
                yield Suspect(
                    Part.NIC, nic(me, part), reason if well and cause is Cause.SELF else AMBIGUOUS
                )


def nic(node: str, part: str) -> str:
    """Return an adapter's component name: by its own name, or by the index of its nearest GPU."""
    return f"{node}/nic{part}" if part.isdecimal() else f"{node}/{part}"


def waits_for_home(history: Mapping[Signal, SignalHistory], verdicts: Verdicts, now: float) -> bool:
    """Return whether a local round is needed to distinguish an adapter's fault from its GPU's."""
    return any(
        cause is Cause.SELF
        and track.part
        and track.family != LOCAL
        and _gpu_is_well(track.part, history, now) is None
        for track, (cause, _) in verdicts.items()
    )


def _parts(
    own: Verdicts, history: Mapping[Signal, SignalHistory], family: str, *, same: bool
) -> dict[str, tuple[Cause, str]] | None:
    """Return the parts accused by rounds of `family` (`same`), or by all other rounds. None if so
    many are accused or above the usual that the node as a whole is at fault.
    """
    known = {track.part for track in history if track.part and (track.family == family) is same}
    accused = {
        track.part: verdict
        for track, verdict in own.items()
        if track.part and (track.family == family) is same
    }
    if not accused:
        return accused
    uneasy = {
        track.part
        for track, entry in history.items()
        if track.part and (track.family == family) is same and entry.uneasy()
    }
    return (
        None
        if len(known) > 1 and 2 * len(accused.keys() | uneasy) >= max(len(known), 4)
        else accused
    )


def _gpu_is_well(part: str, history: Mapping[Signal, SignalHistory], now: float) -> bool | None:
    """Return whether local rounds since the investigation was opened cleared an adapter's GPU. None
    while that is not known. False if it cannot be known: the local round was refused, or none has
    given a result within `_WAIT` seconds, as when the GPU has no baseline yet.
    """
    investigations = [
        entry.investigation
        for track, entry in history.items()
        if track.part == part and track.family != LOCAL and entry.investigation
    ]
    if not investigations:
        return False
    opened = min(investigation.opened for investigation in investigations)
    rows = [
        entry
        for track, entry in history.items()
        if track.family == LOCAL and (track.part == part or not part.isdecimal())
    ]
    since = [entry for entry in rows if entry.window and entry.window[-1].round.at > opened]
    if any(entry.window[-1].bad or entry.investigation for entry in since):
        return None
    if since:
        return True
    return (
        False
        if any(
            investigation.home_refused
            or (investigation.decided and now - investigation.decided > _WAIT)
            for investigation in investigations
        )
        else None
    )
