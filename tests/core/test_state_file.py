"""The child that touches the disk of `path.state`, where it cannot be started."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from dshealthd.core import state_file
from dshealthd.core.child import StartError

if TYPE_CHECKING:
    from pathlib import Path


def test_no_child_is_not_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that is gone is a StartError, as a missing file would mean that there is no
    state.
    """
    place = tmp_path / "x.json"
    place.write_bytes(b"{}")
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(StartError, match=f"the process for {place} .*'/nonexistent/python'"):
            state_file.read_in_child(str(place), 10)
        with pytest.raises(StartError, match=f"the process for {tmp_path} cannot be started"):
            state_file.names_in_child(str(tmp_path))
    assert state_file.read_in_child(str(place), 10) == b"{}"
