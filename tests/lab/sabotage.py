"""A worker that goes wrong as long as the file named by SABOTAGE says how, in the words of
`tests/probe/saboteur.py`; honest otherwise.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

PATH = Path(__file__).resolve().parents[1] / "probe" / "saboteur.py"
SPEC = importlib.util.spec_from_file_location("saboteur", PATH)
assert SPEC is not None
assert SPEC.loader is not None
saboteur = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(saboteur)


def instructions() -> str:
    """Return what is to be done in this round."""
    try:
        return Path(os.environ["SABOTAGE"]).read_text(encoding="ascii")
    except FileNotFoundError:
        return ""


# Of a module that was loaded by path.
class RankRound(saboteur.RankRound):  # type: ignore[name-defined,misc]
    """Is told what to do by the file, not by the job."""

    def __init__(self, agent: Any, board: Any, job: dict[str, Any]) -> None:
        """Read the file before anything runs."""
        super().__init__(agent, board, {**job, "adapter": instructions()})


saboteur.worker.RankRound = RankRound

if __name__ == "__main__":
    role, _, *numbers = sys.argv[1:]
    roots = os.pathsep.join(
        map(os.path.realpath, sys.path)
    )  # the launcher has not seen which interpreter this is
    saboteur.worker.main([role, roots, *numbers])
