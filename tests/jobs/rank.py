"""A rank without torch, run as a process of its own by the tests.

It makes steps, until it is told what goes wrong with it.
"""

import select
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from dshealthd.training.heartbeat import Heartbeat

STEP = 0.02
"""Seconds that a step takes."""


class Model:
    """What a heartbeat asks of a torch module."""

    training = True

    def parameters(self) -> Iterator[None]:
        """Return none, as it has none."""
        return iter(())


def trouble(heartbeat: Heartbeat, what: str) -> None:
    """Do what is told instead of the next step."""
    if what == "checkpoint":
        heartbeat.enter("checkpoint")
    elif what != "input":
        heartbeat.forward_began(Model())
        heartbeat.forward_ended()
    if what == "fail":
        sys.exit("out of luck")
    if what == "end":
        sys.exit()
    while what == "compute":
        pass
    time.sleep(600)


def main() -> None:
    """Make steps, with the stages that a model's hooks tell."""
    # All that is asked of it.
    torch: Any = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    sys.modules["torch"] = torch
    heartbeat = Heartbeat()
    while True:
        while not select.select([sys.stdin], [], [], 0)[0]:
            heartbeat.forward_began(Model())
            time.sleep(STEP / 2)
            heartbeat.forward_ended()
            time.sleep(STEP / 2)
            heartbeat.step()
        what = sys.stdin.readline().strip()
        if what == "pause":
            sys.stdin.readline()
        else:
            trouble(heartbeat, what)


if __name__ == "__main__":
    main()
