"""The order in which workers take the files of tests: slow ones first, whatever is unknown after
them. Tests of the slowest run in any worker each, or all would wait for the last of them.

Most tests wait (for a deadline, a server, a page): there are more workers than processors, and the
file that takes longest must not begin last.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

from tests import needs

TABLE = Path(__file__).with_name("durations.txt")
SHORT = 4
"""Seconds; a file that takes fewer is not in the table."""
QUICK = 8
"""Seconds; files that take more are not for every day."""
LONG = 64
"""Seconds; tests of a file that takes as many are taken one by one, unless they share a fixture."""
WAITING = 3
"""Workers beyond one for each processor: so many files wait rather than compute."""
IMPORTS_TORCH = re.compile(r'\b(?:Lazy|import_module|importorskip)\("torch"')
FIRST = "gw0"
"""The worker that collects before the others do."""
COLLECTS = 120.0
"""Seconds for which they wait for it at most."""
HEADER = """\
# Seconds that files of tests take, as the next power of two: the slow ones begin first.
# Written by `./dev test --record-durations`; a file that is missing runs after these.
"""


class SlowFirst(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Whole files in the order of their collection, long ones test by test, those that import torch
    together, and no second unit for a worker before its last test: it would wait there behind a
    slow test while others are idle.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        if imports_torch(self.config.rootpath, file):
            return "torch"  # one worker imports it, which takes six seconds of CPU
        return nodeid if divisible(self.config.rootpath, file) else file

    def _reschedule(self, node: WorkerController) -> None:
        more = self.workqueue and not node.shutting_down
        if more and self._pending_of(self.assigned_work[node]) > 1:
            return
        super()._reschedule(node)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare how the table is renewed."""
    parser.addoption(
        "--record-durations", action="store_true", help=f"write {TABLE.name}, after a whole run"
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out files that are slow, or need a server, a browser, a namespace or PyTorch",
    )


def quick(file: Path) -> bool:
    """Tell whether a file of tests is for every day."""
    name = str(file.relative_to(needs.ROOT))
    return recorded(TABLE).get(name, 0) <= QUICK and not (
        needs.trains(file) or needs.programs(file) - {"openssl"}
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not for every day, if asked to."""
    is_test = collection_path.match("test_*.py")
    return True if is_test and config.getoption("--quick") and not quick(collection_path) else None


def pytest_xdist_auto_num_workers() -> int:
    """Return how many workers `-n auto` starts."""
    return len(os.sched_getaffinity(0)) + WAITING


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> SlowFirst | None:
    """Return the scheduler for `--dist loadfile`."""
    return SlowFirst(config, log) if config.getvalue("dist") == "loadfile" else None


def await_first(config: pytest.Config) -> None:
    """Have the other workers collect after the first one: in a fresh checkout each would rewrite
    the asserts of every file, fifteen seconds of CPU, that the first leaves compiled for them.
    """
    worker = getattr(config, "workerinput", {"workerid": FIRST})
    end = time.monotonic() + COLLECTS
    while worker["workerid"] != FIRST and time.monotonic() < end and not _mark(worker).exists():
        time.sleep(0.05)


def tell_others(config: pytest.Config, *, collected: bool) -> None:
    """Leave a mark while the first worker has collected."""
    worker = getattr(config, "workerinput", {"workerid": ""})
    if worker["workerid"] == FIRST and collected:
        _mark(worker).touch()
    elif worker["workerid"] == FIRST:
        _mark(worker).unlink(missing_ok=True)


def _mark(worker: dict[str, str]) -> Path:
    return Path(tempfile.gettempdir(), f"collected-{worker['testrunuid']}")


@functools.cache
def divisible(root: Path, file: str) -> bool:
    """Tell whether a file takes long and has no fixture that several of its tests share."""
    seconds = recorded(TABLE).get(file, 0)
    return seconds >= LONG and "scope=" not in (root / file).read_text(encoding="utf-8")


@functools.cache
def imports_torch(root: Path, file: str) -> bool:
    """Tell whether a file's tests use torch in their own process."""
    return bool(IMPORTS_TORCH.search((root / file).read_text(encoding="utf-8")))


def longest(root: Path, file: str) -> int:
    """Return the seconds that a worker is busy with a file at most, as far as they are known."""
    return min(recorded(TABLE).get(file, 0), LONG if divisible(root, file) else sys.maxsize)


@functools.cache
def recorded(table: Path) -> dict[str, int]:
    """Return the seconds of the files in a table."""
    lines = table.read_text(encoding="utf-8").splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: int(seconds) for seconds, name in rows}


def rendered(seconds: dict[str, float]) -> str:
    """Return a table. Powers of two, so that a new recording changes few lines."""
    rows = [
        (2 ** math.ceil(math.log2(taken)), name)
        for name, taken in seconds.items()
        if taken >= SHORT
    ]
    return HEADER + "".join(
        f"{taken} {name}\n" for taken, name in sorted(rows, key=lambda row: (-row[0], row[1]))
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put slow files first, in each worker alike; a run without workers keeps its order."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -longest(config.rootpath, item.location[0]))


_taken: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up what each file takes."""
    _taken[report.location[0]] += report.duration  # type: ignore[assignment] # a Counter of floats


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table, if asked to."""
    config = session.config
    tell_others(config, collected=False)
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        TABLE.write_text(rendered(dict(_taken)), encoding="utf-8")
