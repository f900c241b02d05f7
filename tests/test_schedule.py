"""The order in which workers take files of tests."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

from tests import schedule

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PLUGIN = "from tests.schedule import *\nfrom tests import schedule\n"


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """The slowest file comes first, in powers of two; what takes no time is left out."""
    table = tmp_path / "durations.txt"
    table.write_text(schedule.rendered({"b.py": 4.0, "a.py": 4.0, "c.py": 65.0, "d.py": 3.9}))
    assert list(schedule.recorded(table).items()) == [("c.py", 128), ("a.py", 4), ("b.py", 4)]


def test_slow_files_begin_first(tmp_path: Path) -> None:
    """Workers begin with the slowest file, whatever its name and however few tests it has, and
    share the tests of one that takes long; what the table does not name comes last, as a whole.
    """
    (tmp_path / "conftest.py").write_text(
        f"import pathlib\n{PLUGIN}schedule.TABLE = pathlib.Path('durations.txt')\n"
    )
    (tmp_path / "durations.txt").write_text("64 test_c.py\n16 test_d.py\n8 test_b.py\n")
    for name, tests in (("a", 3), ("b", 2), ("c", 2), ("d", 1)):
        (tmp_path / f"test_{name}.py").write_text(
            "".join(f"def test_{number}():\n    pass\n" for number in range(tests))
        )
    command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "--dist", "loadfile"]
    done = subprocess.run(
        [*command, "--no-loadscope-reorder", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    ran: dict[str, str] = {}
    for worker, file in re.findall(r"(?m)^\[(gw\d)\].* PASSED .*test_(\w)\.py::", done.stdout):
        ran[worker] = ran.get(worker, "") + file
    begun = {files.replace("a", "") for files in ran.values()}
    assert begun == {"cd", "cbb"}, done.stdout
    assert any(files.endswith("aaa") for files in ran.values()), done.stdout


def test_tests_that_share_a_fixture_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes long is one unit all the same if a fixture of it outlives a test, and
    begins before one that is shared.
    """
    monkeypatch.setattr(schedule, "TABLE", tmp_path / "durations.txt")
    schedule.TABLE.write_text("512 test_a.py\n128 test_b.py\n32 test_c.py\n")
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text("")
    (tmp_path / "test_b.py").write_text("@pytest.fixture(scope='module')\ndef b(): ...\n")
    files = [f"test_{name}.py" for name in "abcd"]
    assert [name for name in files if schedule.divisible(tmp_path, name)] == ["test_a.py"]
    assert [schedule.longest(tmp_path, name) for name in files] == [64, 128, 32, 0]
