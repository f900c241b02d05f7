"""The README's table of what was tested with what, extended by what a run has met.

`./dev neighbors` ends so, and `pytest -p tests.tested_with …`. A row changes only if its tests ran,
and all that ran passed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tests.training import foreign

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
HEADING = "## Tested with"
RELEASE = re.compile(r"\b(\d+\.\d+)")


def program(*command: str) -> str:
    """Return the release that a program says it is; empty where it is missing."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def package(name: str) -> str:
    """Return the version of a package that `./dev neighbors` has unpacked: programs say none."""
    found = sorted((ROOT / "build/next/packages").glob(f"{name}_*.deb"))
    return found[-1].name.partition("_")[2] if found else ""


def version_of(torch: foreign.Torch | None) -> str:
    """Return the version of the torch that tests of environments have met."""
    return torch.version if torch else ""


MET: dict[str, Callable[[], str]] = {
    "Prometheus": lambda: program("prometheus", "--version"),
    "Alertmanager": lambda: program("prometheus-alertmanager", "--version"),
    "VictoriaMetrics, vmagent, vmalert": lambda: package("victoria-metrics"),
    "Slurm": lambda: program("slurmctld", "-V"),
    "torch of trainings and probes": lambda: metadata.version("torch"),
    "torch in users' environments": lambda: version_of(foreign.torch()),
    "DeepSpeed": lambda: metadata.version("deepspeed"),
    "NVIDIA's nvidia-ml-py": lambda: metadata.version("nvidia-ml-py"),
}
"""What tells the version of a neighbor in this run, by its name in the table."""


def rows(text: str) -> dict[str, tuple[str, str, str]]:
    """Return the rows of the README's table: oldest, newest, and what tests it."""
    section = text.partition(HEADING)[2].partition("\n## ")[0]
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "]
    return {name: (oldest, newest, by) for name, oldest, newest, by in lines[1:]}


def paths(by: str) -> list[str]:
    """Return the tests that a row names."""
    return re.findall(r"`(tests/[^`]*)`", by)


def extended(text: str, outcomes: dict[str, set[str]]) -> str:
    """Return the README after a run.

    Args:
        text: The README.
        outcomes: By file of tests, how its tests ended.
    """
    for name, (oldest, newest, by) in rows(text).items():
        if name not in MET:
            continue
        met = [outcomes[file] for file in outcomes for path in paths(by) if file.startswith(path)]
        if "failed" in set().union(*met) or not any("passed" in ended for ended in met):
            continue
        if (found := RELEASE.search(MET[name]())) is None:
            continue
        seen = sorted({oldest, newest, found[1]}, key=_release)
        text = text.replace(
            f"| {name} | {oldest} | {newest} |", f"| {name} | {seen[0]} | {seen[-1]} |"
        )
    return text


def _release(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


_outcomes: defaultdict[str, set[str]] = defaultdict(set)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how each test of a file ended; what skips itself has met nothing."""
    if report.when == "call" or report.failed:
        _outcomes[report.location[0]].add(report.outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the table."""
    if not hasattr(session.config, "workerinput"):
        before = README.read_text("utf-8")
        if (after := extended(before, _outcomes)) != before:
            README.write_text(after, "utf-8")
