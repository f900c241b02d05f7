"""The order in which workers take files of tests."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests import schedule

if TYPE_CHECKING:
    from pathlib import Path

PLUGIN = "from tests.schedule import *\nfrom tests import schedule\n"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The slowest file comes first, in powers of two; what takes no time is left out."""
    table = tmp_path / "durations.txt"
    table.write_text(schedule.rendered({"b.py": 4.0, "a.py": 4.0, "c.py": 65.0, "d.py": 3.9}))
    assert list(schedule.recorded(table).items()) == [("c.py", 128), ("a.py", 4), ("b.py", 4)]


def test_slow_files_begin_first(tmp_path: Path) -> None:
    """A worker begins with the slowest file, whatever its name and however few tests it has; what
    the table does not name comes last, and every test runs.
    """
    (tmp_path / "conftest.py").write_text(
        f"import pathlib\n{PLUGIN}schedule.TABLE = pathlib.Path('durations.txt')\n"
    )
    (tmp_path / "durations.txt").write_text("64 test_c.py\n8 test_b.py\n")
    for name, tests in (("a", 3), ("b", 1), ("c", 2)):
        (tmp_path / f"test_{name}.py").write_text(
            "".join(f"def test_{number}():\n    pass\n" for number in range(tests))
        )
    command = [sys.executable, "-m", "pytest", "-v", "-n", "1", "--dist", "loadfile"]
    done = subprocess.run(
        [*command, "--no-loadscope-reorder", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    ran = [line.partition("test_")[2][0] for line in done.stdout.splitlines() if "PASSED" in line]
    assert ran == ["c", "c", "b", "a", "a", "a"], done.stdout
