"""The judge as a service: when it judges, what it exports, what outlives it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dshealthd.collectors.infiniband import UP
from dshealthd.collectors.job_environment import RANKS
from dshealthd.collectors.kernel_log import EVENTS
from dshealthd.collectors.open_files import LIMIT, OPEN
from dshealthd.config import config as configuration
from dshealthd.core import state_writer
from dshealthd.core.collector import Fault, Reason, Sample
from dshealthd.core.options import ConfigError
from dshealthd.core.result import CollectionOutcome, CollectionResult, not_available
from dshealthd.core.snapshot import Snapshot
from dshealthd.findings import attempts, catalogue, judge, judgement, limits
from dshealthd.findings.finding import Finding, Sign, State
from dshealthd.findings.judge import FINDING, JUDGED, Judge, exported
from dshealthd.jobs.hangs.classes import Culprit, HangClass
from dshealthd.jobs.hangs.judge import Standstill
from dshealthd.nvrx.fitness import fitness
from tests.findings.test_episodes import sign
from tests.waiting import eventually

DELAY = 0.3
MAX_EXPORTED = 100

SOURCE = "open_files"


class Node:
    """A node with one source and a clock of the test's own."""

    def __init__(self, state: Path | None = None) -> None:
        """Begin with nothing read."""
        self.now = 1000.0
        self.snapshot = Snapshot(lambda: self.now, lambda: self.now + 1e9)
        self.snapshot.expect(SOURCE, 60.0)
        self.judge = Judge(
            self.snapshot,
            lambda: (),
            lambda: ("n1", ""),
            state,
            lambda: self.now,
            lambda: self.now + 1e9,
            lambda: self.standstills,
        )
        self.standstills: dict[str, Standstill] = {}

    def read(self, used: float) -> None:
        """Put a result in which a share of the system's open files is in use."""
        labels = ("system", "")
        samples = (OPEN(used * 1000, *labels), LIMIT(1000.0, *labels))
        self.snapshot.put(SOURCE, CollectionResult(CollectionOutcome.OK, samples, duration=0.0))

    def fail(self) -> None:
        """Put a result that could not read its source."""
        result = CollectionResult(
            CollectionOutcome.ERROR, (), duration=0.0, reason=Reason.IO_ERROR, detail="broken"
        )
        self.snapshot.put(SOURCE, result)

    def over(self, used: float, seconds: float = 40.0) -> None:
        """Read the same for some seconds, and judge each time."""
        for _ in range(int(seconds / 5) + 1):
            self.read(used)
            self.judge.judge()
            self.now += 5

    def found(self) -> list[str]:
        """Return the findings' names."""
        return [finding.name for finding in self.judge.verdict.findings]


@pytest.fixture
def node() -> Node:
    """Return a node that keeps nothing."""
    return Node()


def loaded(text: str, tmp_path: Path) -> configuration.Config:
    """Return the configuration in a file with this text."""
    file = tmp_path / "dshealthd.toml"
    file.write_text(text)
    return configuration.load(file)


GPUS: dict[str, object] = {"energy": {}, "reset": {}, "returned": {}, "most": 0, "settled": 0}


def foreign(**changes: Any) -> str:
    """Return a state file as the judge writes it, but for these fields."""
    ours = {"version": 1, "time": 5.0, "findings": [], "past": {}, "gpus": GPUS}
    return json.dumps(ours | changes)


def _any(*values: Any) -> tuple[Any, ...]:
    """Return values of any kinds."""
    return values


def test_a_hang_is_a_finding_as_the_detector_sees_it(node: Node) -> None:
    """From its verdict alone, until that is over; it began with the last heartbeat."""
    node.standstills["run-1"] = Standstill(
        job="run-1",
        reason=HangClass.PROCESS,
        culprits=((3, Culprit.STOPPED),),
        ranks=(),
        since=1e9 + 400.0,
        overdue=50.0,
    )
    node.over(0.1)
    (finding,) = node.judge.verdict.findings
    (entry,) = json.loads(node.judge.history())["entries"]
    assert (finding.name, finding.training_job) == ("JobHang", "run-1")
    assert finding.since == entry["begin"] == 1e9 + 400.0
    assert (finding.reason, finding.value) == ("rank 3 is stopped (SIGSTOP)", 50.0)
    node.standstills.clear()
    node.over(0.1)
    assert node.found() == []


