"""`dshealthd maintenance`, and what the agent's collector makes of the files it writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dshealthd.cli import main as cli
from dshealthd.collectors.maintenance import ACTIVE, END, INFO, MaintenanceCollector
from dshealthd.core.collector import Context, Fault, Metric, Reason
from dshealthd.core.host import Host
from dshealthd.core.result import CollectionOutcome, CollectionResult, attempt
from dshealthd.maintenance.file import FILES, Maintenance, parse


def command(state: Path, *arguments: str) -> int:
    """Run the command on a state directory and return its exit status."""
    return cli.main(["maintenance", *arguments, "--path.state", str(state)])


def collect(state: Path | None, *, later: float = 0.0) -> CollectionResult:
    """Collect once, so many seconds from now."""
    context = Context(
        host=Host(), monotonic=time.monotonic, wall=lambda: time.time() + later, state=state
    )
    return attempt(MaintenanceCollector(MaintenanceCollector.Options(), context))


def values(result: CollectionResult, metric: Metric) -> dict[tuple[str, ...], float]:
    """Return the series of a metric."""
    return {sample.labels: sample.value for sample in result.samples if sample.metric is metric}


def test_it_is_set_shown_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The agent sees the maintenance with its reason and its end, and that it was called off."""
    assert values(collect(tmp_path), ACTIVE) == {(): 0.0}
    assert command(tmp_path, "on", "--for", "30m", "--reason", "new BIOS") == 0
    assert "(operator): new BIOS" in capsys.readouterr().out
    seen = collect(tmp_path)
    assert values(seen, ACTIVE) == {(): 1.0}
    assert values(seen, INFO) == {("operator", "new BIOS"): 1.0}
    assert values(seen, END)[()] == pytest.approx(time.time() + 1800, abs=60)
    assert command(tmp_path, "show") == 0
    assert "in maintenance until" in capsys.readouterr().out
    assert command(tmp_path, "off") == 0
    assert capsys.readouterr().out == "not in maintenance\n"
    assert values(collect(tmp_path), ACTIVE) == {(): 0.0}
    assert command(tmp_path, "off") == 0  # there is nothing to end, and it says so
    assert "no operator had put this node in maintenance" in capsys.readouterr().out


def test_it_ends_by_itself(tmp_path: Path) -> None:
    """After its end the node is in maintenance no more, whatever is in the file."""
    assert command(tmp_path, "on") == 0
    assert values(collect(tmp_path, later=7100), ACTIVE) == {(): 1.0}
    over = collect(tmp_path, later=7300)
    assert values(over, ACTIVE) == {(): 0.0}
    assert values(over, END) == {}


@pytest.mark.parametrize(("arguments", "named"), [
    (("on", "--for", "59s"), "--for: 59s is not between 1m and 30d"),
    (("on", "--for", "721h"), "--for: 721h is not between"),
    (("on", "--for", "soon"), '--for: "soon" is not a duration'),
    (("on", "--reason", "x" * 81), "--reason: must be one line of at most 80"),
    (("on", "--reason", "a\nb"), "--reason: must be one line"),
    (("off", "--for", "2h"), "--for and --reason are only for on"),
])  # fmt: skip
def test_bad_arguments_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    """What cannot be is refused by name as bad usage, and nothing is set."""
    assert command(tmp_path, *arguments) == 2
    assert capsys.readouterr().err.startswith(f"command line: {named}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("action", ["on", "off", "show"])
def test_no_state(action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A directory that is missing is named with its key, and not as a node without maintenance."""
    assert command(tmp_path / "none", action) == 1
    error = (
        f"{tmp_path}/none: No such file or directory; --path.state names the agent's directory\n"
    )
    assert capsys.readouterr().err == f"dshealthd maintenance {action}: {error}"


@pytest.mark.parametrize("arguments", [("--for", "1m"), ("--for", "30d"), ("--reason", "x" * 80)])
def test_the_longest_and_shortest(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    """A minute, thirty days, and a reason of a line of a terminal."""
    assert command(tmp_path, "on", *arguments) == 0
    assert values(collect(tmp_path), ACTIVE) == {(): 1.0}


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user")
def test_other_users_are_refused(public_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Who may not write to the state directory cannot set it, and reads who can."""
    os.seteuid(65534)
    try:
        status = command(public_path, "on")
    finally:
        os.seteuid(0)
    assert status == 1
    assert f"{public_path}/maintenance.json.new: Permission denied" in capsys.readouterr().err
    assert list(public_path.iterdir()) == []


@pytest.mark.parametrize("content", [
    "",
    "[]",
    "{",
    '{"begin": 1, "end": "soon", "reason": ""}',
    '{"begin": 1, "end": Infinity, "reason": ""}',
    "[" * 100_000,
])  # fmt: skip
def test_a_damaged_file_is_unknown(tmp_path: Path, content: str) -> None:
    """A file that is not understood says neither yes nor no, and the error names it."""
    place = tmp_path / FILES["operator"]
    place.write_text(content, encoding="utf-8")
    seen = collect(tmp_path)
    assert (seen.outcome, seen.reason) == (CollectionOutcome.ERROR, Reason.MALFORMED)
    assert str(place) in seen.detail
    assert seen.samples == ()
    assert command(tmp_path, "show") == 1


def test_sources_are_apart(tmp_path: Path) -> None:
    """What Slurm says stands when an operator ends his own, and holds where that is damaged."""
    now = time.time()
    slurm = Maintenance(now, now + 3600, "drained: PSU")
    (tmp_path / FILES["slurm"]).write_bytes(slurm.encode())
    assert command(tmp_path, "on") == 0
    assert set(values(collect(tmp_path), INFO)) == {("operator", ""), ("slurm", "drained: PSU")}
    assert command(tmp_path, "off") == 0
    assert set(values(collect(tmp_path), INFO)) == {("slurm", "drained: PSU")}
    (tmp_path / FILES["operator"]).write_text("{", encoding="utf-8")
    assert values(collect(tmp_path), ACTIVE) == {(): 1.0}


def test_a_hung_disk_is_a_fault(tmp_path: Path) -> None:
    """A state directory under quarantine is left alone, and nothing is said of the node."""
    hung = Fault(str(tmp_path), Reason.TIMEOUT, "does not answer")
    context = Context(host=Host(), state=tmp_path, entering={str(tmp_path): hung}.get)
    seen = attempt(MaintenanceCollector(MaintenanceCollector.Options(), context))
    assert (seen.samples, seen.faults) == ((), (hung,))


def test_nothing_is_said_without_a_state_directory() -> None:
    """A single collection, which is to leave no trace, has no state to read."""
    assert collect(None).outcome is CollectionOutcome.NOT_AVAILABLE


def test_files_are_read_as_written() -> None:
    """What is written is read again as it was."""
    word = Maintenance(1.5, 2.5, "ü")
    assert parse(word.encode().decode()) == word
