"""What `./dev test` installs for the tests that are chosen, and which of them are quick."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import needs, schedule


def wanted(capsys: pytest.CaptureFixture[str], *arguments: str) -> set[str]:
    """Return what is printed for arguments of pytest."""
    needs.main(list(arguments))
    return set(capsys.readouterr().out.split())


BROWSER = "chromium-headless-shell:chromium-headless-shell"


def test_a_package_of_parsers_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """The tests of the core are run without a server, a browser or PyTorch."""
    assert wanted(capsys, "tests/core", "-k", "wire") == set()


@pytest.mark.parametrize(("argument", "need"), [
    ("tests/test_prometheus.py", "prometheus:prometheus"),
    ("tests/symptoms/test_scenes.py", "promtool:prometheus"),  # which a module it imports runs
    ("tests/web/test_page.py::test_page_shows_this_machine", BROWSER),
    ("tests/faults/test_blocked_log.py", "faketime:faketime"),  # a library
    ("tests/training/test_trainings.py", "torch"),
    ("tests/jobs/test_visible_devices.py", "torch"),  # where it is imported by name
])  # fmt: skip
def test_what_is_used_is_needed(
    capsys: pytest.CaptureFixture[str], argument: str, need: str
) -> None:
    """A program or a package is found where a test or what it imports uses it; and no browser is
    installed for a file that opens none.
    """
    assert need in wanted(capsys, argument)
    assert (BROWSER in wanted(capsys, argument)) == ("web/" in argument)


def test_everything_is_installed_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a path, what any test needs is installed."""
    programs = {f"{name}:{package}" for name, package in needs.PACKAGES.items()}
    assert wanted(capsys) == wanted(capsys, "--record-durations") == {*programs, "torch"}


def test_quick_tests_need_no_server_and_are_not_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file is for every day unless it needs a program, or the table calls it slow."""
    monkeypatch.setattr(needs, "ROOT", tmp_path)
    monkeypatch.setattr(schedule, "TABLE", tmp_path / "durations.txt")
    schedule.TABLE.write_text("16 tests/test_slow.py\n8 tests/test_brisk.py\n", encoding="utf-8")
    folder = tmp_path / "tests"
    folder.mkdir()
    sources = {"slow": "", "brisk": "", "unknown": "", "server": 'run("prometheus")'}
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source, encoding="utf-8")
    quick = [name for name in sources if schedule.quick(folder / f"test_{name}.py")]
    assert quick == ["brisk", "unknown"]
