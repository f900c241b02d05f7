"""States of nodes as Slurm's commands write them."""

from __future__ import annotations

import pytest

from dshealthd.slurm.controller import NodeState


@pytest.mark.parametrize(
    ("text", "drained", "working"),
    [
        ("idle", False, True),
        ("IDLE", False, True),
        ("alloc", False, True),
        ("allocated+", False, True),
        ("mixed", False, True),
        ("mix-", False, True),
        ("IDLE+PLANNED", False, True),
        ("idle*", False, True),
        ("IDLE+NOT_RESPONDING", False, True),
        ("ALLOCATED+COMPLETING", False, True),
        ("comp", False, True),
        ("IDLE+CLOUD", False, True),
        ("IDLE+DYNAMIC_NORM", False, True),
        ("drained", True, False),
        ("drained*", True, False),
        ("drng@", True, False),
        ("draining", True, False),
        ("IDLE+DRAIN+NOT_RESPONDING", True, False),
        ("DOWN+DRAIN", True, False),
        ("MIXED+DRAIN+REBOOT_REQUESTED", True, False),
        ("idle@", False, False),
        ("idle^", False, False),
        ("mixed#", False, False),
        ("idle~", False, False),
        ("idle%", False, False),
        ("idle!", False, False),
        ("idle$", False, False),
        ("maint", False, False),
        ("IDLE+MAINTENANCE+RESERVED", False, False),
        ("down*", False, False),
        ("DOWN+NOT_RESPONDING", False, False),
        ("fail", False, False),
        ("failing", False, False),
        ("inval", False, False),
        ("unk*", False, False),
        ("future", False, False),
        ("IDLE+SOMETHING_NEW", False, False),
        ("", False, False),
    ],
)
def test_states(text: str, *, drained: bool, working: bool) -> None:
    """Each form is understood, and a node is touched only in a state in which it takes jobs."""
    state = NodeState.parse(text)
    assert (state.drained, state.working) == (drained, working)
