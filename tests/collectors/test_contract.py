"""What every collector keeps to, whatever it reads."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from dshealthd import collectors
from dshealthd.config import registry
from dshealthd.core.collector import Reason
from dshealthd.core.exposition import render
from dshealthd.core.result import CollectionOutcome
from tests.collectors.bench import Bench, copied, write
from tests.collectors.test_golden import FILES

FORBIDDEN = {
    "asyncio", "concurrent", "dshealthd.core.background", "dshealthd.core.timing",
    "multiprocessing", "signal", "subprocess", "threading",
}  # fmt: skip
"""Modules that a reader of one source has no use for: a loop, timers, threads, children."""


def imported(tree: ast.AST) -> set[str]:
    """Return the modules that a file imports anywhere, with the names taken from them."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("name", [*registry.all_collectors()])
def test_collectors_are_synchronous(name: str) -> None:
    """A collector has no loop, timer, thread or child of its own: services have."""
    path = Path(next(iter(collectors.__path__))) / f"{name}.py"
    found = imported(ast.parse(path.read_text(encoding="utf-8")))
    assert {module for module in found if module in FORBIDDEN} == set()


def test_metrics_are_sound() -> None:
    """Promtool has nothing to say about names, types and help, of whatever a collector exports."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool comes with Debian's prometheus; ./dev test installs it"
    metrics = [
        metric
        for collector in registry.all_collectors().values()
        for metric in registry.metrics(collector).values()
    ]
    text = render([metric(1, *metric.labels) for metric in metrics])
    check = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    assert (check.returncode, check.stdout + check.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        *((name, CollectionOutcome.NOT_AVAILABLE) for name in ("disk", "gpu_bus", "infiniband")),
        *((name, CollectionOutcome.NOT_AVAILABLE) for name in ("pressure", "tcp_limits")),
        *((name, CollectionOutcome.ERROR) for name in ("kernel", "memory", "network", "tcp")),
    ],
)
def test_machine_without_the_source(name: str, outcome: CollectionOutcome, tmp_path: Path) -> None:
    """What some machines lack is not available; where it always is, its absence is an error that
    names it. Nothing is exported: unknown is not 0.
    """
    result = Bench(name, tmp_path).collect()
    assert (result.outcome, result.samples) == (outcome, ())
    if outcome is CollectionOutcome.ERROR:
        assert result.reason is Reason.NOT_FOUND
        assert str(tmp_path) in result.detail


@pytest.mark.parametrize(("name", "path", "texts"), [
    ("disk", "diskstats", ("8 0 sda 1", "8 0 sda 1 2 3 4 5 6 7 8 9 10 11 12 13 14 x", "")),
    ("kernel", "loadavg", ("", "x", "1 2 x y z")),
    ("kernel", "uptime", ("", "x")),
    ("kernel", "sys/vm/swappiness", ("", "x", "1 2 x y z")),
    ("memory", "meminfo", ("MemTotal: lots kB", "MemTotal:", "MemTotal")),
    ("memory", "vmstat", ("oom_kill", "nr_free_pages 7\noom_kill many")),
    ("open_files", "sys/fs/file-nr", ("many", "1 2")),
    ("pressure", "pressure/cpu", ("some", "some avg10=x total=0", "some total=0")),
    ("tcp_limits", "sys/net/ipv4/tcp_max_tw_buckets", ("many", "")),
    ("tcp_limits", "sys/net/ipv4/ip_local_port_range", ("2 1", "1", "a b")),
])  # fmt: skip
def test_file_that_makes_no_sense(
    name: str, path: str, texts: tuple[str, ...], tmp_path: Path
) -> None:
    """It is malformed and named: a fault beside what the other files tell, or, where there are
    none, an error; nothing is exported that the file alone tells.
    """
    base = copied(FILES.get(name, name), tmp_path)
    whole = {sample[:2] for sample in Bench(name, base).collect().samples}
    for text in texts:
        write(base / "proc", {path: text})
        result = Bench(name, base).collect()
        said = {(fault.reason, path in fault.detail) for fault in result.faults}
        if result.outcome is not CollectionOutcome.OK:
            said.add((result.reason or Reason.INTERNAL, path in result.detail))
        assert said == {(Reason.MALFORMED, True)}, text
        assert {sample[:2] for sample in result.samples} < whole, text