def test_finding_is_exported_while_it_lasts(node: Node) -> None:
    """The series has all that the alert and its routes need, and ends with the finding."""
    node.over(0.95)
    (finding, *_), judged = list(node.judge.samples()), list(node.judge.samples())[-1]
    assert finding.metric is FINDING
    assert dict(zip(FINDING.dimensions, finding.labels, strict=True)) == {
        "finding": "HostLimitNear",
        "symptom": "open-files",
        "component": "node",
        "part": "the system",
        "reason": "open files",
        "severity": "warning",
        "training_job": "",
    }
    assert (judged.metric, judged.value) == (JUDGED, node.now - 5 + 1e9)
    node.over(0.1, 0)
    assert FINDING not in {sample.metric for sample in node.judge.samples()}


def test_a_held_sign_is_watched_and_not_exported(node: Node) -> None:
    """Whoever reads the verdict sees what is coming; no alert does."""
    node.over(0.95, 10)
    (sign,) = node.judge.verdict.watched
    assert (sign.part, sign.hold_seconds, node.found()) == ("the system", 30.0, [])
    assert FINDING not in {sample.metric for sample in node.judge.samples()}
    node.over(0.95)
    assert node.judge.verdict.watched == ()


def test_nothing_is_exported_before_the_first_judgement() -> None:
    """An agent that has judged nothing claims no health."""
    assert list(Node().judge.samples()) == []


def test_node_that_was_not_judged_is_unknown(node: Node) -> None:
    """Neither an agent whose collectors have not started, nor one whose samples nobody has judged,
    knows that the node is well; it is ready once each source was judged.
    """
    node.snapshot.forget(SOURCE)
    states = [(node.judge.verdict.state, node.judge.unready)]
    node.judge.judge()
    states.append((node.judge.verdict.state, node.judge.unready))
    node.snapshot.expect(SOURCE, 60.0)
    node.judge.judge()
    states.append((node.judge.verdict.state, node.judge.unready))
    node.read(0.1)
    states.append((node.judge.verdict.state, node.judge.unready))
    node.judge.judge()
    states.append((node.judge.verdict.state, node.judge.unready))
    assert states == [
        (State.UNKNOWN, "no collector runs"),
        (State.UNKNOWN, "no collector runs"),
        (State.UNKNOWN, "no result yet: open_files"),
        (State.UNKNOWN, "not judged yet"),
        (State.OK, ""),
    ]


def defect() -> tuple[Sample, ...]:
    """Fail where samples are read."""
    message = "a defect"
    raise LookupError(message)


def test_first_judgement_that_fails_is_no_judgement(node: Node) -> None:
    """A defect at the start leaves the node unknown, unready, and its fitness unknown."""
    node.read(0.1)
    node.judge._own = defect
    with pytest.raises(LookupError, match="a defect"):
        node.judge.judge()
    assert (node.judge.verdict.state, node.judge.unready) == (State.UNKNOWN, "not judged yet")
    assert fitness(node.judge.verdict).fit is None


def test_unread_source_is_unknown_while_its_finding_waits(node: Node) -> None:
    """NVML that cannot be read is unknown at once, and later the one finding that says why."""
    node.snapshot.expect("gpu", 60.0)
    failed = CollectionResult(
        CollectionOutcome.ERROR, (), duration=0.0, reason=Reason.VERSION_MISMATCH, detail="18"
    )
    node.read(0.1)
    node.snapshot.put("gpu", failed)
    node.judge.judge()
    assert node.judge.verdict.state is State.UNKNOWN
    for _ in range(60):
        node.now += 5
        node.read(0.1)
        node.snapshot.put("gpu", failed)
        node.judge.judge()
        assert node.found()
    assert node.found() == ["NvmlBroken"]


