"""What worker processes import: no loop, no TLS, no server; several of them run on each node."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dshealthd.collection import registry
from dshealthd.core.collector import Worker

OF_THE_AGENT = ("aiohttp", "asyncio", "concurrent.futures", "dshealthd.config", "ssl")
"""What takes 4 MiB of each process that imports it, or more."""


@pytest.mark.parametrize("worker", Worker)
def test_worker_imports_nothing_of_the_loop(worker: Worker) -> None:
    """A worker with all its collectors has nothing that only the agent needs."""
    names = [name for name, kind in registry.all_collectors().items() if kind.worker == worker]
    assert names
    code = (
        "import sys; from dshealthd.collection import registry, worker\n"
        "for name in sys.argv[1:]: registry.load(name)\n"
        f"print(*sorted(set({OF_THE_AGENT!r}) & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == []
