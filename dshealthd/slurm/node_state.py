"""The state of a node as Slurm prints it.

`scontrol show node` and sinfo's `StateComplete` print a base state and flags
(`IDLE+DRAIN+NOT_RESPONDING`), sinfo's `%T` and `%t` a word with a suffix (`drained*`, `drng@`). The
suffixes are those of sinfo(1), NODE STATE CODES.
"""

from __future__ import annotations

from typing import NamedTuple

_SUFFIXES = {
    "*": "not_responding",
    "~": "powered_down",
    "#": "powering_up",
    "!": "power_down",
    "%": "powering_down",
    "$": "maint",
    "@": "reboot_requested",
    "^": "reboot_issued",
    "-": "planned",
}
_WORDS = {
    "alloc": ("allocated",),
    "comp": ("completing",),
    "drain": ("idle", "drain"),
    "drained": ("idle", "drain"),
    "draining": ("allocated", "drain"),
    "drng": ("allocated", "drain"),
    "failg": ("allocated", "fail"),
    "failing": ("allocated", "fail"),
    "futr": ("future",),
    "inval": ("invalid",),
    "mix": ("mixed",),
    "plnd": ("planned",),
    "pow_dn": ("powering_down",),
    "pow_up": ("powering_up",),
    "powered_down": ("powered_down",),
    "resv": ("reserved",),
    "unk": ("unknown",),
}
_WORKING = frozenset(("idle", "allocated", "mixed", "completing", "reserved", "planned"))
_HARMLESS = frozenset(
    (
        *("completing", "reserved", "planned", "cloud", "dynamic_norm", "dynamic_future"),
        # A node that has just been resumed is `*` until the controller has heard from it.
        "not_responding",
    )
)
"""Flags of a node that takes jobs, or soon will."""


class NodeState(NamedTuple):
    """A base state and its flags, in lower case."""

    base: str
    flags: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> NodeState:
        """Parse Slurm's state in any form; an unknown word becomes a base or a flag unchanged."""
        text = text.strip().lower()
        flags = set()
        while text and text[-1] in _SUFFIXES:
            flags.add(_SUFFIXES[text[-1]])
            text = text[:-1]
        # sinfo appends a `+` when it merges lines of several states.
        words = [word for word in text.split("+") if word]
        if len(words) == 1:
            words = list(_WORDS.get(words[0], words))
        return cls(words[0] if words else "unknown", frozenset({*words[1:], *flags}))

    @property
    def drained(self) -> bool:
        """Whether Slurm's state of the node is draining or drained."""
        return "drain" in self.flags

    @property
    def working(self) -> bool:
        """Whether the node takes jobs now: nobody has drained, failed, reserved or stopped it.

        Unknown flags count as somebody's work, with which dshealthd does not interfere.
        """
        return self.base in _WORKING and not self.flags - _HARMLESS
