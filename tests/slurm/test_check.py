"""What one check of a node does with what its agent says."""

from __future__ import annotations

import contextlib
import os
import stat
import syslog
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from dshealthd.cli import main as cli
from dshealthd.slurm import command
from dshealthd.slurm.agent import AgentSilent, AgentVerdict
from dshealthd.slurm.check import (
    Busy,
    CheckReport,
    NodeCheck,
    NodeCheckResult,
    Streaks,
    locked_streaks,
)
from dshealthd.slurm.options import DRAIN_FOR, SlurmOptions
from dshealthd.symptoms import all_symptoms
from tests.slurm.cluster import NOW, Cluster, node, silent
from tests.waiting import PATIENT

BAD = AgentVerdict({"gpu-lost gpu=3": "gpu-lost gpu=3 xid=79"}, clean=False)
CLEAN = AgentVerdict({}, clean=True)
UNKNOWN = AgentVerdict({}, clean=False)
STARTING = AgentVerdict({}, clean=False, ready=False)
REASON = "dshealthd: gpu-lost gpu=3 xid=79"


class Node:
    """A node with its streaks, checked again and again."""

    def __init__(self, *nodes: object, **options: object) -> None:
        # nodes
        self.cluster = Cluster(*(nodes or (node("n1"), node("n2"))))  # type: ignore[arg-type]
        self.streaks = Streaks()
        self.options = SlurmOptions(**options)  # type: ignore[arg-type] # as given
        self.slept = 0.0
        self.now = 1e6

    def check(
        self, verdict: AgentVerdict | AgentSilent, *, prolog: bool = False, after: float = 60.0
    ) -> NodeCheckResult:
        """Run one check, so many seconds after the last one."""
        self.now += after

        def ask() -> AgentVerdict:
            if isinstance(verdict, AgentSilent):
                raise verdict
            return verdict

        def sleep(seconds: float) -> None:
            self.slept += seconds
            self.now += seconds

        check = NodeCheck(
            self.options, "n1", ask, self.cluster, self.streaks, sleep, lambda: self.now
        )
        return (check.insistently() if prolog else check.once()).result


def times(count: int, function: Callable[[], NodeCheckResult]) -> list[NodeCheckResult]:
    """Return the results of several checks."""
    return [function() for _ in range(count)]


def test_drains_for_alerts_that_exist() -> None:
    """Each alert that drains by default is one of ours, critical, and of the node or a GPU."""
    alerts = {alert.name: alert for entry in all_symptoms().values() for alert in entry.findings}
    for name in DRAIN_FOR:
        assert alerts[name].severity == "critical"
        assert alerts[name].component in {"gpu", "node"}


def test_two_checks_drain() -> None:
    """The first finding drains nothing, the second in a row does, with the whole reason."""
    node_ = Node()
    assert node_.check(BAD) is NodeCheckResult.BAD
    assert not node_.cluster.calls
    assert node_.check(BAD) is NodeCheckResult.DRAINED
    assert node_.cluster.table["n1"].reason == REASON


def test_checks_at_one_time_are_one() -> None:
    """Of several jobs that end together, the epilogs see one reading of the agent: no node is
    drained for that alone. A reading later, it is; also after a reboot, which resets the clock.
    """
    node_ = Node()
    results = [node_.check(BAD, after=after) for after in (60.0, 0.1, 0.1, 5.7)]
    assert set(results) == {NodeCheckResult.BAD}
    assert not node_.cluster.calls
    assert node_.check(BAD, after=0.2) is NodeCheckResult.DRAINED
    node_ = Node()
    node_.check(BAD)
    assert node_.check(BAD, after=-1e6) is NodeCheckResult.DRAINED


@pytest.mark.parametrize(
    ("bad_checks", "result", "slept"),
    [(5, NodeCheckResult.DRAINED, 24.0), (6, NodeCheckResult.BAD, 24.0)],
)
def test_no_job_waits_for_more_than_five_looks(
    bad_checks: int, result: NodeCheckResult, slept: float
) -> None:
    """A prolog that would need more leaves the drain to the health check."""
    node_ = Node(bad_checks=bad_checks)
    assert node_.check(BAD, prolog=True) is result
    assert node_.slept == slept


@pytest.mark.parametrize(
    ("count", "more"), [(3, "gpu=0, gpu-lost gpu=1, gpu-lost gpu=2"), (4, "gpu=2, and 1 more")]
)
def test_a_reason_names_three_findings(count: int, more: str) -> None:
    """How many more there are is said: one is enough to find the others."""
    node_ = Node(bad_checks=1)
    found = {f"gpu-lost gpu={gpu}": f"gpu-lost gpu={gpu}" for gpu in range(count)}
    node_.check(AgentVerdict(found, clean=False))
    assert node_.cluster.table["n1"].reason.endswith(more)