def test_a_call_that_hangs_is_unknown_before_it_is_a_finding(node: Node) -> None:
    """A GPU whose call has just timed out is unread; that NVML hangs is not yet said."""
    node.snapshot.expect("gpu", 60.0)
    node.read(0.1)
    faults = (Fault("GPU 3", Reason.TIMEOUT, "no answer within 10 s"),)
    result = CollectionResult(CollectionOutcome.OK, (), faults=faults, duration=0.0)
    node.snapshot.put("gpu", result)
    node.judge.judge()
    assert node.found() == ["CollectorFailing"]
    assert node.judge.verdict.state is State.UNKNOWN


def test_unreadable_source_ends_no_finding(node: Node) -> None:
    """A limit that was nearly reached is not far away because it cannot be read any more."""
    node.over(0.95)
    node.fail()
    node.judge.judge()
    assert "HostLimitNear" in node.found()
    assert node.judge.verdict.state is State.UNKNOWN
    node.over(0.1, 0)
    assert node.found() == []


@pytest.mark.parametrize("part", ["infiniband mlx5_3", "infiniband mlx5_3 port 1"])
def test_port_that_cannot_be_read_has_not_come_up(part: str, node: Node) -> None:
    """A port stays down while it, or its device, cannot be read; other ports can be."""
    node.read(0.1)
    node.snapshot.expect("infiniband", 60.0)

    def judge(*found: Any, seconds: int) -> None:
        samples = tuple(one for one in found if not isinstance(one, Fault))
        faults = tuple(one for one in found if isinstance(one, Fault))
        for _ in range(seconds // 5):
            result = CollectionResult(CollectionOutcome.OK, samples, faults=faults, duration=0.0)
            node.snapshot.put("infiniband", result)
            node.judge.judge()
            node.now += 5

    judge(UP(1.0, "mlx5_3", "1"), seconds=60)
    judge(UP(0.0, "mlx5_3", "1"), seconds=60)
    judge(Fault(part, Reason.IO_ERROR, "broken"), UP(1.0, "mlx5_4", "1"), seconds=900)
    assert "FabricPortDown" in node.found()
    judge(UP(1.0, "mlx5_3", "1"), seconds=900)
    assert "FabricPortDown" not in node.found()


def test_source_that_stays_unread_is_told(node: Node) -> None:
    """The node is unknown at once; people are told after five minutes, until it is read again."""

    def told() -> list[tuple[str, ...]]:
        node.judge.judge()
        return [each.labels for each in node.judge.samples() if each.metric is FINDING]

    node.fail()
    assert told() == []
    assert node.judge.verdict.state is State.UNKNOWN
    node.now += 290
    node.fail()
    assert told() == []
    node.now += 20
    node.fail()
    assert told() == [
        ("CollectorFailing", "collector-failing", "node", SOURCE, "io_error", "unknown", "")
    ]
    node.read(0.1)
    assert told() == []


def test_failed_judgement_is_unknown(node: Node) -> None:
    """A defect in a rule leaves no node healthy: its state is unknown, and its judge looks
    stalled.
    """
    node.over(0.1)
    judged = list(node.judge.samples())[-1]
    node.judge._own = defect
    with pytest.raises(LookupError, match="a defect"):
        node.judge.judge()
    states = [node.judge.verdict.state]
    node.judge._running = True
    assert node.judge.status()["state"] == "failing"
    node.now += 60
    assert list(node.judge.samples())[-1].value == judged.value
    node.judge._own = lambda: ()
    node.over(0.1, 0)
    states.append(node.judge.verdict.state)
    assert states == [State.UNKNOWN, State.OK]


def test_exported_findings_are_bounded() -> None:
    """The worst are exported, and the others counted."""
    worst = sign("the worst")
    findings = [worst, *(sign(f"GPU {n}", severity=State.WARNING) for n in range(MAX_EXPORTED + 4))]
    samples = list(exported(findings))
    assert sum(sample.metric is FINDING for sample in samples) == MAX_EXPORTED
    assert samples[0].labels[3] == "the worst"
    assert samples[-1].value == 5.0


async def test_new_sample_is_judged_within_a_second(tmp_path: Path, node: Node) -> None:
    """The judge looks for new samples by itself; no request is needed."""
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.95, 35)
    node.read(0.1)
    await eventually(lambda: node.found() == [])
    await node.judge.close()


