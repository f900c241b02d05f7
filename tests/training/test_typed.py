"""The API of `dshealthd.training` as users type it: a type checker knows what they call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = '''\
"""A user's training."""
from typing import Any

from dshealthd.training import attach


def train(engine: Any, optimizer: Any, model: Any, losses: list[float]) -> None:
    attach(engine)
    with attach(optimizer=optimizer, model=model, scaler=None, step=3) as heartbeat:
        for loss in losses:
            heartbeat.loss(loss)
        with heartbeat.phase("evaluation"):
            pass
        heartbeat.close()
'''
WRONG = {
    "heartbeat.loss(loss)": ("heartbeat.lost(loss)", 'no attribute "lost"'),
    'phase("evaluation")': ("phase(3)", 'has incompatible type "int"'),
    "step=3": ("steps=3", "Unexpected keyword argument"),
}


def errors(tmp_path: Path, script: str) -> str:
    """Return what a strict type checker says of a script."""
    # Not from a file: one of the same size in the same second is the one it knows.
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={tmp_path}/cache", "-c", script],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert not done.stderr, done.stderr
    return done.stdout


def test_a_users_script_is_checked(tmp_path: Path) -> None:
    """A strict checker accepts what the documentation shows, and refuses misspelled calls."""
    assert errors(tmp_path, SCRIPT).startswith("Success")
    for right, (wrong, message) in WRONG.items():
        assert SCRIPT.count(right) == 1
        assert message in errors(tmp_path, SCRIPT.replace(right, wrong))
