"""What the report says to people, programs and bug reports."""

from __future__ import annotations

import datetime as dt
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dshealthd import findings
from dshealthd.cli import main as cli
from dshealthd.doctor import node
from dshealthd.doctor import report as callers
from dshealthd.doctor.check import Check, Result
from dshealthd.doctor.command import main
from dshealthd.doctor.examination import Examined, mark_accepted
from dshealthd.doctor.job import checks as job
from dshealthd.doctor.options import DoctorOptions, parse_accepted
from dshealthd.doctor.report import NodeReport, Report, parse_node, text
from dshealthd.doctor.snapshot_check import SnapshotCheck
from dshealthd.findings.finding import State
from dshealthd.findings.judgement import RULES
from dshealthd.status.paint import EXIT, Paint
from dshealthd.symptoms import all_symptoms

CRITICAL = Result(
    State.CRITICAL,
    "GPU 3 fell off the bus\x1b[2J",
    remedy="sudo reboot",
    value="7",
    limit="8",
    source="PCI",
    component="gpu 3",
)
WARNING = Result(State.WARNING, "1 < 2 & \x00 \ud800", component="gpu 4", slug="bad-link")
UNKNOWN = Result(State.UNKNOWN, "the log may not be read")
OK = Result(State.OK, "well")


def report(*results: Result, problem: str = "") -> Report:
    """Return a report with one check for each result."""
    checks = tuple(
        Examined("gpu-lost", f"check-{number}", "A title", (result,), 0.5)
        for number, result in enumerate(results)
    )
    return Report((NodeReport("node-1", checks, problem, source="agent"),), 1000.0, 1.5)


@pytest.mark.parametrize(
    ("results", "problem", "status"),
    [
        ((OK,), "", 0),
        ((OK, WARNING), "", 1),
        ((OK, WARNING, UNKNOWN), "", 3),
        ((OK, WARNING, UNKNOWN, CRITICAL), "", 2),
        ((), "no answer", 2),
    ],
)
def test_exit_status(results: tuple[Result, ...], problem: str, status: int) -> None:
    """0 ok, 1 warning, 2 critical, 3 unknown, as Nagios has it; the worst counts."""
    made = report(*results, problem=problem)
    assert (made.exit, made.document()["nodes"][0]["problem"]) == (status, problem or None)
    assert sorted(EXIT.values()) == [0, 1, 2, 3]


def test_text_has_the_worst_first_and_no_control_characters() -> None:
    """The worst finding comes first, with limit and remedy, and no control character."""
    lines = list(text(report(OK, WARNING, CRITICAL), Paint(color=False), verbose=False))
    shown = "\n".join(lines)
    assert shown.index("CRITICAL  check-2") < shown.index("WARNING   check-1")
    assert "Limit: 7 against 8 (PCI)" in shown
    assert "Runbook: dshealthd doctor --runbook bad-link" in shown, "of the finding, not its check"
    assert "Remedy: sudo reboot" in shown
    assert "Runbook: dshealthd doctor --runbook gpu-lost" in shown
    assert "\x1b" not in shown
    assert "well" not in shown
    assert "well" in "\n".join(text(report(OK), Paint(color=False), verbose=True))


def test_what_several_checks_say_is_said_once() -> None:
    """A cause in common, such as an agent that has just started, is one entry that names the
    checks; a different part or text is one of its own.
    """
    checks = [
        Examined("gpu-lost" if number else "disk-full", f"check-{number}", "", (result,), 0.5)
        for number, result in enumerate((UNKNOWN, UNKNOWN, CRITICAL, UNKNOWN, WARNING))
    ]
    made = Report((NodeReport("node-1", tuple(checks), source="agent"),), 1000.0, 1.5)
    shown = list(text(made, Paint(color=False), verbose=False))
    start = shown.index("  UNKNOWN   3 checks: the log may not be read")
    assert shown[start + 1] == "            Checks: check-0, check-1, check-3"
    assert shown[start + 2].startswith("  WARNING   check-4: ")
    assert shown[0] == "node-1  CRITICAL  0 of 5 checks OK"
    assert sum("Runbook" in line for line in shown) == 2
    same = Report((NodeReport("node-1", tuple(checks[1:4:2])),), 1000.0, 1.5)
    assert "Runbook: dshealthd doctor --runbook gpu-lost" in "\n".join(
        text(same, Paint(color=False), verbose=False)
    )