async def test_judgement_waits_for_what_is_new(tmp_path: Path, node: Node) -> None:
    """A result that says the same as before costs no judgement; one that differs brings one."""
    await node.judge.apply(loaded("", tmp_path))
    node.read(0.1)
    await eventually(lambda: any(sample.metric is JUDGED for sample in node.judge.samples()))
    judged = []
    node.judge.judge = lambda: judged.append(node.now)  # type: ignore[method-assign] # counts
    node.read(0.1)
    await asyncio.sleep(3 * DELAY)
    assert judged == []
    node.read(0.2)
    await eventually(lambda: len(judged) == 1)
    await node.judge.close()


async def test_the_past_is_written_every_five_minutes(
    tmp_path: Path, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And at once when a finding begins."""
    await node.judge.apply(loaded("", tmp_path))
    written: list[float] = []
    monkeypatch.setattr(node.judge._file, "save", lambda _content: written.append(node.now))
    for node.now in (1000.0, 1299.0, 1300.0, 1599.0):
        node.read(0.1)
        node.judge.judge()
    assert written == [1000.0, 1300.0]
    for node.now in (1600.0, 1630.0):
        node.read(0.95)
        node.judge.judge()
    assert written[2:] == [1600.0, 1630.0]
    await node.judge.close()


async def test_hold_ends_without_a_new_sample(tmp_path: Path, node: Node) -> None:
    """A sign that lasts becomes a finding when its hold is over, not with the next change."""
    await node.judge.apply(loaded("", tmp_path))
    node.read(0.95)
    await eventually(lambda: node.judge.verdict.findings == () and node.judge._timer is not None)
    node.now += 30
    await eventually(lambda: node.found() == ["HostLimitNear"])
    await node.judge.close()


async def test_reload_changes_limits(tmp_path: Path, node: Node) -> None:
    """A limit that is lowered applies to the samples that are there."""
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.6)
    assert node.found() == []
    await node.judge.apply(loaded("[findings.limits]\nlimit_used_ratio = 0.5", tmp_path))
    node.over(0.6)
    assert node.found() == ["HostLimitNear"]
    (finding,) = node.judge.verdict.findings
    assert (finding.limit, finding.limit_source) == (0.5, "findings.limits.limit_used_ratio")
    await node.judge.close()


@pytest.mark.parametrize(("line", "error"), [
    ("limit_used_ratoi = 0.5", "limit_used_ratoi: unknown key; did you mean limit_used_ratio?"),
    ("limit_used_ratio = 1.5", "limit_used_ratio: must be at most 1, not 1.5"),
    ('limit_used_ratio = "80%"', "limit_used_ratio: must be a number, not a string (80%)"),
    ("clock_offset_seconds = 2", "clock_offset_seconds: must be a duration"),
    ('filesystem_free_bytes = "1s"', 'filesystem_free_bytes: "1s" is not a size'),
])  # fmt: skip
def test_wrong_limit_is_refused(line: str, error: str, tmp_path: Path) -> None:
    """A limit that is unknown, of another unit or out of bounds is named, with what would fit."""
    with pytest.raises(ConfigError) as refusal:
        loaded(f"[findings.limits]\n{line}", tmp_path)
    assert f"findings.limits.{error}" in str(refusal.value)


async def test_findings_outlive_a_restart(tmp_path: Path) -> None:
    """The next agent has the findings before its collectors have run, with the time they began."""
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.95)
    (before,) = node.judge.verdict.findings
    await node.judge.close()
    later = Node(tmp_path)
    later.now = node.now + 300
    later.snapshot.expect("disk", 60.0)
    await later.judge.load()

    def same() -> bool:
        found = {one.alert: one for one in later.judge.verdict.findings}
        exported = {one.labels[0] for one in later.judge.samples() if one.metric is FINDING}
        after = found[before.alert]
        return (after.since, after.severity, exported) == (
            *(before.since, before.severity),
            {"HostLimitNear"},
        )

    assert same()
    assert later.judge.unready
    await later.judge.apply(loaded("", tmp_path))
    later.judge.judge()
    assert same()
    # Not even what reads its own source ends it while another one may have a part in it.
    later.over(0.1, 0)
    assert same()
    later.snapshot.put("disk", not_available("no disk"))
    later.over(0.1, 0)
    assert later.found() == []
    await later.judge.close()


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
async def test_an_adapter_that_failed_before_a_boot(
    boot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its driver says so once: that counts for an hour, and until the power cycle that mends it."""

    def read(node: Node, lines: float) -> None:
        node.read(0.1)
        node.snapshot.expect("kernel_log", 60.0)
        samples = (EVENTS(lines, "adapter_failure", "0000:17:00.0"), RANKS(8.0, "run-1", "run-1"))
        result = CollectionResult(CollectionOutcome.OK, samples[: 1 + (lines > 0)], duration=0.0)
        node.snapshot.put("kernel_log", result)
        node.judge.judge()

    for module in (judge, attempts):
        monkeypatch.setattr(module, "current_boot", lambda: ("boot-1", 5.0))
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    read(node, 0.0)
    for _ in range(60):
        node.now += 5
        read(node, 1.0)
    assert node.found() == ["AdapterTrouble"]
    await node.judge.close()
    for module in (judge, attempts):
        monkeypatch.setattr(module, "current_boot", lambda: (boot, 5.0))
    later = Node(tmp_path)
    later.now = node.now + 300
    await later.judge.apply(loaded("", tmp_path))
    assert later.found()[0] == "AdapterTrouble"
    read(later, 0.0)
    assert later.found() == (["AdapterTrouble"] if boot == "boot-1" else [])
    await later.judge.close()


@pytest.mark.parametrize("end", ["stopped", "defect", "killed", "powered off"])
async def test_only_crashes_are_a_crash_loop(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ends by a signal, as a rollout causes, are none, nor are three of a node that goes down
    with its agent; three by a defect or by SIGKILL are.

    An agent that is killed right after its start, before anything is due to be saved, counts too.
    """
    now = 1000.0
    for number in range(4):
        if end == "powered off":
            for module in (judge, attempts):
                boot = f"boot-{number}"
                monkeypatch.setattr(module, "current_boot", lambda boot=boot: (boot, 5.0))
        node = Node(tmp_path)
        node.now = now
        await node.judge.apply(loaded("", tmp_path))
        node.read(0.1)
        node.judge.judge()
        await state_writer.wait_until_written(60)
        if end == "stopped":
            node.judge.record_stop()
        kept = (tmp_path / "findings.json").read_bytes()
        await node.judge.close()
        if end == "killed":
            (tmp_path / "findings.json").write_bytes(kept)
        now += 100
    crashed = end in {"defect", "killed"}
    assert node.found() == (["AgentTrouble"] if crashed else [])
    assert ('"crash"' in node.judge.history().decode()) == crashed


async def test_a_request_before_the_start_costs_no_past(tmp_path: Path) -> None:
    """What asks for the verdict before the file is read neither replaces it nor holds its findings
    anew, and hears that nothing is known.
    """
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    node.over(0.95)
    await node.judge.close()
    kept = (tmp_path / "findings.json").read_bytes()
    later = Node(tmp_path)
    later.now = node.now + 3
    later.read(0.95)
    assert later.judge.verdict.state is State.UNKNOWN
    await state_writer.wait_until_written(60)
    assert (tmp_path / "findings.json").read_bytes() == kept
    await later.judge.apply(loaded("", tmp_path))
    later.judge.judge()
    assert later.found() == ["HostLimitNear"]
    await later.judge.close()


@pytest.mark.parametrize("content", [
    *("", "{", "[]", "null", '"x"', "7", "\0\xff", "[" * 100_000, '{"version": 0}'),
    *(foreign(time=time) for time in _any("x", None, [], "1e400", -1.0, 1e300)),
    *(
        foreign().replace("5.0", number)
        for number in ("NaN", "Infinity", "1e400", "1" + 400 * "0")
    ),
    *(foreign(past=past) for past in _any(None, [], [1], "x", {"x": {}}, {"zzz x 60 ": {}})),
    *(
        foreign(past={"mean x 60 ": rows})
        for rows in _any([], None, {"dimensions": 5, "series": []})
    ),
    *(foreign(gpus=gpus) for gpus in _any(None, [], {}, {**GPUS, "energy": [1]})),
    *(foreign(gpus={**GPUS, "most": most}) for most in _any(None, "1", [], -1)),
    *(foreign(findings=found) for found in _any([{}], [[]], ["x"], [None], {"a": 1}, 5)),
    foreign(findings=[{"finding": [], "keep": 1, "age": 1, "unseen": 1}]),
    foreign(findings=[{"finding": {}, "keep": 10**400}]),
])  # fmt: skip
async def test_invalid_file_begins_anew_and_says_so(content: str, tmp_path: Path) -> None:
    """A state file that is corrupt, or JSON that no agent wrote, costs the past, not the judgement,
    and the status tells.
    """
    (tmp_path / "findings.json").write_text(content)
    node = Node(tmp_path)
    await node.judge.apply(loaded("", tmp_path))
    assert "begins without a past" in node.judge.status()["detail"]
    node.over(0.95)
    assert node.found() == ["HostLimitNear"]
    await node.judge.close()


def test_limits_have_sources() -> None:
    """Each limit that is no option says in a comment where it comes from."""
    marked = re.compile(r"\[[RSDO]\]")
    text = Path(limits.__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"((?: +# .*\n)+)((?: +\w+: ClassVar.*\n)+)", text)
    fixed = [name for _, block in blocks for name in re.findall(r"(\w+): ClassVar", block)]
    assert sorted(fixed) == sorted(limits.all_limits().keys() - limits.OPTIONS)
    assert [comment for comment, _ in blocks if not marked.search(comment)] == []


def test_a_rule_that_fails_hides_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other rules judge on, and what the failing one had found stays. The node is unknown, and
    page, metric and log name the rule, the log once.
    """

    def broken(_series: object, _wall: float) -> Iterator[Sign]:
        yield Sign("DshealthdAdapterTrouble", value=1 / len(()))

    def seen(_series: object, _wall: float) -> Iterator[Sign]:
        yield Sign("DshealthdAdapterTrouble", part="mlx5_0", hold=0.0, mild=True)

    node = Node()
    node.over(0.95)
    assert node.found() == ["HostLimitNear"]
    place = next(place for place, rule in enumerate(judgement.RULES) if rule.__name__ == "files")
    broken.__module__, broken.__name__ = "dshealthd.findings.host", "files"
    rules = [*judgement.RULES[:place], broken, *judgement.RULES[place + 1 :], seen]
    monkeypatch.setattr(judgement, "RULES", tuple(rules))
    node.over(0.1, 400.0)
    assert sorted(node.found()) == ["AdapterTrouble", "CollectorFailing", "HostLimitNear"]
    assert node.judge.verdict.state is State.UNKNOWN
    parts = {sample.labels[3] for sample in node.judge.samples() if sample.metric is FINDING}
    assert "the rule host.files" in parts
    assert [record.message.splitlines()[0] for record in caplog.records] == [
        "findings: the rule host.files failed:"
    ]
    assert "ZeroDivisionError" in caplog.text
    monkeypatch.undo()
    node.over(0.1)
    assert node.found() == []


def test_a_figure_that_cannot_be_said_hides_no_other_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sign that is no finding costs itself: those before and after it, of other jobs, are
    there.
    """

    def signs(_series: object, _wall: float) -> Iterator[Sign]:
        values: Any = (("first", 1.0), ("odd", "x"), ("last", 1.0))
        for job, value in values:
            yield Sign("DshealthdJobStalled", job=job, value=value, hold=0.0, labels={"gpu": job})

    def says(sign: Sign, *given: Any) -> Finding:
        return found(dataclasses.replace(sign, value=float(sign.value or 0.0)), *given)

    found = catalogue.finding_of
    monkeypatch.setattr(catalogue, "finding_of", says)
    monkeypatch.setattr(judgement, "RULES", (signs,))
    node = Node()
    node.over(0.1)
    jobs = {one.training_job for one in node.judge.verdict.findings if one.training_job}
    assert jobs == {"first", "last"}