def test_flapping_drains_nothing() -> None:
    """A finding that comes and goes, or is another each time, is no reason."""
    node_ = Node()
    other = AgentVerdict({"nvml-broken": "nvml-broken"}, clean=False)
    for verdict in (BAD, CLEAN, BAD, other, BAD, UNKNOWN, BAD, AgentSilent("dead"), BAD):
        assert node_.check(verdict) is not NodeCheckResult.DRAINED
    assert not node_.cluster.changes()


def test_agent_that_has_just_started_ends_no_streak() -> None:
    """It knows of nothing yet: a restart between two checks neither drains a node nor clears it."""
    node_ = Node()
    assert node_.check(STARTING) is NodeCheckResult.UNKNOWN
    results = [node_.check(verdict) for verdict in (BAD, STARTING, STARTING, BAD)]
    assert results == [
        NodeCheckResult.BAD,
        *[NodeCheckResult.UNKNOWN] * 2,
        NodeCheckResult.DRAINED,
    ]


def test_same_finding_without_its_xid() -> None:
    """What an Xid shows at one check, and NVML at the next one, is the same finding."""
    node_ = Node()
    node_.check(BAD)
    later = AgentVerdict({"gpu-lost gpu=3": "gpu-lost gpu=3"}, clean=False)
    assert node_.check(later) is NodeCheckResult.DRAINED


def test_silent_agent_drains_nobody() -> None:
    """However long an agent is dead."""
    node_ = Node()
    results = times(20, lambda: node_.check(AgentSilent("connection refused")))
    results += times(3, lambda: node_.check(AgentSilent("dead"), prolog=True))
    assert set(results) == {NodeCheckResult.UNKNOWN}
    assert not node_.cluster.calls


def test_reasons_of_others_stay() -> None:
    """Whatever an administrator, Slurm or another tool has set stays, drained or not."""
    for state, reason in (
        ("idle+drain", "bad cable"),
        ("idle+drain", "Prolog error"),
        ("down+not_responding", "Not responding"),
        ("idle+maintenance", ""),
        ("idle+reboot_requested", ""),
        ("idle+powering_up", ""),
        ("idle", "kept in mind"),
    ):
        node_ = Node(node("n1", state, reason), node("n2"))
        times(4, lambda node_=node_: node_.check(BAD))  # type: ignore[misc] # bound here
        assert not node_.cluster.changes(), state


def test_ours_is_not_set_again() -> None:
    """A drain of ours is left alone, so that its hour does not begin anew."""
    node_ = Node(node("n1", "idle+drain", REASON, NOW - 100), node("n2"))
    assert times(4, lambda: node_.check(BAD))[-1] is NodeCheckResult.DRAINED
    assert not node_.cluster.changes()


def test_prolog_looks_again() -> None:
    """Where there is a finding, and only there, a job waits for a second look of the agent."""
    node_ = Node()
    assert node_.check(CLEAN, prolog=True) is NodeCheckResult.CLEAN
    assert node_.slept == 0
    assert node_.check(BAD, prolog=True) is NodeCheckResult.DRAINED
    assert node_.slept == 6.0


def test_prolog_over_budget_lets_the_job_start() -> None:
    """A prolog that fails drains by itself, so that without budget it does not fail."""
    node_ = Node(node("n1"), node("n2", "idle+drain", REASON, NOW - 100))
    node_.cluster.now = NOW
    fresh = node(
        "n2", "idle+drain", REASON, 4e9
    )  # not before the real clock, which `NodeCheck` uses
    node_.cluster.table["n2"] = fresh
    assert node_.check(BAD, prolog=True) is NodeCheckResult.BAD
    assert node_.cluster.table["n1"].state.working
    assert "budget of 1" in node_.cluster.table["n1"].note


def test_note_goes_when_the_node_is_well() -> None:
    """What we wrote into the comment is taken back, and nothing is asked of Slurm after that."""
    node_ = Node(node("n1"), node("n2", "idle+drain", REASON, 4e9))
    times(2, lambda: node_.check(BAD))
    assert node_.cluster.table["n1"].note
    node_.check(CLEAN)
    assert not node_.cluster.table["n1"].note
    asked = len(node_.cluster.calls)
    times(30, lambda: node_.check(CLEAN))
    assert len(node_.cluster.calls) == asked


def test_silent_controller() -> None:
    """Without an answer from Slurm nothing is done, and nothing goes wrong."""
    node_ = Node()
    node_.cluster.before = silent
    assert times(3, lambda: node_.check(BAD))[-1] is NodeCheckResult.BAD
    assert times(20, lambda: node_.check(CLEAN))[-1] is NodeCheckResult.CLEAN


def test_unknown_node() -> None:
    """A node that Slurm does not know is left alone."""
    node_ = Node(node("n2"))
    assert times(3, lambda: node_.check(BAD))[-1] is NodeCheckResult.BAD
    assert not node_.cluster.changes()


