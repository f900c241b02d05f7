"""Maintenance that several sources have declared; `tests/test_maintenance.py` has each of them."""

from __future__ import annotations

import time
from pathlib import Path

from dshealthd.collectors.maintenance import BEGIN, END
from dshealthd.maintenance.file import FILES, Maintenance
from tests.collectors.bench import Bench, value


def test_first_begin_and_last_end(tmp_path: Path) -> None:
    """The node is in maintenance from the first begin to the last end of those that hold."""
    now = time.time()
    for source, begin, end in (("operator", 100.0, now + 60), ("slurm", 50.0, now + 90)):
        (tmp_path / FILES[source]).write_bytes(Maintenance(begin, end, "").encode())
    bench = Bench("maintenance")
    bench.context.state = tmp_path
    result = bench.collect()
    assert (value(result, BEGIN), value(result, END)) == (50, now + 90)
    (tmp_path / FILES["slurm"]).write_bytes(Maintenance(50.0, now - 1, "").encode())
    result = bench.collect()
    assert (value(result, BEGIN), value(result, END)) == (100, now + 60)