@pytest.mark.parametrize(("source", "end"), [("", ""), ("agent", ""), ("by hand", "; by hand")])
def test_headline_says_how_a_node_was_read(source: str, end: str) -> None:
    """The headline ends with the way in which a node was examined, if that is unusual."""
    shown = Report((NodeReport("node-1", (), source=source),), 1000.0, 1.5)
    headline = next(iter(text(shown, Paint(color=False), verbose=False)))
    assert headline.endswith(f"0 of 0 checks OK{end}")


def test_json_is_versioned_and_read_back() -> None:
    """Another node's document gives the same checks; another version is refused."""
    made = report(OK, WARNING, CRITICAL)
    document = json.loads(json.dumps(made.document()))
    assert (document["schema"], document["verdict"]) == (1, "critical")
    read = parse_node(document, "node-1").checks
    assert [one.results for one in read] == [one.results for one in made.nodes[0].checks]
    with pytest.raises(ValueError, match="version 2"):
        parse_node({**document, "schema": 2}, "node-1")
    document["nodes"][0]["checks"][0]["seconds"] = float("nan")  # as json.loads takes it
    with pytest.raises(ValueError, match="seconds is not a number"):
        parse_node(document, "node-1")


def test_accepted_findings_do_not_count_until_their_date() -> None:
    """A finding that is accepted with a reason is shown and does not count, to its last day."""
    entry = parse_accepted("check-0 gpu 3 until 2026-12-31: RMA 4711: ordered")
    assert entry == ("check-0", "gpu 3", dt.date(2026, 12, 31), "RMA 4711: ordered")
    checks = report(CRITICAL, WARNING).nodes[0].checks
    for day, outcome in ((31, State.OK), (30, State.OK)):
        found = mark_accepted(checks, [entry], dt.date(2026, 12, day))
        assert found[0].outcome is outcome
        assert found[1].outcome is State.WARNING
    assert mark_accepted(checks, [entry], dt.date(2027, 1, 1))[0].outcome is State.CRITICAL
    other = parse_accepted("check-0 gpu 5 until 2026-12-31: RMA")
    assert mark_accepted(checks, [other], dt.date(2026, 12, 1))[0].outcome is State.CRITICAL
    made = Report((NodeReport("node-1", tuple(found), source="agent"),), 0.0, 0.0)
    assert "accepted until 2026-12-31: RMA 4711" in "\n".join(
        text(made, Paint(color=False), verbose=False)
    )


def test_bad_acceptance_names_the_key(tmp_path: Path) -> None:
    """An entry without date or reason, or of a check that does not exist, is an error of its
    key.
    """
    for value, message in (
        ("gpus until tomorrow: x", "doctor.accept"),
        ("gpus until 2026-02-30: x", "2026-02-30 is not a date"),
        ("gpus until 2026-12-31", "CHECK [COMPONENT] until"),
    ):
        errors = list(DoctorOptions(accept=(value,)).check())
        assert [name for name, _ in errors] == ["accept"]
        assert message.removeprefix("doctor.") in f"accept {errors[0][1]}"
    file = tmp_path / "c.toml"
    file.write_text('[doctor]\naccept = ["gpuz until 2026-12-31: x"]\n')
    assert cli.main(["doctor", "--config.file", str(file)]) == 3