def test_node_that_was_renamed() -> None:
    """The note on its former name is not searched for, and nothing goes wrong."""
    node_ = Node(node("n1"), node("n2", "idle+drain", REASON, 4e9))
    times(2, lambda: node_.check(BAD))
    del node_.cluster.table["n1"]
    assert node_.check(CLEAN) is NodeCheckResult.CLEAN


def test_kept(tmp_path: Path) -> None:
    """The streaks that one run counts the next one finds; a run that fails changes nothing."""
    place = tmp_path / "run"
    for expected in (1, 2):
        with locked_streaks(place, 0) as streaks:
            streaks.count_bad(["gpu-lost gpu=3"], 60.0 * expected)
            assert streaks.longest == expected
    with contextlib.suppress(KeyError), locked_streaks(place, 0) as streaks:
        streaks.bad = {}
        raise KeyError
    with locked_streaks(place, 0) as streaks:
        assert streaks.bad == {"gpu-lost gpu=3": 2}
        streaks.count_bad(["gpu-lost gpu=3", "gpu-lost gpu=5"], 180.0)
        assert streaks.longest == 3
        streaks.count_bad(["gpu-lost gpu=4"], 240.0)
        assert streaks.longest == 1


def test_one_at_a_time(tmp_path: Path) -> None:
    """A second check of the node does not begin."""
    with (
        locked_streaks(tmp_path / "run", 0),
        pytest.raises(Busy),
        locked_streaks(tmp_path / "run", 0.2),
    ):
        pass


def test_a_check_that_ends_is_waited_for(tmp_path: Path) -> None:
    """A job's check begins once the one before it is done."""
    with contextlib.ExitStack() as other:
        other.enter_context(locked_streaks(tmp_path / "run", 0))
        threading.Timer(0.3, other.close).start()
        with locked_streaks(tmp_path / "run", PATIENT) as streaks:
            assert streaks.bad == {}


def test_garbage_begins_anew(tmp_path: Path) -> None:
    """A file of another version is no reason to fail, or to drain."""
    (tmp_path / "streaks.json").write_text('{"bad": [1]}')
    tmp_path.chmod(0o700)
    with locked_streaks(tmp_path, 0) as streaks:
        assert streaks.bad == {}


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o775, False), (0o757, False)])
def test_directory_of_somebody_else(tmp_path: Path, mode: int, *, used: bool) -> None:
    """A directory in which others can write is not used."""
    tmp_path.chmod(mode)
    with nullcontext() if used else pytest.raises(PermissionError), locked_streaks(tmp_path, 0):
        pass
    assert bool(os.listdir(tmp_path)) == used


def test_what_nobody_else_opens(tmp_path: Path) -> None:
    """Who can open the lock can hold it, and keep the node from being checked."""
    before = os.umask(0)
    try:
        with locked_streaks(tmp_path / "run", 0):
            pass
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("run", "run/lock")]
    assert modes == [0o700, 0o600]


def test_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job waits for another check; of health checks, the next one comes by itself. On a drained
    node, the prolog alone fails, with the status that its program takes for that; none fails
    because another check runs.
    """
    waits: list[float] = []
    checks: list[str] = []

    @contextlib.contextmanager
    def locked(_directory: Path, patience: float) -> Iterator[Streaks]:
        waits.append(patience)
        if len(waits) > 3:
            raise Busy
        yield Streaks()

    def drained(method: str) -> Callable[[NodeCheck], CheckReport]:
        def check(_check: NodeCheck) -> CheckReport:
            checks.append(method)
            return CheckReport(NodeCheckResult.DRAINED, "")

        return check

    monkeypatch.setattr(command, "locked_streaks", locked)
    for method in ("once", "insistently"):
        monkeypatch.setattr(NodeCheck, method, drained(method))
    hooks = ("health", "prolog", "epilog", "prolog")
    statuses = [cli.main(["slurm", hook, "--slurm.maintenance", "false"]) for hook in hooks]
    assert (waits, statuses) == ([0.0, 8.0, 8.0, 8.0], [0, 100, 0, 0])
    assert checks == ["once", "insistently", "once"]
    program = Path(__file__).parents[2] / "deploy" / "slurm" / "dshealthd-prolog"
    assert "-ne 100 ]" in program.read_text("utf-8")


def test_what_a_health_check_repeats_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without an agent is checked every minute: the log says so once, a job's epilog
    again.
    """
    logged: list[int] = []
    monkeypatch.setattr(syslog, "syslog", lambda priority, _: logged.append(priority))
    flags = ("--slurm.run-directory", str(tmp_path / "run"), "--slurm.maintenance", "false")
    for hook in ("health", "health", "epilog", "health"):
        assert cli.main(["slurm", hook, "--web.listen-address", "127.0.0.1:1", *flags]) == 0
    assert logged == [syslog.LOG_WARNING, syslog.LOG_DEBUG, syslog.LOG_WARNING, syslog.LOG_DEBUG]
