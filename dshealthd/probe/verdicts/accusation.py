"""Accusations: which part of this node, or its leaf, the decided investigations implicate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dshealthd.probe.observation import Part, Suspect
from dshealthd.probe.verdicts.signals import Cause, Investigation, Signal, SignalHistory

AMBIGUOUS = "ambiguous"
FABRIC = "fabric"
"""The component of an accusation that applies to every leaf."""
_WAIT = 60.0
"""Seconds within which a local round should have run: one is requested in each 10 s slot."""

Verdicts = dict["Signal", tuple[Cause, str]]
"""Cause and reason of each decided investigation."""


def accusations(
    me: str, leaf: str, history: Mapping[Signal, SignalHistory], verdicts: Verdicts, now: float
) -> Iterator[Suspect]:
    """Yield the accusations of this node, its parts and its leaf. A larger part is accused in place
    of the smaller ones that it explains.
    """
    own = {signal: found for signal, found in verdicts.items() if not _is_wide(found)}
    wide = [found for found in verdicts.values() if _is_wide(found)]
    for cause, reason in dict.fromkeys(wide):
        is_leaf = cause is Cause.LEAF
        yield Suspect(Part.LEAF, leaf if is_leaf else FABRIC, reason if is_leaf else AMBIGUOUS)
    if len(own) <= len(wide):
        return
    whole = dict.fromkeys(
        reason for signal, (cause, reason) in own.items() if not signal.part and cause is Cause.SELF
    )
    gpus, adapters = (_parts(own, history, local=local) for local in (True, False))
    if gpus is None or adapters is None:
        whole |= dict.fromkeys(reason for signal, (_, reason) in own.items() if signal.part)
    for reason in whole:
        yield Suspect(Part.NODE, me, reason)
    if whole or gpus is None or adapters is None:
        return
    if any(not signal.part for signal in own):
        yield Suspect(Part.NODE, me, AMBIGUOUS)
    for part, (_, reason) in gpus.items():
        yield Suspect(Part.GPU, f"{me}/gpu{part}", reason)
    for part, (cause, reason) in adapters.items():
        well = None if part in gpus else _gpu_is_well(part, history, now)
        if well is not None:
            name = f"{me}/nic{part}" if part.isdecimal() else f"{me}/{part}"
            yield Suspect(Part.NIC, name, reason if well and cause is Cause.SELF else AMBIGUOUS)


def waits_for_home(history: Mapping[Signal, SignalHistory], verdicts: Verdicts, now: float) -> bool:
    """Return whether a local round is needed to distinguish an adapter's fault from its GPU's."""
    return any(
        cause is Cause.SELF
        and signal.part
        and not signal.local
        and _gpu_is_well(signal.part, history, now) is None
        for signal, (cause, _) in verdicts.items()
    )


def _is_wide(found: tuple[Cause, str]) -> bool:
    return found[0] in {Cause.LEAF, Cause.FABRIC}


def _parts(
    own: Verdicts, history: Mapping[Signal, SignalHistory], *, local: bool
) -> dict[str, tuple[Cause, str]] | None:
    """Return the parts accused by local rounds, or by all others. None if so many are accused or
    above the usual that the node as a whole is at fault.
    """
    known = {s.part for s in history if s.part and s.local is local}
    accused = {s.part: found for s, found in own.items() if s.part and s.local is local}
    uneasy = {
        s.part for s, entry in history.items() if s.part and s.local is local and entry.uneasy()
    }
    many = 2 * len(accused.keys() | uneasy) >= max(len(known), 4)
    return None if accused and many else accused


def _gpu_is_well(part: str, history: Mapping[Signal, SignalHistory], now: float) -> bool | None:
    """Return whether local rounds since the investigation was opened cleared an adapter's GPU. None
    while that is not known. False if it cannot be known: the local round was refused, or none has
    given a result within `_WAIT` seconds, as when the GPU has no baseline yet.
    """
    investigations: list[Investigation] = [
        entry.investigation
        for signal, entry in history.items()
        if signal.part == part and not signal.local and entry.investigation
    ]
    opened = min(investigation.opened for investigation in investigations)
    since = [
        entry
        for signal, entry in history.items()
        if signal.local
        and signal.part
        and (signal.part == part or not part.isdecimal())
        and entry.recent
        and entry.recent[-1].round.at > opened
    ]
    if any(entry.recent[-1].bad or entry.investigation for entry in since):
        return None
    if since:
        return True
    waiting = not any(
        investigation.home_refused
        or (investigation.decided and now - investigation.decided > _WAIT)
        for investigation in investigations
    )
    return None if waiting else False