def test_bad_usage_is_unknown_and_not_critical(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong argument, key or name gives 3 with a text that names it."""
    for arguments, message in (
        (["--only", "gpuss"], "--only: gpuss: no such check; did you mean gpus?"),
        (["--hosts", "-oProxyCommand=x"], "--hosts"),
        (["--hosts=-oProxyCommand=x"], "not a valid node name"),
        (["--hosts", "slurm"], "SLURM_JOB_NODELIST"),
        (["--hosts", ""], "--hosts: "),
        (["--for", "nagios"], "invalid choice: 'nagios'"),
    ):
        try:
            status = cli.main(["doctor", *arguments])
        except SystemExit as end:
            status = int(str(end.code))
        assert status == 3, arguments
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("results", "status", "line"),
    [
        ((CRITICAL,) * 9, 1, "gpu-lost gpu=3"),
        ((UNKNOWN,), 0, "gpu-lost"),
        ((OK,), 0, "ok"),
    ],
)
def test_kubernetes(
    results: tuple[Result, ...], status: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container gets its status and its line; it does not fail for what is unknown."""
    assert callers.CALLERS["kubernetes"](report(*results)) == status
    assert capsys.readouterr().out == f"{line}\n"


def test_every_check_has_a_name_a_symptom_and_a_deadline() -> None:
    """Names are unique; each symptom exists, so that there is a runbook; deadlines are short."""
    checks: tuple[Check[Any], ...] = (*node.CHECKS, *job.CHECKS)
    assert len({check.name for check in checks}) == len(checks)
    known = all_symptoms()
    for check in checks:
        assert check.slug in known, check.name
        assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", check.name)
        assert 0 < check.deadline <= (10 if check in node.CHECKS else 30)
        assert check.title


def test_every_finding_is_taken_up_by_one_check() -> None:
    """A finding that the agent can have is said by exactly one check: none is lost."""
    assert RULES
    waiting = [check for check in node.CHECKS if isinstance(check, SnapshotCheck)]
    for slug, alert in alerts_of_findings():
        takers = [
            check.name for check in waiting if check.slug == slug and alert.startswith(check.alerts)
        ]
        assert len(takers) == 1, (alert, takers)


def alerts_of_findings() -> list[tuple[str, str]]:
    """Return slug and name of the alerts that findings know, from their sources."""
    sources = Path(findings.__path__[0]).glob("*.py")
    names = {name for file in sources for name in re.findall(r'"(Dshealthd\w+)"', file.read_text())}
    return [
        (symptom.slug, alert.name)
        for symptom in all_symptoms().values()
        for alert in symptom.findings
        if alert.name in names and alert.name != "DshealthdCollectorFailing"
    ]


def test_list_and_colors(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names every check, those of nodes by name; without a terminal nothing is colored."""
    assert cli.main(["doctor", "--list"]) == 0
    output = capsys.readouterr().out
    names = [check.name for check in job.CHECKS] + sorted(check.name for check in node.CHECKS)
    assert [line.split()[0] for line in output.splitlines()] == names
    assert "\x1b" not in output


def test_progress_on_a_terminal_alone() -> None:
    """While checks run a terminal shows which are awaited, and is wiped; a pipe gets nothing."""
    command = [sys.executable, "-m", "dshealthd", "doctor", "--only", "host-name,pcie-acs"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert process.returncode in {0, 1, 2, 3}
    assert b"/2 checks, waiting for " in shown
    assert shown.endswith(b"\r\x1b[K")
    done = subprocess.run(command, capture_output=True, timeout=200, check=False)
    assert done.stderr == b""


def _read(terminal: int) -> bytes:
    """Return what a terminal shows; nothing once nobody writes to it."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


def test_runbook_that_a_result_names(capsys: pytest.CaptureFixture[str]) -> None:
    """The command that a result names prints the runbook, on a node without an agent or network."""
    for check in node.CHECKS:
        assert main(["--runbook", check.slug]) == 0
        assert capsys.readouterr().out.startswith(f"# {all_symptoms()[check.slug].title}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--runbook", "nothing"])
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert "no runbook is called 'nothing'" in said
    assert [slug for slug in all_symptoms() if slug not in said] == []


def test_colors() -> None:
    """Green, yellow, red and magenta, each bold, where the terminal shows colors."""
    shown = [Paint(color=True)(state, "x") for state in State]
    assert dict(zip(State, shown, strict=True)) == {
        State.OK: "\x1b[1;32mx\x1b[0m",
        State.WARNING: "\x1b[1;33mx\x1b[0m",
        State.CRITICAL: "\x1b[1;31mx\x1b[0m",
        State.UNKNOWN: "\x1b[1;35mx\x1b[0m",
    }


@pytest.mark.parametrize("more", [0, 1])
def test_a_termination_message_is_bounded(capsys: pytest.CaptureFixture[str], more: int) -> None:
    """At 4096 bytes, of which Kubernetes shows no more."""
    part = "x" * (4096 - len("gpu-lost ") + more)
    assert callers.kubernetes(report(Result(State.CRITICAL, "lost", component=part))) == 1
    line = capsys.readouterr().out.removesuffix("\n")
    assert (len(line), line.endswith("...")) == (4096, bool(more))
