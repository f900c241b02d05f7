"""The probe's worker on the simulated CUDA runtime: the real one, less what takes arithmetic.

Kernels do nothing there, so that no sum is right: results are not compared. What an adapter's name
says is done to the worker, as in `tests/probe/saboteur.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "probe" / "saboteur.py"
SPEC = importlib.util.spec_from_file_location("saboteur", PATH)
assert SPEC is not None
assert SPEC.loader is not None
saboteur = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(saboteur)


def difference(_what: str, _found: object, _expected: object) -> str:
    """Find nothing wrong, as nothing was computed."""
    return ""


saboteur.worker.difference = difference

if __name__ == "__main__":
    saboteur.worker.main(sys.argv[1:])
