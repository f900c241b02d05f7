"""States of nodes as sinfo writes them."""

from __future__ import annotations

import pytest

from dshealthd.slurm.controller import NodeState


@pytest.mark.parametrize(
    ("text", "drained", "working"),
    [
        ("idle", False, True),
        ("allocated", False, True),
        ("mixed+planned", False, True),
        ("idle+not_responding", False, True),
        ("ALLOCATED+COMPLETING", False, True),
        ("idle+cloud", False, True),
        ("idle+dynamic_norm", False, True),
        ("idle+drain", True, False),
        ("allocated+drain+reboot_requested", True, False),
        ("idle+drain+not_responding", True, False),
        ("down+drain", True, False),
        ("idle+reboot_issued", False, False),
        ("mixed+powering_up", False, False),
        ("idle+powered_down", False, False),
        ("idle+maintenance+reserved", False, False),
        ("down+not_responding", False, False),
        ("idle+fail", False, False),
        ("unknown", False, False),
        ("future", False, False),
        ("idle+something_new", False, False),
        ("", False, False),
    ],
)
def test_states(text: str, *, drained: bool, working: bool) -> None:
    """A node is touched only where it takes jobs; an unknown flag is somebody's work."""
    state = NodeState.parse(text)
    assert (state.drained, state.working) == (drained, working)
